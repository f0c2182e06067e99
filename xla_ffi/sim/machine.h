// A GPU that runs one launch: CTAs, warps and lanes as fibers, in an order drawn from a seed, and units that work
// beside them and finish late. What a kernel does wrong is an Error that names the place.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "fiber.h"

namespace vsa::sim {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

constexpr int kLanes = 32;
constexpr uint32_t kRankShift = 24;  // a 32-bit shared-memory address: the CTA's rank in its cluster, then the offset

class Machine;
struct Cta;
struct Warp;

// Stores that a lane has handed to TMA: groups of those committed, oldest first, then the open one.
struct BulkGroup {
  int unread = 0, unwritten = 0;  // stores that have not read shared memory, not written global memory
  bool committed = false;
};

struct Lane {
  Warp* warp = nullptr;
  int index = 0;  // in its warp
  std::unique_ptr<Fiber> fiber;
  std::string what;               // it waits for
  bool (*ready)(void*) = nullptr;  // null: it waits for nothing
  void* closure = nullptr;
  std::deque<std::shared_ptr<BulkGroup>> bulk_groups;
  uint64_t tensor_issued = 0, tensor_done = 0;  // products of Blackwell
};

// Work of a unit that does one after the other, some time after it was given.
struct Queue {
  std::deque<std::function<void()>> work;
  uint64_t issued = 0, done = 0;

  void push(std::function<void()> one) {
    ++issued;
    work.push_back(std::move(one));
  }
  void pop() {
    const std::function<void()> one = std::move(work.front());
    work.pop_front();
    one();
    ++done;
  }
};

struct Warp {
  Cta* cta;
  int index;  // in its CTA
  Lane lanes[kLanes];
  int registers;  // a thread
  int exited = 0;  // lanes

  // Lanes that are together at a collective operation.
  const char* meeting = nullptr;
  uint32_t arrived = 0;
  uint64_t met = 0;  // how often
  const void* inputs[kLanes];
  void* outputs[kLanes];

  // Of Hopper: products, and how many were issued up to the end of each committed group.
  Queue products;
  std::deque<uint64_t> product_groups;
  // Of Blackwell: between registers and tensor memory.
  Queue tensor_loads, tensor_stores;
};

// mbarrier: arrivals and bytes that a phase still expects.
struct Barrier {
  uint32_t count = 0, pending = 0;
  int64_t bytes = 0;
  uint64_t phase = 0;
};

struct NamedBarrier {
  int arrived = 0, threads = 0;  // threads: as the first to arrive says
  uint64_t phase = 0;
};

// Blackwell's tensor cores and their memory.
struct Tensor {
  static constexpr int kLanes = 128, kColumns = 512;
  std::vector<uint32_t> memory;  // [lane, column]; empty before it is allocated
  int columns = 0;               // of them, those allocated
  bool permit = true;            // to allocate
  Queue products;
  // Arrivals at a barrier once a lane's first products are done.
  struct Commit {
    Lane* by;
    uint64_t products;
    std::function<void()> arrive;
  };
  std::vector<Commit> commits;
};

struct Cta {
  int index;  // in the grid
  int rank;   // in the cluster
  bool ended = false;
  std::vector<uint8_t> storage;
  uint8_t* memory;  // shared; aligned
  size_t bytes;
  std::deque<Warp> warps;
  std::unordered_map<uint32_t, Barrier> barriers;  // by offset
  NamedBarrier named[16];
  NamedBarrier of_cluster;  // of the first CTA of a cluster: all its threads'
  Tensor tensor;
  bool asked_in_vain = false;  // for a CTA to cancel
  int free_registers = 0;  // given back by setmaxnreg
};

struct Launch {
  Dim grid, block;
  int cluster = 1;
  size_t shared_bytes = 0;
  std::function<void()> kernel;  // one thread's run
};

class Machine {
 public:
  explicit Machine(uint64_t seed) : random_(seed) {}

