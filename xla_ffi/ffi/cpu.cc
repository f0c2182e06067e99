// XLA FFI handlers of the CPU kernels.
#include "xla_ffi/cpu/kernels.h"
#include "xla_ffi/ffi/arguments.h"
#include "xla_ffi/ffi/handlers.h"

namespace vsa {
namespace {

// XLA's own threads.
cpu::Pool PoolOf(ffi::ThreadPool& threads) {
  return {threads.num_threads(), [&threads](std::function<void()> task) { threads.Schedule(std::move(task)); }};
}

ffi::Error Finish(bool ran) {
  if (ran) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "vsa: no memory for the scratch of the CPU kernel");
}

ffi::Error Forward(ffi::ThreadPool threads, double scale, int64_t num_prefix_tiles, int64_t num_dense_rows,
                   ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const auto params = ForwardArguments({scale, num_prefix_tiles, num_dense_rows}, {args, rets}, nullptr);
  return params ? Finish(cpu::Forward(*params, PoolOf(threads))) : params.error();
}

ffi::Error Backward(ffi::ThreadPool threads, double scale, int64_t num_prefix_tiles, int64_t num_dense_rows,
                    ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const auto params = BackwardArguments({scale, num_prefix_tiles, num_dense_rows}, {args, rets}, nullptr);
  return params ? Finish(cpu::Backward(*params, PoolOf(threads))) : params.error();
}

}  // namespace
}  // namespace vsa

XLA_FFI_DEFINE_HANDLER_SYMBOL(vsa_forward_cpu, vsa::Forward,
                              vsa::BindCall(vsa::ffi::Ffi::Bind().Ctx<vsa::ffi::ThreadPool>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(vsa_backward_cpu, vsa::Backward,
                              vsa::BindCall(vsa::ffi::Ffi::Bind().Ctx<vsa::ffi::ThreadPool>()));
