// The forward of Blackwell. A launch answers "" or why it could not; it enqueues on the stream and nothing else.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "../../params.h"

namespace vsa::sm100 {

// Why no kernel takes these shapes, or "".
std::string WhyNot(const Shape& shape);

std::string Forward(const ForwardParams& params, cudaStream_t stream);
int64_t ForwardWorkspace(const Shape& shape);  // bytes

// One file each. order [B, N, Jq]: the query tiles of a head, those that keep the most key tiles first.
std::string Order(const Shape& shape, const Pairs& pairs, int32_t* order, cudaStream_t stream);
std::string Forward128(const ForwardParams& params, const int32_t* order, cudaStream_t stream);

}  // namespace vsa::sm100
