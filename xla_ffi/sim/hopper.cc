#include "hopper.h"

#include <cmath>
#include <cstring>

#include "memory.h"

using vsa::sim::Barrier;
using vsa::sim::BulkGroup;
using vsa::sim::Cta;
using vsa::sim::kLanes;
using vsa::sim::Lane;
using vsa::sim::Machine;
using vsa::sim::Warp;

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* base,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (rank != 4 || swizzle != CU_TENSOR_MAP_SWIZZLE_128B || reinterpret_cast<uintptr_t>(base) % 16 != 0 ||
      reinterpret_cast<uintptr_t>(map) % 64 != 0 || box[0] * 2 > 128) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *map = {};
  map->base = static_cast<uint8_t*>(base);
  map->rank = rank;
  for (cuuint32_t i = 0; i < rank; ++i) {
    map->sizes[i] = sizes[i];
    map->box[i] = box[i];
    if (i > 0) map->strides[i - 1] = strides[i - 1];
    if (box[i] < 1 || box[i] > 256 || element_strides[i] != 1 || sizes[i] < 1 || sizes[i] > 1ull << 32) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (i > 0 && (strides[i - 1] % 16 != 0 || strides[i - 1] >= 1ull << 40)) return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

namespace vsa::sim {
namespace {

// Copies a box between global and a CTA's shared memory.
template <class Copy>
void ForBox(const CUtensorMap& map, uint32_t shared, const int (&at)[4], Copy copy) {
  const uint32_t row_bytes = map.box[0] * 2;
  for (uint32_t d = 0; d < map.box[3]; ++d) {
    for (uint32_t c = 0; c < map.box[2]; ++c) {
      for (uint32_t b = 0; b < map.box[1]; ++b, shared += row_bytes) {
        const int64_t i[4] = {at[0], at[1] + int64_t{b}, at[2] + int64_t{c}, at[3] + int64_t{d}};
        bool inside = true;
        int64_t offset = i[0] * 2;
        for (int k = 0; k < 4; ++k) {
          inside &= i[k] >= 0 && i[k] + (k == 0 ? map.box[0] : 1) <= static_cast<int64_t>(map.sizes[k]);
          if (k > 0) offset += i[k] * static_cast<int64_t>(map.strides[k - 1]);
        }
        for (uint32_t byte = 0; byte < row_bytes; byte += 16) {
          copy(map.base + offset + byte, Swizzled(shared + byte), inside);
        }
      }
    }
  }
}
uint32_t BoxBytes(const CUtensorMap& map) { return map.box[0] * map.box[1] * map.box[2] * map.box[3] * 2; }

void CheckShared(Machine& machine, uint32_t offset, uint32_t bytes, uint32_t alignment, const char* what) {
  if (offset % alignment != 0) {
    machine.fail(std::string(what) + " at shared memory " + std::to_string(offset) + ": want a multiple of " +
                 std::to_string(alignment));
  }
  if (offset + bytes > machine.cta().bytes) machine.fail(std::string(what) + " past the end of shared memory");
}

void Load(uint32_t to, const CUtensorMap* map, uint32_t barrier, const int (&at)[4], uint16_t mask) {
  Machine& machine = Machine::current();
  const uint32_t bytes = BoxBytes(*map), offset = Machine::offset(to), barrier_offset = Machine::offset(barrier);
  CheckShared(machine, offset, bytes, 1024, "a TMA load");
  for (int rank = 0; rank < machine.launch().cluster; ++rank) {
    if (!(mask >> rank & 1)) continue;
    Cta* const cta = &machine.cta_of(static_cast<uint32_t>(rank) << kRankShift);
    Barrier* const full = &machine.barrier(*cta, barrier_offset);
    machine.later_into(*cta, [=, map = *map] {
      const int where[4] = {at[0], at[1], at[2], at[3]};
      ForBox(map, offset, where, [&](const uint8_t* global, uint32_t shared, bool inside) {
        if (inside) std::memcpy(cta->memory + shared, global, 16);
        else std::memset(cta->memory + shared, 0, 16);
      });
      CompleteBytes(*full, bytes);
    });
  }
}

std::shared_ptr<BulkGroup> OpenGroup(Lane& lane) {
  while (!lane.bulk_groups.empty() && lane.bulk_groups.front()->committed && lane.bulk_groups.front()->unwritten == 0) {
    lane.bulk_groups.pop_front();
  }
  if (lane.bulk_groups.empty() || lane.bulk_groups.back()->committed) {
    lane.bulk_groups.push_back(std::make_shared<BulkGroup>());
  }
  return lane.bulk_groups.back();
}

// A store that reads shared memory some time later, and writes global memory later still.
template <class Read, class Write>
void Store(Read read, Write write) {
  Machine& machine = Machine::current();
  const std::shared_ptr<BulkGroup> group = OpenGroup(machine.lane());
  ++group->unread;
  ++group->unwritten;
  machine.later([=, &machine] {
    auto bytes = std::make_shared<std::vector<uint8_t>>(read());
    --group->unread;
    machine.later([=] {
      write(*bytes);
      --group->unwritten;
    });
  });
}

// Until none of the lane's committed stores is left to be read, or written.
void WaitForStores(const char* what, int BulkGroup::*left) {
  const Lane& lane = Machine::current().lane();
  Machine::current().wait(what, [&] {
    for (const auto& group : lane.bulk_groups) {
      if (group->committed && (*group).*left > 0) return false;
    }
    return true;
  });
}

}  // namespace

void IssueProduct(const Product& product) {
  Machine& machine = Machine::current();
  machine.together<Product, bool>("wgmma", product, [&](const Product* const* in, bool* const*) {
    std::vector<Product> lanes;
    for (int i = 0; i < kLanes; ++i) lanes.push_back(*in[i]);
    const Product& first = lanes[0];
    for (const Product& other : lanes) {
      if (other.b_descriptor != first.b_descriptor || other.a_descriptor != first.a_descriptor) {
        machine.fail("wgmma with other descriptors in other lanes");
      }
    }
    const auto check = [&](uint64_t descriptor, int count, bool transposed) {
      if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) machine.fail("a matrix descriptor that is not modelled");
      if (Operand(descriptor, transposed).end(count) > machine.cta().bytes) {
        machine.fail("a matrix operand past the end of shared memory");
      }
    };
    check(first.b_descriptor, first.n, first.b_transposed);
    if (first.a == nullptr) check(first.a_descriptor, 64, first.a_transposed);
    for (const Product& each : lanes) {  // until it is waited for, nobody may read it
      for (int i = 0; i < each.n / 2 && !each.add; ++i) each.d[i] = NAN;
    }
    const Cta* const cta = &machine.cta();
    const int warp = machine.warp().index % 4;
    machine.warp().products.push([=, lanes = std::move(lanes)] {
      const Product& one = lanes[0];
      float a[16 * 16], b[16 * 128], d[16 * 128];  // A [m, k], B [k, n], D [m, n]
      Operand(one.b_descriptor, one.b_transposed).read(*cta, one.half, 0, one.n, b, 128, 1);
      if (one.a == nullptr) Operand(one.a_descriptor, one.a_transposed).read(*cta, one.half, warp * 16, 16, a, 1, 16);
      for (int lane = 0; lane < kLanes && one.a != nullptr; ++lane) {
        for (int r = 0; r < 4; ++r) {
          for (int which = 0; which < 2; ++which) {
            a[(lane / 4 + r % 2 * 8) * 16 + r / 2 * 8 + lane % 4 * 2 + which] = Unpack(lanes[lane].a[r], which, one.half);
          }
        }
      }
      const auto for_each = [&](auto visit) {
        for (int lane = 0; lane < kLanes; ++lane) {
          for (int i = 0; i < one.n / 2; ++i) {
            const int m = lane / 4 + i / 2 % 2 * 8, n = i / 4 * 8 + lane % 4 * 2 + i % 2;
            visit(lanes[lane].d[i], d[m * 128 + n]);
          }
        }
      };
      for_each([&](float& mine, float& sum) { sum = one.add ? mine : 0; });
      for (int m = 0; m < 16; ++m) {
        for (int k = 0; k < 16; ++k) {
          for (int n = 0; n < 128; ++n) d[m * 128 + n] += a[m * 16 + k] * b[k * 128 + n];
        }
      }
      for_each([&](float& mine, float& sum) { mine = sum; });
    });
  });
}

void MultiplyInWarp(float* d, const uint32_t* a, const uint32_t* b, bool half) {
  struct In { float* d; const uint32_t *a, *b; };
  Machine::current().together<In, bool>("mma", In{d, a, b}, [&](const In* const* in, bool* const*) {
    float left[16][16], right[8][16];
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int which = 0; which < 2; ++which) {
        const int column = lane % 4 * 2 + which;
        for (int r = 0; r < 4; ++r) left[lane / 4 + r % 2 * 8][r / 2 * 8 + column] = Unpack(in[lane]->a[r], which, half);
        for (int r = 0; r < 2; ++r) right[lane / 4][r * 8 + column] = Unpack(in[lane]->b[r], which, half);
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int i = 0; i < 4; ++i) {
        for (int k = 0; k < 16; ++k) {
          in[lane]->d[i] += left[lane / 4 + i / 2 * 8][k] * right[lane % 4 * 2 + i % 2][k];
        }
      }
    }
  });
}

}  // namespace vsa::sim

