// From accumulators to rows in global memory.
#pragma once

#include <cstdint>

#include "ptx.cuh"
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

// The same for both rows of every quad, of 64 columns, into a swizzled block [64 rows, 64 columns] in shared memory
// that begins at `to`, a multiple of 1024: from there TMA stores them, after fence_proxy_async and a barrier. `block`:
// of the accumulators.
template <class T, int kCount>
__device__ __forceinline__ void stage_rows(uint32_t to, const float (&accumulators)[kCount], int block,
                                           const float (&factor)[2], const bool (&valid)[2]) {
  const int lane = threadIdx.x % 32;
  const uint32_t row = to + (threadIdx.x % 128 / 32 * 16 + lane % 16) * 128;
#pragma unroll
  for (int chunk = 0; chunk < kSwizzleColumns / 8; chunk += 2) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const pair = accumulators + (block * (kSwizzleColumns / 8) + chunk + i / 2) * 4 + i % 2 * 2;
      words[i] = valid[i % 2] ? pack<T>(pair[0] * factor[i % 2], pair[1] * factor[i % 2]) : 0;
    }
    stmatrix(row + ((chunk + lane / 16) ^ lane % 8) * 16, words[0], words[1], words[2], words[3]);
  }
}

// All columns, by way of adjoining blocks: each warp leaves its 16 rows there, and its first lane has TMA store them at
// `token` of `head`. The stores are committed; before those blocks are written again, tma_store_wait_read.
template <class T, int kBlockBytes, int kCount>
__device__ __forceinline__ void store_rows_by_tma(const CUtensorMap* map, uint8_t* blocks, int head, int token,
                                                  const float (&accumulators)[kCount], const float (&factor)[2],
                                                  const bool (&valid)[2]) {
  constexpr int kBlocks = 2 * kCount / kSwizzleColumns;
  const uint32_t to = shared_address(blocks);
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    stage_rows<T>(to + block * kBlockBytes, accumulators, block, factor, valid);
  }
  fence_proxy_async();
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    const int warp_row = threadIdx.x % 128 / 32 * 16;
    for (int block = 0; block < kBlocks; ++block) {
      tma_store(map, to + block * kBlockBytes + warp_row * 128, block, head, token + warp_row);
    }
    tma_store_commit();
  }
}

}  // namespace vsa::sm90
