// TMA descriptors of BLNH arrays. Host only.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "../params.h"

namespace vsa::sm90 {

// A map of x [batch * length, heads, head_dim], 16-bit, as (head dim, head, token); one box is 64 elements of
// `box_tokens` tokens of one head, 128-byte swizzle. Returns why not, or "".
std::string EncodeTokens(CUtensorMap* map, DType dtype, const void* x, int64_t tokens, int64_t heads,
                         int64_t head_dim, int box_tokens);

std::string EncodeTiles(CUtensorMap* map, DType dtype, const void* x, int64_t tokens, int64_t heads,
                         int64_t head_dim, int box_tokens);

}  // namespace vsa::sm90