void __syncthreads() { vsa::sm90::named_barrier_sync(0, static_cast<int>(Machine::current().launch().block.x)); }

namespace vsa::sm90 {

using namespace vsa::sim;

uint8_t* dynamic_shared() { return Machine::current().cta().memory; }

uint32_t shared_address(const void* pointer) {
  Machine& machine = Machine::current();
  const Cta& cta = machine.cta();
  const auto offset = static_cast<const uint8_t*>(pointer) - cta.memory;
  if (offset < 0 || offset > static_cast<ptrdiff_t>(cta.bytes)) machine.fail("shared_address of something else");
  return static_cast<uint32_t>(offset) | static_cast<uint32_t>(cta.rank) << kRankShift;
}

int load_shared(uint32_t address) {
  int x;
  std::memcpy(&x, Machine::current().at(address, 4), 4);
  return x;
}

void mbarrier_init(uint32_t barrier, uint32_t count) {
  Machine& machine = Machine::current();
  if (barrier % 8 != 0) machine.fail("an mbarrier that is not aligned to 8 bytes");
  machine.at(barrier, 8);
  machine.cta_of(barrier).barriers[Machine::offset(barrier)] = {count, count, 0, 0};
}
void fence_mbarrier_init() {}
void mbarrier_arrive_for(uint32_t barrier, uint32_t count) { Arrive(Machine::current(), BarrierAt(barrier), count); }
void mbarrier_arrive_in_cluster(uint32_t barrier) { mbarrier_arrive_for(barrier, 1); }
void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  Barrier& there = BarrierAt(barrier);
  there.bytes += bytes;
  Arrive(Machine::current(), there, 1);
}
void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  const Barrier& there = BarrierAt(barrier);
  Machine::current().wait("the mbarrier at " + std::to_string(Machine::offset(barrier)) + ", parity " + std::to_string(parity),
                          [&] { return Done(there, parity); });
}
bool mbarrier_test_wait(uint32_t barrier, uint32_t parity) { return Done(BarrierAt(barrier), parity); }
// May fail for no reason.
bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  Machine& machine = Machine::current();
  return machine.below(4) > 0 && Done(BarrierAt(barrier), parity);
}

