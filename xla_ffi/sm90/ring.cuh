// Rings of shared-memory slots.
#pragma once

#include <cstdint>

#include "ptx.cuh"

namespace vsa::sm90 {

constexpr int kWarpgroup = 128;  // threads

// How a warp that has read something arrives at a barrier: one lane for all, after __syncwarp. Then racecheck takes the
// reads of the others and what is written there next for a race; so for it, every lane arrives.
#ifdef VSA_EVERY_LANE_ARRIVES
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif
__device__ __forceinline__ bool arrives() { return threadIdx.x % 32 < kWarpArrivals; }

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

// Both barriers; one latency when both are ready.
__device__ __forceinline__ void mbarrier_wait_both(uint32_t first, uint32_t first_parity, uint32_t second,
                                                   uint32_t second_parity) {
  const bool first_done = mbarrier_try_wait(first, first_parity);
  const bool second_done = mbarrier_try_wait(second, second_parity);
  if (!(first_done && second_done)) {
    mbarrier_wait(first, first_parity);
    mbarrier_wait(second, second_parity);
  }
}

// What one warp tells kReaders others, in order. Everything is for a whole warp.
template <class Message, int kCount, int kReaders = 1>
struct Messages {
  using Place = Cursor<kCount>;  // of the writer, and of each reader

  Message messages[kCount];
  uint64_t full[kCount], empty[kCount];

  // One thread; then __syncthreads.
  __device__ void init() {
    for (int i = 0; i < kCount; ++i) {
      mbarrier_init(shared_address(&full[i]), 1);
      mbarrier_init(shared_address(&empty[i]), kReaders * kWarpArrivals);
    }
  }

  __device__ void write(Place& place, const Message& message) {
    mbarrier_wait(shared_address(&empty[place.at]), place.parity ^ 1);
    if (elect()) {
      messages[place.at] = message;
      mbarrier_arrive(shared_address(&full[place.at]));
    }
    place.advance();
  }

  __device__ Message read(Place& place) {
    mbarrier_wait(shared_address(&full[place.at]), place.parity);
    const Message message = messages[place.at];
    __syncwarp();
    if (arrives()) mbarrier_arrive(shared_address(&empty[place.at]));
    place.advance();
    return message;
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
