// Rings of shared-memory slots.
#pragma once

#include <cstdint>

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

}  // namespace vsa::sm90
