#include "machine.h"

#include <algorithm>
#include <atomic>
#include <mutex>

namespace vsa::sim {
namespace {

constexpr int kRegisters = 65536;  // of an SM
Machine* machine = nullptr;
std::mutex device;
uint64_t next_seed = 0;
std::atomic<int> processors = 4;

}  // namespace

void SetDevice(uint64_t seed, int count) {
  if (count < 2) throw std::invalid_argument("processors: got " + std::to_string(count) + ", want 2 or more");
  const std::lock_guard lock(device);
  next_seed = seed;
  processors = count;
}
int Processors() { return processors; }
void Run(const Launch& launch) {
  const std::lock_guard lock(device);
  const uint64_t seed = next_seed++;
  try {
    Machine(seed).run(launch);
  } catch (const Error& error) {
    throw Error(std::string(error.what()) + " [seed " + std::to_string(seed) + " of this launch, " +
                std::to_string(processors) + " processors]");
  }
}

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
  Cta& there = *ctas_[mine.index - mine.rank + rank];
  if (there.ended) fail("shared memory of a CTA that has ended");
  return there;
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

int Machine::cancel_cta() {
  if (launch_->cluster != 1) fail("try_cancel in a launch of clusters is not modelled");
  // None left; or the hardware has other plans.
  if (waiting_.empty() || below(8) == 0) return -1;
  const auto at = waiting_.begin() + below(static_cast<int>(waiting_.size()));
  const int index = *at;
  waiting_.erase(at);
  return index;
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

void Machine::later_into(Cta& cta, std::function<void()> work) {
  later([&cta, work = std::move(work)] {
    if (cta.ended) throw Error("CTA " + std::to_string(cta.index) + " has ended, and a copy into its shared memory has not");
    work();
  });
}

void Machine::do_copy(size_t index) {
  std::function<void()> work = std::move(copies_[index]);
  copies_[index] = std::move(copies_.back());
  copies_.pop_back();
  work();
}

// Of the copies that are to be done, each with a chance of one in `one_in`.
bool Machine::run_copies(int one_in) {
  bool moved = false;
  for (size_t i = 0; one_in > 0 && i < copies_.size();) {
    if (below(one_in) > 0) {
      ++i;
    } else {
      do_copy(i);
      moved = true;
    }
  }
  return moved;
}

namespace {

// All that works for a warp, and for its CTA.
template <class Visit>
void ForQueues(Warp& warp, Visit visit) {
  visit(warp.products);
  visit(warp.tensor_loads);
  visit(warp.tensor_stores);
  visit(warp.cta->tensor.products);
}

// An arrival that is due, if any.
bool Commit(Tensor& tensor) {
  for (auto commit = tensor.commits.begin(); commit != tensor.commits.end(); ++commit) {
    if (commit->by->tensor_done < commit->products) continue;
    commit->arrive();
    tensor.commits.erase(commit);
    return true;
  }
  return false;
}

}  // namespace

bool Machine::run_queues(Warp& warp, int one_in) {
  bool moved = false;
  const auto lets = [&] { return one_in > 0 && below(one_in) == 0; };
  ForQueues(warp, [&](Queue& queue) {
    for (; !queue.work.empty() && lets(); moved = true) queue.pop();
  });
  if (!warp.cta->tensor.commits.empty() && lets()) moved |= Commit(warp.cta->tensor);
  return moved;
}

// When no lane can go on.
bool Machine::run_one_unit() {
  const size_t first = below(static_cast<int>(live_.size()) + 1);  // warps and the copies take turns
  for (size_t i = 0; i <= live_.size(); ++i) {
    const size_t at = (first + i) % (live_.size() + 1);
    if (at < live_.size()) {
      Warp& warp = *live_[at];
      bool moved = Commit(warp.cta->tensor);
      ForQueues(warp, [&](Queue& queue) {
        if (moved || queue.work.empty()) return;
        queue.pop();
        moved = true;
      });
      if (moved) return true;
    } else if (!copies_.empty()) {
      do_copy(below(static_cast<int>(copies_.size())));
      return true;
    }
  }
  return false;
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

void Machine::start_cta(int index) {
  ctas_[index] = std::make_unique<Cta>();
  Cta& cta = *ctas_[index];
  cta.index = index;
  cta.rank = index % launch_->cluster;
  cta.bytes = launch_->shared_bytes;
  cta.storage.resize(cta.bytes + 1024);
  for (size_t i = 0; i < cta.storage.size(); ++i) cta.storage[i] = i % 2 ? 0x7f : 0xff;  // NaN, of any type
  const auto address = reinterpret_cast<uintptr_t>(cta.storage.data());
  cta.memory = cta.storage.data() + (1024 - address % 1024) % 1024;
  const int threads = static_cast<int>(launch_->block.x);
  for (int w = 0; w < threads / kLanes; ++w) {
    Warp& warp = cta.warps.emplace_back();
    warp.cta = &cta;
    warp.index = w;
    warp.registers = std::min(255, kRegisters / threads / 8 * 8);
    for (int l = 0; l < kLanes; ++l) {
      warp.lanes[l].warp = &warp;
      warp.lanes[l].index = l;
      warp.lanes[l].fiber = std::make_unique<Fiber>([this] {
        try {
          launch_->kernel();
        } catch (...) {
          error_ = std::current_exception();
        }
      });
    }
    live_.push_back(&warp);
  }
}

// Its last lane has returned: whatever still uses its shared memory is a mistake.
void Machine::end_cta(Cta& cta) {
  for (Warp& warp : cta.warps) {
    for (Lane& lane : warp.lanes) {
      for (const auto& group : lane.bulk_groups) {
        if (group->unread > 0) throw Error(place(lane) + " has returned, and TMA has still to read what it stores");
      }
      lane.fiber.reset();
    }
    if (!warp.products.work.empty()) {
      throw Error(place(warp.lanes[0]) + " has returned, and its matrix products are still running");
    }
    if (!warp.tensor_loads.work.empty() || !warp.tensor_stores.work.empty()) {
      throw Error(place(warp.lanes[0]) + " has returned, and has not waited for its loads and stores of tensor memory");
    }
  }
  if (!cta.tensor.products.work.empty() || !cta.tensor.commits.empty()) {
    throw Error("CTA " + std::to_string(cta.index) + " has ended, and its matrix products, or commits of them, have not");
  }
  if (cta.tensor.columns > 0) throw Error("CTA " + std::to_string(cta.index) + " has not given back its tensor memory");
  cta.ended = true;
}

void Machine::run(const Launch& launch) {
  launch_ = &launch;
  machine = this;
  constexpr int kOneIn[] = {0, 4, 32};
  copies_one_in_ = kOneIn[below(3)];
  products_one_in_ = kOneIn[below(3)];
  const int threads = static_cast<int>(launch.block.x);
  if (threads % kLanes != 0 || launch.block.y * launch.block.z * launch.grid.y * launch.grid.z != 1) {
    throw Error("a launch that is not modelled: one dimension, whole warps");
  }
  if (launch.grid.x % launch.cluster != 0) throw Error("a grid that is not whole clusters");
  // As many clusters at once as there is room for, at least one; another when one has ended.
  ctas_.resize(launch.grid.x);
  for (int i = static_cast<int>(launch.grid.x) - 1; i >= 0; --i) waiting_.push_back(i);
  const int room = std::max(1, Processors() / launch.cluster) * launch.cluster;
  int running = 0;
  while (true) {
    while (running + launch.cluster <= room && !waiting_.empty()) {
      for (int i = 0; i < launch.cluster; ++i) {
        start_cta(waiting_.back());
        waiting_.pop_back();
      }
      running += launch.cluster;
    }
    if (live_.empty()) break;
    std::shuffle(live_.begin(), live_.end(), random_);
    bool moved = false;
    for (Warp* warp : live_) {
      if (below(8) == 0) continue;  // so that warps run ahead of each other
      moved |= run_warp(*warp);
      moved |= run_queues(*warp, products_one_in_);
      moved |= run_copies(copies_one_in_);
    }
    if (!moved) {
      for (Warp* warp : live_) moved |= run_warp(*warp);
      if (!moved && !run_one_unit()) report_deadlock();
    }
    for (Warp* warp : live_) {
      Cta& cta = *warp->cta;
      bool over = !cta.ended;
      for (const Warp& each : cta.warps) over &= each.exited == kLanes;
      if (!over) continue;
      end_cta(cta);
      --running;
    }
    live_.erase(std::remove_if(live_.begin(), live_.end(), [](Warp* warp) { return warp->exited == kLanes; }),
                live_.end());
  }
  while (!copies_.empty()) run_copies(1);
}

}  // namespace vsa::sim
