// TMA descriptors of BLNH arrays. Host only.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "../params.h"

namespace vsa::sm90 {

// A map of x [batch * length, heads, head_dim], 16-bit, as (column of 64, token, block of 64 columns, head). One box is
// `box_blocks` blocks of `box_tokens` rows of 128 bytes of one head, with the 128-byte swizzle. Returns why not, or "".
std::string EncodeTokens(CUtensorMap* map, DType dtype, const void* x, int64_t tokens, int64_t heads,
                         int64_t head_dim, int box_tokens, int box_blocks);

}  // namespace vsa::sm90
