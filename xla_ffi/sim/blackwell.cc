#include "blackwell.h"

#include <cuda_bf16.h>

#include <cstring>

#include "memory.h"

namespace vsa::sim {
namespace {

constexpr uint32_t kNan = 0x7fffffff;  // of any type

// Columns of a warp's lanes, or of all lanes.
struct Place {
  int lane, column;
};

Place PlaceOf(uint32_t address) { return {static_cast<int>(address >> 16), static_cast<int>(address & 0xffff)}; }

// `count` columns at `address` lie in what is allocated.
void CheckColumns(const char* what, uint32_t address, int count) {
  Machine& machine = Machine::current();
  const Place place = PlaceOf(address);
  const int columns = machine.cta().tensor.columns;
  if (place.column + count > columns) {
    machine.fail(std::string(what) + ": columns " + std::to_string(place.column) + " to " +
                 std::to_string(place.column + count - 1) + " of tensor memory, of which " + std::to_string(columns) + " are allocated");
  }
}

// Of a warp's tcgen05.ld or st: the first of its 32 lanes, checked.
int FirstLane(const char* what, uint32_t address) {
  Machine& machine = Machine::current();
  const int first = machine.warp().index % 4 * kLanes;
  if (PlaceOf(address).lane != first) {
    machine.fail(std::string(what) + " from lane " + std::to_string(PlaceOf(address).lane) + " of tensor memory, where this warp reaches " +
                 std::to_string(first) + " to " + std::to_string(first + kLanes - 1));
  }
  return first;
}

struct Access {
  uint32_t* registers;
  uint32_t address;
  int count;
};

void CheckAlike(const char* what, const Access* const* lanes) {
  for (int i = 1; i < kLanes; ++i) {
    if (lanes[i]->address != lanes[0]->address) Machine::current().fail(std::string(what) + " with other addresses in other lanes");
  }
}

// What an instruction descriptor of kind::f16 says.
struct Kind {
  bool half, a_transposed, b_transposed;
  int m, n;

