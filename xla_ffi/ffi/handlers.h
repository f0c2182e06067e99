// The handlers that XLA calls, by the names under which Python registers them.
#pragma once

#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* vsa_forward_cpu(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* vsa_backward_cpu(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* vsa_forward_cuda_sim(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* vsa_backward_cuda_sim(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* vsa_forward_cuda(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* vsa_backward_cuda(XLA_FFI_CallFrame* call_frame);
}
