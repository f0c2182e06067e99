// XLA FFI handlers of the CUDA kernels; built only where nvcc is.  They launch on XLA's stream and return: nothing
// is allocated, waited for or remembered, so a call may be recorded in a command buffer.
#include <cuda_runtime_api.h>

#include "xla_ffi/dispatch.h"
#include "xla_ffi/ffi/arguments.h"
#include "xla_ffi/ffi/handlers.h"

namespace vsa {
namespace {

ffi::Error Finish(const std::string& problem) {
  return problem.empty() ? ffi::Error::Success() : ffi::Error::Internal("vsa: " + problem);
}

ffi::Error Forward(cudaStream_t stream, double scale, int64_t num_prefix_tiles, int64_t num_dense_rows,
                   ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const auto params =
      ForwardArguments({scale, num_prefix_tiles, num_dense_rows}, {args, rets}, cuda::ForwardWorkspace);
  if (!params) return params.error();
  return params->shape.batch == 0 ? ffi::Error::Success() : Finish(cuda::Forward(*params, stream));
}

ffi::Error Backward(cudaStream_t stream, double scale, int64_t num_prefix_tiles, int64_t num_dense_rows,
                    ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const auto params =
      BackwardArguments({scale, num_prefix_tiles, num_dense_rows}, {args, rets}, cuda::BackwardWorkspace);
  if (!params) return params.error();
  return params->shape.batch == 0 ? ffi::Error::Success() : Finish(cuda::Backward(*params, stream));
}

}  // namespace
}  // namespace vsa

XLA_FFI_DEFINE_HANDLER_SYMBOL(vsa_forward_cuda, vsa::Forward,
                              vsa::BindCall(vsa::ffi::Ffi::Bind().Ctx<vsa::ffi::PlatformStream<cudaStream_t>>()),
                              {vsa::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(vsa_backward_cuda, vsa::Backward,
                              vsa::BindCall(vsa::ffi::Ffi::Bind().Ctx<vsa::ffi::PlatformStream<cudaStream_t>>()),
                              {vsa::ffi::Traits::kCmdBufferCompatible});