  explicit Kind(uint32_t bits) {
    Machine& machine = Machine::current();
    const uint32_t d = bits >> 4 & 3, a = bits >> 7 & 7, b = bits >> 10 & 7;
    half = a == 0;
    a_transposed = bits >> 15 & 1;
    b_transposed = bits >> 16 & 1;
    n = static_cast<int>(bits >> 17 & 63) * 8;
    m = static_cast<int>(bits >> 24 & 31) * 16;
    constexpr uint32_t kReserved = 0xf | 1u << 6 | 3u << 13 | 1u << 23 | 7u << 29;  // sparsity, saturation, negation among them
    if (bits & kReserved) machine.fail("an instruction descriptor with bits that are reserved, or not modelled");
    if (d != 1 || a > 1 || a != b) machine.fail("an instruction descriptor of types that are not modelled");
    if (m != 128 || n < 16 || n > 256 || n % 16 != 0) {
      machine.fail("a matrix product of shape " + std::to_string(m) + " x " + std::to_string(n) + " is not modelled");
    }
  }
};

// Bits 46..48 of a shared memory descriptor are 1, those from 61 on say 128-byte swizzle; bit 52 and 53..60 are 0.
void CheckOperand(uint64_t descriptor, int count, bool transposed) {
  Machine& machine = Machine::current();
  if ((descriptor >> 46 & 7) != 1) machine.fail("a shared memory descriptor whose bits 46..48 are not 1");
  if (descriptor >> 61 != 2) machine.fail("a shared memory descriptor of another swizzle than 128 bytes is not modelled");
  if ((descriptor & (0xfffull << 49 | 3ull << 14 | 3ull << 30)) != 0) machine.fail("a shared memory descriptor with reserved bits");
  if (Operand(descriptor, transposed).end(count) > machine.cta().bytes) {
    machine.fail("a matrix operand past the end of shared memory");
  }
}

// A: a descriptor, or an address in tensor memory.
void Multiply(uint32_t d, uint64_t a, bool a_in_tensor_memory, uint64_t b, uint32_t instruction, bool add) {
  Machine& machine = Machine::current();
  const Kind kind(instruction);
  CheckColumns("D of a matrix product", d, kind.n);
  if (PlaceOf(d).lane != 0) machine.fail("D of a matrix product does not begin at lane 0");
  CheckOperand(b, kind.n, kind.b_transposed);
  if (!a_in_tensor_memory) {
    CheckOperand(a, kind.m, kind.a_transposed);
  } else {
    if (kind.a_transposed) machine.fail("A in tensor memory cannot be MN-major");
    CheckColumns("A of a matrix product", static_cast<uint32_t>(a), 8);
    if (PlaceOf(static_cast<uint32_t>(a)).lane != 0) machine.fail("A of a matrix product does not begin at lane 0");
  }
  Lane* const by = &machine.lane();
  ++by->tensor_issued;
  Cta* const cta = &machine.cta();
  cta->tensor.products.push([=] {
    std::vector<float> left(kind.m * 16), right(16 * kind.n);  // A [m, k], B [k, n]
    uint32_t* const memory = cta->tensor.memory.data();
    Operand(b, kind.b_transposed).read(*cta, kind.half, 0, kind.n, right.data(), kind.n, 1);
    if (a_in_tensor_memory) {
      const Place at = PlaceOf(static_cast<uint32_t>(a));
      for (int m = 0; m < kind.m; ++m) {
        for (int k = 0; k < 16; ++k) {
          left[m * 16 + k] = Unpack(memory[m * Tensor::kColumns + at.column + k / 2], k % 2, kind.half);
        }
      }
    } else {
      Operand(a, kind.a_transposed).read(*cta, kind.half, 0, kind.m, left.data(), 1, 16);
    }
    const int column = PlaceOf(d).column;
    for (int m = 0; m < kind.m; ++m) {
      float sums[256];
      uint32_t* const row = memory + m * Tensor::kColumns + column;
      if (add) std::memcpy(sums, row, kind.n * sizeof(float));
      else std::fill(sums, sums + kind.n, 0.0f);
      for (int k = 0; k < 16; ++k) {
        const float x = left[m * 16 + k];
        const float* const y = right.data() + k * kind.n;
        for (int n = 0; n < kind.n; ++n) sums[n] += x * y[n];
      }
      std::memcpy(row, sums, kind.n * sizeof(float));
    }
    ++by->tensor_done;
  });
}

}  // namespace

void LoadTensorMemory(uint32_t* to, int count, uint32_t address) {
  Machine::current().together<Access, bool>("tcgen05.ld", Access{to, address, count}, [](const Access* const* in, bool* const*) {
    CheckAlike("tcgen05.ld", in);
    const Access& one = *in[0];
    CheckColumns("tcgen05.ld", one.address, one.count);
    const int first = FirstLane("tcgen05.ld", one.address), column = PlaceOf(one.address).column;
    std::vector<uint32_t*> registers;
    for (int i = 0; i < kLanes; ++i) {
      registers.push_back(in[i]->registers);
      std::fill_n(in[i]->registers, one.count, kNan);  // until it is waited for
    }
    Machine& machine = Machine::current();
    const Cta* const cta = &machine.cta();
    machine.warp().tensor_loads.push([=, count = one.count] {
      for (int i = 0; i < kLanes; ++i) {
        std::memcpy(registers[i], &cta->tensor.memory[(first + i) * Tensor::kColumns + column], count * sizeof(uint32_t));
      }
    });
  });
}

void StoreTensorMemory(uint32_t address, const uint32_t* from, int count) {
  Machine::current().together<Access, bool>(
      "tcgen05.st", Access{const_cast<uint32_t*>(from), address, count}, [](const Access* const* in, bool* const*) {
        CheckAlike("tcgen05.st", in);
        const Access& one = *in[0];
        CheckColumns("tcgen05.st", one.address, one.count);
        const int first = FirstLane("tcgen05.st", one.address), column = PlaceOf(one.address).column;
        std::vector<uint32_t> words;
        for (int i = 0; i < kLanes; ++i) words.insert(words.end(), in[i]->registers, in[i]->registers + one.count);
        Machine& machine = Machine::current();
        Cta* const cta = &machine.cta();
        machine.warp().tensor_stores.push([=, count = one.count] {
          for (int i = 0; i < kLanes; ++i) {
            std::memcpy(&cta->tensor.memory[(first + i) * Tensor::kColumns + column], &words[i * count], count * sizeof(uint32_t));
          }
        });
      });
}

namespace {

void WaitFor(const char* what, Queue Warp::*queue) {
  Machine& machine = Machine::current();
  const Warp& warp = machine.warp();
  __syncwarp();
  machine.wait(what, [&] { return (warp.*queue).work.empty(); });
  __syncwarp();
}

}  // namespace

void WaitTensorLoads() { WaitFor("tcgen05.wait::ld", &Warp::tensor_loads); }

}  // namespace vsa::sim

