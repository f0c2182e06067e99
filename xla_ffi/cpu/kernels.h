// The CPU kernels.  forward.cc and backward.cc are compiled once for each instruction set, with VSA_ISA as its
// name and as the namespace; dispatch.cc calls the best that this processor has.
#pragma once

#include "xla_ffi/cpu/parallel.h"
#include "xla_ffi/params.h"

namespace vsa::cpu {

// False: no memory for the scratch.  Same bits on every call, whatever the number of threads.
bool Forward(const ForwardParams& params, const Pool& pool);
bool Backward(const BackwardParams& params, const Pool& pool);

// The name of the instruction set that the two use.
const char* Instructions();

#define VSA_DECLARE_KERNELS(isa)                               \
  namespace isa {                                              \
  bool Forward(const ForwardParams& params, const Pool& pool); \
  bool Backward(const BackwardParams& params, const Pool& pool); \
  }
VSA_DECLARE_KERNELS(baseline)
VSA_DECLARE_KERNELS(avx2)
VSA_DECLARE_KERNELS(avx512)
#undef VSA_DECLARE_KERNELS

}  // namespace vsa::cpu
