#include "machine.h"

#include <algorithm>

namespace vsa::sim {
namespace {

constexpr size_t kStackBytes = 128 << 10;
constexpr int kRegisters = 65536;  // of an SM
Machine* machine = nullptr;
uint64_t next_seed = 0;
int processors = 3;

}  // namespace

void SetSeed(uint64_t seed) { next_seed = seed; }
void SetProcessors(int count) { processors = count; }
int Processors() { return processors; }
void Run(const Launch& launch) { Machine(next_seed++).run(launch); }

Machine& Machine::current() { return *machine; }

std::string Machine::place(const Lane& lane) const {
  return "CTA " + std::to_string(lane.warp->cta->index) + " warp " + std::to_string(lane.warp->index) + " lane " +
         std::to_string(lane.index);
}

void Machine::fail(const std::string& what) {
  throw Error(what + " (" + (running_ == nullptr ? std::string("a unit") : place(*running_)) + ")");
}

Cta& Machine::cta_of(uint32_t address) {
  const int rank = static_cast<int>(address >> kRankShift);
  Cta& mine = cta();
  if (rank >= launch_->cluster) fail("a shared-memory address of rank " + std::to_string(rank));
  return *ctas_[mine.index - mine.rank + rank];
}

uint8_t* Machine::at(uint32_t address, size_t bytes) {
  Cta& there = cta_of(address);
  if (offset(address) + bytes > there.bytes) {
    fail("shared memory at " + std::to_string(offset(address)) + ", past its " + std::to_string(there.bytes) + " bytes");
  }
  return there.memory + offset(address);
}

Barrier& Machine::barrier(Cta& there, uint32_t at) {
  const auto found = there.barriers.find(at);
  if (found == there.barriers.end()) fail("no mbarrier at " + std::to_string(at));
  return found->second;
}

void Machine::later_product(std::function<void()> work) {
  Warp& warp = this->warp();
  ++warp.open_products;
  ++warp.products_issued;
  warp.products.push_back(std::move(work));
}

bool Machine::run_warp(Warp& warp) {
  bool moved = false;
  const int first = below(kLanes);
  for (int i = 0; i < kLanes; ++i) {
    Lane& lane = warp.lanes[(first + i) % kLanes];
    if (lane.fiber->finished() || (lane.ready != nullptr && !lane.ready(lane.closure))) continue;
    running_ = &lane;
    lane.fiber->resume();
    running_ = nullptr;
    moved = true;
    if (error_) std::rethrow_exception(error_);
    if (lane.fiber->finished()) ++warp.exited;
  }
  return moved;
}

// Some of the work that is to be done late, or all that can be.
bool Machine::run_units(bool all) {
  bool moved = false;
  for (size_t i = 0; i < units_.size();) {
    if (!all && below(4) > 0) {
      ++i;
      continue;
    }
    std::function<void()> work = std::move(units_[i]);
    units_[i] = std::move(units_.back());
    units_.pop_back();
    work();
    moved = true;
  }
  for (Warp* warp : live_) {
    while (!warp->products.empty() && (all || below(2) > 0)) {
      std::function<void()> work = std::move(warp->products.front());
      warp->products.pop_front();
      work();
      ++warp->products_done;
      moved = true;
    }
  }
  return moved;
}

void Machine::report_deadlock() {
  std::string text = "deadlock:";
  for (const Warp* warp : live_) {
    std::string last;
    for (const Lane& lane : warp->lanes) {
      if (lane.fiber->finished() || lane.what == last) continue;
      last = lane.what;
      text += "\n  " + place(lane) + " waits for " + lane.what;
    }
  }
  throw Error(text);
}

void Machine::run(const Launch& launch) {
  launch_ = &launch;
  machine = this;
  const int threads = launch.block.x, warps = threads / kLanes;
  if (threads % kLanes != 0 || launch.block.y * launch.block.z * launch.grid.y * launch.grid.z != 1) {
    throw Error("a launch that is not modelled: one dimension, whole warps");
  }
  if (launch.grid.x % launch.cluster != 0) throw Error("a grid that is not whole clusters");
  for (unsigned i = 0; i < launch.grid.x; ++i) {
    auto cta = std::make_unique<Cta>();
    cta->machine = this;
    cta->index = static_cast<int>(i);
    cta->cluster = static_cast<int>(i) / launch.cluster;
    cta->rank = static_cast<int>(i) % launch.cluster;
    cta->bytes = launch.shared_bytes;
    cta->storage.resize(launch.shared_bytes + 1024);
    for (size_t j = 0; j < cta->storage.size(); ++j) cta->storage[j] = j % 2 ? 0xff : 0x7f;  // NaN
    const auto address = reinterpret_cast<uintptr_t>(cta->storage.data());
    cta->memory = cta->storage.data() + (1024 - address % 1024) % 1024;
    for (int w = 0; w < warps; ++w) {
      Warp& warp = cta->warps.emplace_back();
      warp.cta = cta.get();
      warp.index = w;
      warp.registers = std::min(255, kRegisters / threads / 8 * 8);
      for (int l = 0; l < kLanes; ++l) {
        warp.lanes[l].warp = &warp;
        warp.lanes[l].index = l;
        warp.lanes[l].fiber = std::make_unique<Fiber>(
            [this] {
              try {
                launch_->kernel();
              } catch (...) {
                error_ = std::current_exception();
              }
            },
            kStackBytes);
      }
      live_.push_back(&warp);
    }
    ctas_.push_back(std::move(cta));
  }
  while (!live_.empty()) {
    std::shuffle(live_.begin(), live_.end(), random_);
    bool moved = false;
    for (Warp* warp : live_) {
      if (below(8) == 0) continue;  // so that warps run ahead of each other
      moved |= run_warp(*warp);
      moved |= run_units(false);
    }
    if (!moved) {
      for (Warp* warp : live_) moved |= run_warp(*warp);
      if (!moved && !run_units(true)) report_deadlock();
    }
    live_.erase(std::remove_if(live_.begin(), live_.end(), [](Warp* warp) { return warp->exited == kLanes; }),
                live_.end());
  }
  run_units(true);
}

}  // namespace vsa::sim
