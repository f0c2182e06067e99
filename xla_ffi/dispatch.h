// What the CUDA handlers call.  No JAX or XLA types, and no CUDA headers.
//
// Every function chooses a kernel by shape and device; the sources under sm90/ hold them.
#pragma once

#include <cstdint>
#include <string>

#include "xla_ffi/params.h"

struct CUstream_st;  // *cudaStream_t

namespace vsa::cuda {

// Launches the kernels on the stream and returns at once.  Empty: launched; else why not.  No allocation, no
// synchronisation: safe while the stream is captured.
std::string Forward(const ForwardParams& params, CUstream_st* stream);
std::string Backward(const BackwardParams& params, CUstream_st* stream);

// How many bytes of workspace they want.
int64_t ForwardWorkspace(const Shape& shape);
int64_t BackwardWorkspace(const Shape& shape);

}  // namespace vsa::cuda