bool elect() {
  const int lane = Machine::current().lane().index;
  __ballot_sync(kWholeWarp, true);
  return lane == 0;
}

void tma_load(uint32_t to, const CUtensorMap* map, uint32_t barrier, int head, int token) {
  Load(to, map, barrier, {0, token, 0, head}, 1u << (to >> kRankShift));
}
void tma_load_multicast(uint32_t to, const CUtensorMap* map, uint32_t barrier, int block, int head, int token,
                        uint16_t mask) {
  Load(to, map, barrier, {0, token, block, head}, mask);
}
void tma_store(const CUtensorMap* map, uint32_t from, int block, int head, int token) {
  Machine& machine = Machine::current();
  CheckShared(machine, Machine::offset(from), BoxBytes(*map), 1024, "a TMA store");
  const Cta* const cta = &machine.cta();
  Store(
      [=, map = *map] {
        std::vector<uint8_t> bytes;
        const int at[4] = {0, token, block, head};
        ForBox(map, Machine::offset(from), at, [&](const uint8_t*, uint32_t shared, bool) {
          bytes.insert(bytes.end(), cta->memory + shared, cta->memory + shared + 16);
        });
        return bytes;
      },
      [=, map = *map](const std::vector<uint8_t>& bytes) {
        const int at[4] = {0, token, block, head};
        size_t next = 0;
        ForBox(map, Machine::offset(from), at, [&](uint8_t* global, uint32_t, bool inside) {
          if (inside) std::memcpy(global, bytes.data() + next, 16);
          next += 16;
        });
      });
}
void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  Machine& machine = Machine::current();
  CheckShared(machine, Machine::offset(to), bytes, 16, "a bulk load");
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) machine.fail("a bulk load that is not aligned");
  WriteLater(to, bytes, barrier, [=](uint8_t* there) { std::memcpy(there, from, bytes); });
}
void bulk_store_once(void* to, uint32_t from, uint32_t bytes) {
  const uint8_t* const here = Machine::current().at(from, bytes);
  Store([=] { return std::vector<uint8_t>(here, here + bytes); },
        [=](const std::vector<uint8_t>& read) { std::memcpy(to, read.data(), bytes); });
}
void tma_store_commit() { OpenGroup(Machine::current().lane())->committed = true; }
void tma_store_wait_read() { WaitForStores("bulk stores to be read", &BulkGroup::unread); }
void tma_store_wait() { WaitForStores("bulk stores", &BulkGroup::unwritten); }

