#include "forward.h"

#include "../supported.h"

namespace vsa::sm90 {

std::string Forward(const ForwardParams& params, cudaStream_t stream) {
  const std::string reason = WhyNot(params.shape);
  if (!reason.empty()) return reason;
  return params.shape.tile_size == 64 ? Forward64(params, stream) : Forward128(params, stream);
}

int64_t ForwardWorkspace(const Shape&) { return 4; }  // a ticket

}  // namespace vsa::sm90
