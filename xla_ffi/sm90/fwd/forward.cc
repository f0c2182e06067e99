#include "forward.h"

namespace vsa::sm90 {

std::string Forward(const ForwardParams& params, cudaStream_t stream) {
  switch (params.shape.tile_size) {
    case 64:
      return Forward64(params, stream);
    case 128:
    case 256:
      return Forward128(params, stream);
    default:
      return "tile size " + std::to_string(params.shape.tile_size) + ": want 64, 128 or 256";
  }
}

int64_t ForwardWorkspace(const Shape&) { return 4; }  // a ticket

}  // namespace vsa::sm90
