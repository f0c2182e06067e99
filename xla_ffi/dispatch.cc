// Which CUDA kernel runs a call.
#include "xla_ffi/dispatch.h"

#include <cuda_runtime_api.h>

#include "xla_ffi/sm90/bwd/backward.h"
#include "xla_ffi/sm90/fwd/forward.h"

namespace vsa::cuda {
namespace {

// Why no kernel runs on this device, or "".
std::string WhyNotHere() {
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
  const std::string reason = WhyNotHere();
  return reason.empty() ? sm90::Forward(params, stream) : reason;
}

std::string Backward(const BackwardParams& params, CUstream_st* stream) {
  const std::string reason = WhyNotHere();
  return reason.empty() ? sm90::Backward(params, stream) : reason;
}

int64_t ForwardWorkspace(const Shape& shape) { return sm90::ForwardWorkspace(shape); }
int64_t BackwardWorkspace(const Shape& shape) { return sm90::BackwardWorkspace(shape); }

}  // namespace vsa::cuda
