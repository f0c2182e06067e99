#include "forward.h"

#include "../../sm90/supported.h"

namespace vsa::sm100 {

std::string WhyNot(const Shape& shape) {
  const std::string reason = sm90::WhyNot(shape);
  if (!reason.empty()) return reason;
  if (shape.head_dim != 128) return "head_dim: got " + std::to_string(shape.head_dim) + ", want 128";
  if (shape.tile_size != 128) return "tile size: got " + std::to_string(shape.tile_size) + ", want 128";
  return "";
}

std::string Forward(const ForwardParams& params, cudaStream_t stream) {
  const std::string reason = WhyNot(params.shape);
  if (!reason.empty()) return reason;
  auto* const order = static_cast<int32_t*>(params.workspace);
  const std::string error = Order(params.shape, params.pairs, order, stream);
  return error.empty() ? Forward128(params, order, stream) : error;
}

int64_t ForwardWorkspace(const Shape& shape) { return shape.batch * shape.heads * shape.query_tiles * 4; }

}  // namespace vsa::sm100
