// The forward kernels of Hopper. Each launches on the stream and returns "", or says why it could not.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "../../params.h"

namespace vsa::sm90 {

// Tiles of 128 and 256. Workspace: 4 bytes.
std::string Forward128(const ForwardParams& params, cudaStream_t stream);

}  // namespace vsa::sm90
