// Rings of shared-memory slots.
#pragma once

#include <cstdint>

#include "ptx.cuh"

namespace vsa::sm90 {

constexpr int kWarpgroup = 128;  // threads

// A place in a ring of kCount, and the parity of the rounds made. A consumer waits for `parity`, a producer, who is
// one phase ahead, for its opposite: a fresh barrier has no phase to wait for.
template <int kCount>
struct Cursor {
  int at = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++at == kCount) {
      at = 0;
      parity ^= 1;
    }
  }
};

// Makes 0 the rows from `first` on of a slot of kBlocks column blocks, each kRows rows of 128 bytes, since 0 * NaN is
// NaN. The call of one warpgroup, which has named barrier `barrier` to itself; where warpgroups share a slot, each
// that reads it writes the zeros.
template <int kBlocks, int kRows>
__device__ __forceinline__ void clear_rows(uint8_t* slot, int first, int barrier) {
  const int thread = threadIdx.x % kWarpgroup;
  for (int block = 0; block < kBlocks; ++block) {
    uint8_t* const rows = slot + block * kRows * 128;
    for (int row = first + thread / 8; row < kRows; row += kWarpgroup / 8) {
      *reinterpret_cast<int4*>(rows + row * 128 + thread % 8 * 16) = int4{};
    }
  }
  fence_proxy_async();
  named_barrier_sync(barrier, kWarpgroup);
}

}  // namespace vsa::sm90