void ldmatrix(uint32_t* to, uint32_t from) {
  Machine& machine = Machine::current();
  struct Out { uint32_t words[4]; };
  const Out out = machine.together<uint32_t, Out>("ldmatrix", from, [&](const uint32_t* const* in, Out* const* out) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const uint32_t row = *in[matrix * 8 + lane / 4];
        if (row % 16 != 0) machine.fail("ldmatrix of a row that is not aligned to 16 bytes");
        std::memcpy(&out[lane]->words[matrix], machine.at(row + lane % 4 * 4, 4), 4);
      }
    }
  });
  std::memcpy(to, out.words, sizeof out.words);
}
void stmatrix(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  Machine& machine = Machine::current();
  struct In { uint32_t to, words[4]; };
  machine.together<In, bool>("stmatrix", In{to, {a, b, c, d}}, [&](const In* const* in, bool* const*) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const uint32_t row = in[matrix * 8 + lane / 4]->to;
        if (row % 16 != 0) machine.fail("stmatrix to a row that is not aligned to 16 bytes");
        std::memcpy(machine.at(row + lane % 4 * 4, 4), &in[lane]->words[matrix], 4);
      }
    }
  });
}

void publish(int* counter) { ++*counter; }
void await(const int* counter, int count) {
  Machine::current().wait("a counter", [=] { return *counter >= count; });
  __syncwarp();
}

int cluster_rank() { return Machine::current().cta().rank; }
uint32_t address_in(int rank, uint32_t address) {
  return Machine::offset(address) | static_cast<uint32_t>(rank) << kRankShift;
}
void store_async(uint32_t to, int value, uint32_t barrier) {
  WriteLater(to, sizeof value, barrier, [=](uint8_t* there) { std::memcpy(there, &value, sizeof value); });
}

namespace {

// `threads` arrive; those that wait do so for the phase their arrival is of.
void ArriveAt(NamedBarrier& barrier, int threads, bool waits, const char* what) {
  Machine& machine = Machine::current();
  const uint64_t phase = barrier.phase;
  machine.together<bool, bool>(what, true, [&](const bool* const*, bool* const*) {
    if (barrier.arrived == 0) barrier.threads = threads;
    if (barrier.threads != threads) machine.fail("a barrier for other numbers of threads at a time");
    barrier.arrived += kLanes;
    if (barrier.arrived > threads) machine.fail("more threads at a barrier than it is for");
    if (barrier.arrived == threads) {
      barrier.arrived = 0;
      ++barrier.phase;
    }
  });
  if (waits) machine.wait(what, [&] { return barrier.phase != phase; });
}

NamedBarrier& Named(int id) {
  Machine& machine = Machine::current();
  if (id < 0 || id > 15) machine.fail("named barrier " + std::to_string(id) + ": want 0 to 15");
  return machine.cta().named[id];
}

}  // namespace

void named_barrier_sync(int id, int threads) { ArriveAt(Named(id), threads, true, "a named barrier"); }
void named_barrier_arrive(int id, int threads) { ArriveAt(Named(id), threads, false, "bar.arrive"); }
void cluster_sync() {
  Machine& machine = Machine::current();
  ArriveAt(machine.cta_of(0).of_cluster, machine.launch().cluster * static_cast<int>(machine.launch().block.x), true,
           "the cluster's barrier");
}

void set_registers(int count, bool more) {
  Machine& machine = Machine::current();
  Warp& warp = machine.warp();
  Cta& cta = machine.cta();
  if (count % 8 != 0 || count < 24 || count > 256) machine.fail("setmaxnreg: want a multiple of 8 in 24..256");
  if (more ? count < warp.registers : count > warp.registers) machine.fail("setmaxnreg the wrong way");
  const int change = (count - warp.registers) * kLanes;
  __syncwarp();
  if (machine.lane().index == 0) {  // what it waited for still holds when it goes on
    machine.wait("registers", [&] { return cta.free_registers >= change; });
    cta.free_registers -= change;
    warp.registers = count;
  }
  __syncwarp();
}

void wgmma_fence() { __syncwarp(); }
void wgmma_commit() {
  Machine::current().together<bool, bool>("wgmma.commit_group", true, [](const bool* const*, bool* const*) {
    Warp& warp = Machine::current().warp();
    warp.product_groups.push_back(warp.products.issued);
  });
}
void wgmma_wait_for(int pending) {
  Machine& machine = Machine::current();
  Warp& warp = machine.warp();
  __syncwarp();
  machine.wait("matrix products", [&] {
    const auto groups = static_cast<int>(warp.product_groups.size());
    return groups <= pending || warp.products.done >= warp.product_groups[groups - 1 - pending];
  });
  __syncwarp();
}

}  // namespace vsa::sm90
