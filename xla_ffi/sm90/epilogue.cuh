// From accumulators to rows in global memory.
#pragma once

#include <cstdint>

#include "softmax.cuh"
#include "wgmma.cuh"

namespace vsa::sm90 {

// Transposes a 4 x 4 matrix of words whose row i is in lane i of four.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&words)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t mine = upper ? words[i] : words[i | bit];
      const uint32_t theirs = __shfl_xor_sync(kWholeWarp, mine, bit);
      (upper ? words[i] : words[i | bit]) = theirs;
    }
  }
}

// One of the two rows whose parts a quad of lanes holds: row `pair` of accumulators [64, 2 * kCount], times `factor`,
// rounded to T; zeros if not valid. Quads write 64 bytes at a time. `row` is where the row begins.
template <class T, int kCount>
__device__ __forceinline__ void store_row(T* row, const float (&accumulators)[kCount], int pair, float factor,
                                          bool valid) {
  static_assert(kCount % 16 == 0, "32 columns at a time");
#pragma unroll
  for (int base = 0; base < kCount; base += 16) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = base + 4 * i + 2 * pair;
      words[i] = valid ? pack<T>(accumulators[at] * factor, accumulators[at + 1] * factor) : 0;
    }
    transpose_in_quad(words);
    *reinterpret_cast<uint4*>(row + 2 * base + threadIdx.x % 4 * 8) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

}  // namespace vsa::sm90
