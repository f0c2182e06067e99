// The forward of Hopper. A launch answers "" or why it could not; it enqueues on the stream and nothing else.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "../../params.h"

namespace vsa::sm90 {

std::string Forward(const ForwardParams& params, cudaStream_t stream);
int64_t ForwardWorkspace(const Shape& shape);  // bytes

// One file each.
std::string Forward64(const ForwardParams& params, cudaStream_t stream);
std::string Forward128(const ForwardParams& params, cudaStream_t stream);  // tiles of 128 and 256

}  // namespace vsa::sm90
