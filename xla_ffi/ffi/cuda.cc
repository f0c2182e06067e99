// XLA FFI handlers of the CUDA kernels; built only where nvcc is.  They launch on XLA's stream and return: nothing
// is allocated, waited for or remembered, so a call may be recorded in a command buffer.
#include <cuda_runtime_api.h>

#include "xla_ffi/dispatch.h"
#include "xla_ffi/ffi/arguments.h"
#include "xla_ffi/ffi/handlers.h"

namespace vsa {
namespace {

// Runs a kernel; for an empty batch something else, since a traced call must leave something in its graph.
template <typename Params>
ffi::Error Run(const ffi::ErrorOr<Params>& params, std::string (*kernel)(const Params&, cudaStream_t),
               cudaStream_t stream) {
  if (!params) return params.error();
  if (params->shape.batch == 0) {
    return cudaMemsetAsync(params->workspace, 0, 1, stream) == cudaSuccess
               ? ffi::Error::Success()
               : ffi::Error::Internal("vsa: an empty batch could not clear its workspace");
  }
  const std::string problem = kernel(*params, stream);
  return problem.empty() ? ffi::Error::Success() : ffi::Error::Internal("vsa: " + problem);
}

ffi::Error Forward(cudaStream_t stream, double scale, int64_t num_prefix_tiles, int64_t num_dense_rows,
                   ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const Attributes attributes{scale, num_prefix_tiles, num_dense_rows};
  return Run(ForwardArguments(attributes, {args, rets}, cuda::ForwardWorkspace), cuda::Forward, stream);
}

ffi::Error Backward(cudaStream_t stream, double scale, int64_t num_prefix_tiles, int64_t num_dense_rows,
                    ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const Attributes attributes{scale, num_prefix_tiles, num_dense_rows};
  return Run(BackwardArguments(attributes, {args, rets}, cuda::BackwardWorkspace), cuda::Backward, stream);
}

}  // namespace
}  // namespace vsa

XLA_FFI_DEFINE_HANDLER_SYMBOL(vsa_forward_cuda, vsa::Forward,
                              vsa::BindCall(vsa::ffi::Ffi::Bind().Ctx<vsa::ffi::PlatformStream<cudaStream_t>>()),
                              {vsa::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(vsa_backward_cuda, vsa::Backward,
                              vsa::BindCall(vsa::ffi::Ffi::Bind().Ctx<vsa::ffi::PlatformStream<cudaStream_t>>()),
                              {vsa::ffi::Traits::kCmdBufferCompatible});
