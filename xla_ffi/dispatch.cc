// Which CUDA kernel runs a call.
#include "xla_ffi/dispatch.h"

#include <cuda_runtime_api.h>

#include "xla_ffi/sm90/bwd/backward.h"
#include "xla_ffi/sm90/fwd/forward.h"

namespace vsa::cuda {
namespace {

// Why no kernel takes these shapes on this device, or "".
std::string WhyNot(const Shape& shape) {
  if (shape.dtype != DType::kFloat16 && shape.dtype != DType::kBFloat16) return "dtype: want float16 or bfloat16";
  if (shape.head_dim != 64 && shape.head_dim != 128) {
    return "head_dim: got " + std::to_string(shape.head_dim) + ", want 64 or 128";
  }
  if (shape.tile_size != 64 && shape.tile_size != 128 && shape.tile_size != 256) {
    return "tile size: got " + std::to_string(shape.tile_size) + ", want 64, 128 or 256";
  }
  // TMA coordinates are int32, and so are the numbers of items.
  constexpr int64_t kMost = int64_t{1} << 31;
  if (shape.batch * shape.query_length() >= kMost || shape.batch * shape.key_length() >= kMost ||
      shape.batch * shape.heads * (shape.query_tiles + shape.key_tiles) * 4 >= kMost ||
      shape.rows() * shape.width >= kMost) {
    return "sizes: got " + std::to_string(shape.batch) + " x " + std::to_string(shape.query_length()) + " queries, " +
           std::to_string(shape.key_length()) + " keys, " + std::to_string(shape.heads) +
           " heads, want fewer than 2^31 tokens over the batch and fewer than 2^29 tiles over batch and heads";
  }
  int device, major;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) {
    cudaGetLastError();  // it has been said: the next launch is not to blame
    return cudaGetErrorString(error);
  }
  if (major != 9) return "device: got compute capability " + std::to_string(major) + ".x, want 9.0";
  return "";
}

}  // namespace

std::string Forward(const ForwardParams& params, CUstream_st* stream) {
  const std::string reason = WhyNot(params.shape);
  return reason.empty() ? sm90::Forward(params, stream) : reason;
}

std::string Backward(const BackwardParams& params, CUstream_st* stream) {
  const std::string reason = WhyNot(params.shape);
  return reason.empty() ? sm90::Backward(params, stream) : reason;
}

int64_t ForwardWorkspace(const Shape& shape) { return sm90::ForwardWorkspace(shape); }
int64_t BackwardWorkspace(const Shape& shape) { return sm90::BackwardWorkspace(shape); }

}  // namespace vsa::cuda