namespace vsa::sm100 {

using namespace vsa::sim;

void tmem_alloc(uint32_t to, int columns) {
  Machine& machine = Machine::current();
  if (columns < 32 || columns > Tensor::kColumns || (columns & (columns - 1)) != 0) {
    machine.fail("tcgen05.alloc of " + std::to_string(columns) + " columns: want a power of two in 32..512");
  }
  __syncwarp();
  if (machine.lane().index == 0) {
    Tensor& tensor = machine.cta().tensor;
    if (!tensor.permit) machine.fail("tcgen05.alloc after the permit was given back");
    tensor.memory.assign(Tensor::kLanes * Tensor::kColumns, kNan);
    tensor.columns = columns;
    tensor.permit = false;
    const uint32_t address = 0;
    std::memcpy(machine.at(to, 4), &address, 4);
  }
  __syncwarp();
}

void tmem_dealloc(uint32_t address, int columns) {
  Machine& machine = Machine::current();
  __syncwarp();
  if (machine.lane().index == 0) {
    Tensor& tensor = machine.cta().tensor;
    if (address != 0 || columns != tensor.columns) machine.fail("tcgen05.dealloc of other columns than were allocated");
    if (!tensor.products.work.empty()) machine.fail("tcgen05.dealloc while products are still running");
    tensor.columns = 0;
  }
  __syncwarp();
}

void tcgen05_fence_before_sync() {}
void tcgen05_fence_after_sync() {}

void tcgen05_mma(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool add) {
  Multiply(d, a, false, b, instruction, add);
}
void tcgen05_mma(uint32_t d, uint32_t a, uint64_t b, uint32_t instruction, bool add) {
  Multiply(d, a, true, b, instruction, add);
}

void tcgen05_commit(uint32_t barrier) {
  Machine& machine = Machine::current();
  Lane& lane = machine.lane();
  Barrier* const there = &BarrierAt(barrier);
  machine.cta().tensor.commits.push_back({&lane, lane.tensor_issued, [there, &machine] { Arrive(machine, *there, 1); }});
}

void tmem_wait_store() { WaitFor("tcgen05.wait::st", &Warp::tensor_stores); }

// What the answer looks like is known to these two alone.
void try_cancel(uint32_t response, uint32_t barrier) {
  Machine& machine = Machine::current();
  Cta& cta = machine.cta();
  if (cta.asked_in_vain) machine.fail("try_cancel after one was in vain");
  if (response % 16 != 0) machine.fail("try_cancel to shared memory that is not aligned to 16 bytes");
  WriteLater(response, 16, barrier, [&machine, &cta](uint8_t* there) {
    const int answer[4] = {machine.cancel_cta(), 0, 0, 0};
    cta.asked_in_vain = answer[0] < 0;
    std::memcpy(there, answer, sizeof answer);
  });
}
int cancelled_cta(uint32_t response) {
  int index;
  std::memcpy(&index, Machine::current().at(response, 16), sizeof index);
  return index;
}

float add_down(float a, float b) {
  const int rounding = std::fegetround();
  std::fesetround(FE_DOWNWARD);
  const volatile float x = a, y = b;
  const volatile float sum = x + y;
  std::fesetround(rounding);
  return sum;
}

}  // namespace vsa::sm100
