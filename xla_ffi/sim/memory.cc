#include "memory.h"

#include <cuda_bf16.h>

namespace vsa::sim {
namespace {

void Complete(Barrier& barrier) {
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.pending = barrier.count;
    ++barrier.phase;
  }
}

}  // namespace

void CompleteBytes(Barrier& barrier, int64_t bytes) {
  barrier.bytes -= bytes;
  Complete(barrier);
}
void Arrive(Machine& machine, Barrier& barrier, uint32_t count) {
  if (barrier.pending < count) machine.fail("more arrivals at an mbarrier than it was made for");
  barrier.pending -= count;
  Complete(barrier);
}

Barrier& BarrierAt(uint32_t address) {
  Machine& machine = Machine::current();
  return machine.barrier(machine.cta_of(address), Machine::offset(address));
}

// Every 16-bit number as a float.
const float* Numbers(bool half) {
  static const auto make = [](float (*from)(uint16_t)) {
    std::vector<float> numbers(1 << 16);
    for (int i = 0; i < 1 << 16; ++i) numbers[i] = from(static_cast<uint16_t>(i));
    return numbers;
  };
  static const std::vector<float> halves = make(FromFloat16), bfloats = make(FromBfloat16);
  return half ? halves.data() : bfloats.data();
}

void Operand::read(const Cta& cta, bool half, int first, int count, float* to, int along_k, int along_mn) const {
  const float* const numbers = Numbers(half);
  for (int k = 0; k < 16; ++k) {
    for (int i = 0; i < count; ++i) {
      uint16_t bits;
      std::memcpy(&bits, cta.memory + Swizzled(address(first + i, k)), 2);
      to[k * along_k + i * along_mn] = numbers[bits];
    }
  }
}

}  // namespace vsa::sim
