// Which CUDA kernel runs a call.
#include "xla_ffi/dispatch.h"

namespace vsa::cuda {
namespace {

std::string NoKernel(const Shape& shape) {
  return "no kernel for head_dim " + std::to_string(shape.head_dim) + ", tile size " +
         std::to_string(shape.tile_size);
}

}  // namespace

std::string Forward(const ForwardParams& params, CUstream_st*) { return NoKernel(params.shape); }
std::string Backward(const BackwardParams& params, CUstream_st*) { return NoKernel(params.shape); }
int64_t BackwardWorkspace(const Shape&) { return 0; }

}  // namespace vsa::cuda
