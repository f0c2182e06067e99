// Runs numbered tasks on somebody else's threads, and on the calling one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace vsa::cpu {

// Memory aligned to 64 bytes; get() is null where there was none to have.
class Memory {
 public:
  explicit Memory(size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* get() const { return start_; }

 private:
  void* start_;
};

// Threads that may help.  What is given to `schedule` runs once, some time: perhaps after the call that gave it.
struct Pool {
  int64_t threads = 0;
  std::function<void(std::function<void()>)> schedule;
};

// One task.  `scratch` is its thread's own, aligned to 64 bytes; what it holds at the start is left over.
using Task = void (*)(const void* context, int64_t index, void* scratch);

// Calls task(context, i, scratch) for every i in [0, count), in any order, and returns when all are done.
// The calling thread takes part and waits only for tasks that have begun, so a busy pool delays nothing.
// Denormal numbers are zero in every task, whatever the thread does otherwise.
// False: no memory for the scratch, and nothing was run.
bool ParallelFor(const Pool& pool, int64_t count, size_t scratch_bytes, Task task, const void* context);

}  // namespace vsa::cpu
