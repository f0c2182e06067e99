// The backward of Hopper: bfloat16 and float16, head dim 64 and 128, tiles of 64, 128 and 256.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "../../params.h"

namespace vsa::sm90 {

// Launches on the stream and returns "", or says why it could not.
std::string Backward(const BackwardParams& params, cudaStream_t stream);

// Bytes of params.workspace.
int64_t BackwardWorkspace(const Shape& shape);

}  // namespace vsa::sm90