  // Runs it to its end. Throws Error.
  void run(const Launch& launch);

  // Of the running lane.
  static Machine& current();
  Lane& lane() { return *running_; }
  Warp& warp() { return *running_->warp; }
  Cta& cta() { return *running_->warp->cta; }
  const Launch& launch() const { return *launch_; }

  // The CTA that an address of the running lane's cluster means, and the offset in it.
  Cta& cta_of(uint32_t address);
  uint8_t* at(uint32_t address, size_t bytes);  // checked
  static uint32_t offset(uint32_t address) { return address & ((1u << kRankShift) - 1); }
  Barrier& barrier(Cta& cta, uint32_t offset);

  // Lets others run until test() holds.
  template <class Test>
  void wait(const std::string& what, const Test& test) {
    Lane& lane = *running_;
    lane.what = what;
    lane.closure = const_cast<Test*>(&test);
    lane.ready = [](void* closure) { return static_cast<bool>((*static_cast<Test*>(closure))()); };
    Fiber::yield();
    lane.ready = nullptr;
  }

  // An operation that all lanes of a warp do together: the last to arrive calls finish(inputs, outputs), pointers to
  // what each lane brought and gets.
  template <class In, class Out, class Finish>
  Out together(const char* what, const In& in, const Finish& finish) {
    Out out{};
    Warp& warp = this->warp();
    const int index = running_->index;
    if (warp.exited > 0) fail(std::string(what) + " after lanes of the warp have returned");
    if (warp.arrived == 0) warp.meeting = what;
    else if (warp.meeting != what && std::strcmp(warp.meeting, what) != 0) {
      fail(std::string("lanes apart: some are at ") + warp.meeting + ", this one is at " + what);
    }
    warp.inputs[index] = &in;
    warp.outputs[index] = &out;
    warp.arrived |= 1u << index;
    if (warp.arrived == 0xffffffff) {
      const In* ins[kLanes];
      Out* outs[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        ins[i] = static_cast<const In*>(warp.inputs[i]);
        outs[i] = static_cast<Out*>(warp.outputs[i]);
      }
      finish(ins, outs);
      warp.arrived = 0;
      ++warp.met;
    } else {
      const uint64_t met = warp.met;
      wait(what, [&] { return warp.met != met; });
    }
    return out;
  }

  // Has `work` done some time later, by a unit that copies.
  void later(std::function<void()> work) { copies_.push_back(std::move(work)); }
  // The same, of work that writes a CTA's shared memory: by then it may not have ended.
  void later_into(Cta& cta, std::function<void()> work);
  // Takes a CTA that has not started, which then never does; -1: none. For clusters of one.
  int cancel_cta();

  int below(int count) { return static_cast<int>(random_() % count); }
  [[noreturn]] void fail(const std::string& what);  // Error that says where

 private:
  void start_cta(int index);
  void end_cta(Cta& cta);
  bool run_warp(Warp& warp);
  void do_copy(size_t index);
  bool run_copies(int one_in);
  bool run_queues(Warp& warp, int one_in);
  bool run_one_unit();
  [[noreturn]] void report_deadlock();
  std::string place(const Lane& lane) const;

  std::mt19937_64 random_;
  const Launch* launch_ = nullptr;
  Lane* running_ = nullptr;
  std::vector<std::unique_ptr<Cta>> ctas_;  // by number: those started
  std::vector<int> waiting_;                // numbers of the others, the next last
  std::vector<Warp*> live_;  // warps
  std::vector<std::function<void()>> copies_;
  int copies_one_in_, products_one_in_;  // how likely they are done when they could be; 0: only when nothing else can
  std::exception_ptr error_;
};

// The device that launches go to: one launch after the other, whatever thread they come from, each with the seed after
// that of the one before. `processors`, 2 or more: SMs, with a CTA each.
void SetDevice(uint64_t seed, int processors);
int Processors();
void Run(const Launch& launch);

}  // namespace vsa::sim
