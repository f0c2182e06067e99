// XLA FFI handlers of the CUDA kernels as the simulator runs them, on a CPU.
#include "xla_ffi/ffi/arguments.h"
#include "xla_ffi/ffi/handlers.h"
#include "xla_ffi/sim/kernels.h"

namespace vsa {
namespace {

template <typename Params>
ffi::Error Run(const ffi::ErrorOr<Params>& params, std::string (*kernel)(const Params&)) {
  if (!params) return params.error();
  const std::string problem = kernel(*params);
  return problem.empty() ? ffi::Error::Success() : ffi::Error::Internal("vsa: " + problem);
}

ffi::Error Forward(double scale, int64_t num_prefix_tiles, int64_t num_dense_rows, ffi::RemainingArgs args,
                   ffi::RemainingRets rets) {
  const Attributes attributes{scale, num_prefix_tiles, num_dense_rows};
  return Run(ForwardArguments(attributes, {args, rets}, sim::ForwardWorkspace), sim::Forward);
}

ffi::Error Backward(double scale, int64_t num_prefix_tiles, int64_t num_dense_rows, ffi::RemainingArgs args,
                    ffi::RemainingRets rets) {
  const Attributes attributes{scale, num_prefix_tiles, num_dense_rows};
  return Run(BackwardArguments(attributes, {args, rets}, sim::BackwardWorkspace), sim::Backward);
}

}  // namespace
}  // namespace vsa

XLA_FFI_DEFINE_HANDLER_SYMBOL(vsa_forward_cuda_sim, vsa::Forward, vsa::BindCall(vsa::ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(vsa_backward_cuda_sim, vsa::Backward, vsa::BindCall(vsa::ffi::Ffi::Bind()));
