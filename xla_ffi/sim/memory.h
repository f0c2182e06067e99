// Shared memory as barriers and matrix products see it: what hopper.cc and blackwell.cc have in common.
#pragma once

#include <cstring>

#include "machine.h"

namespace vsa::sim {

// The 128-byte swizzle: by the address.
inline uint32_t Swizzled(uint32_t offset) { return offset ^ ((offset >> 7 & 7) << 4); }

// mbarriers.
Barrier& BarrierAt(uint32_t address);
void CompleteBytes(Barrier& barrier, int64_t bytes);
void Arrive(Machine& machine, Barrier& barrier, uint32_t count);
inline bool Done(const Barrier& barrier, uint32_t parity) { return (barrier.phase & 1) != parity; }

// write(there) some time later, which `barrier` is told of.
template <class Write>
void WriteLater(uint32_t to, uint32_t bytes, uint32_t barrier, Write write) {
  Machine& machine = Machine::current();
  uint8_t* const there = machine.at(to, bytes);
  Barrier* const full = &BarrierAt(barrier);
  machine.later_into(machine.cta_of(to), [=] {
    write(there);
    CompleteBytes(*full, bytes);
  });
}

// Every 16-bit number as a float.
const float* Numbers(bool half);
inline float Unpack(uint32_t word, int which, bool half) {
  return Numbers(half)[static_cast<uint16_t>(word >> 16 * which)];
}

// An operand in shared memory, as a matrix descriptor tells of it; transposed: its rows are along K.
struct Operand {
  uint32_t start, leading, stride;
  bool transposed;

  Operand(uint64_t descriptor, bool transposed)
      : start((descriptor & 0x3fff) << 4),
        leading((descriptor >> 16 & 0x3fff) << 4),
        stride((descriptor >> 32 & 0x3fff) << 4),
        transposed(transposed) {}

  // Of element (mn, k), before the swizzle; mn is along M or N.
  uint32_t address(int mn, int k) const {
    return transposed ? start + mn / 64 * leading + k / 8 * stride + k % 8 * 128 + mn % 64 * 2
                      : start + mn / 8 * stride + mn % 8 * 128 + k * 2;
  }
  // The end of the row of 128 bytes that the last element of all is in.
  uint32_t end(int count) const { return (address(count - 1, 15) | 127) + 1; }

  // Elements [first, first + count) along M or N and all 16 along K: to[k * along_k + mn * along_mn].
  void read(const Cta& cta, bool half, int first, int count, float* to, int along_k, int along_mn) const;
};

}  // namespace vsa::sim
