// See parallel.h.
#include "xla_ffi/cpu/parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace vsa::cpu {
namespace {

// XLA flushes denormals on some of its threads and not on others; results must not depend on the thread.
class DenormalsAreZero {
 public:
  DenormalsAreZero() : before_(Get()) { Set(before_ | kFlush); }
  ~DenormalsAreZero() { Set(before_); }

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kFlush = 0x8040;  // flush to zero, denormals are zero
  static uint64_t Get() { return _mm_getcsr(); }
  static void Set(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kFlush = uint64_t{1} << 24;
  static uint64_t Get() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void Set(uint64_t mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
#else
  static constexpr uint64_t kFlush = 0;
  static uint64_t Get() { return 0; }
  static void Set(uint64_t) {}
#endif
  uint64_t before_;
};

constexpr std::align_val_t kAlignment{64};

// Outlives the call: a scheduled helper may start after it and must find that nothing is left.
struct Work {
  int64_t count;
  size_t scratch_bytes;
  Task task;
  const void* context;  // dead once all tasks are done; only a task reads it
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::mutex mutex;
  std::condition_variable all_done;

  void Run(void* scratch) {
    DenormalsAreZero mode;
    for (int64_t i; (i = next.fetch_add(1)) < count;) {
      task(context, i, scratch);
      if (done.fetch_add(1) + 1 == count) {
        std::lock_guard<std::mutex> lock(mutex);
        all_done.notify_all();
      }
    }
  }
};

}  // namespace

Memory::Memory(size_t bytes)
    : start_(::operator new(std::max<size_t>(bytes, 1), kAlignment, std::nothrow)) {}
Memory::~Memory() { ::operator delete(start_, kAlignment); }

bool ParallelFor(const Pool& pool, int64_t count, size_t scratch_bytes, Task task, const void* context) {
  if (count <= 0) return true;
  auto work = std::make_shared<Work>();
  work->count = count;
  work->scratch_bytes = scratch_bytes;
  work->task = task;
  work->context = context;
  Memory own(scratch_bytes);
  if (own.get() == nullptr) return false;
  for (int64_t helpers = std::min(pool.threads, count) - 1; helpers > 0; --helpers) {
    pool.schedule([work] {
      if (work->next.load() >= work->count) return;
      Memory scratch(work->scratch_bytes);
      if (scratch.get() != nullptr) work->Run(scratch.get());
    });
  }
  work->Run(own.get());
  std::unique_lock<std::mutex> lock(work->mutex);
  work->all_done.wait(lock, [&] { return work->done.load() == count; });
  return true;
}

}  // namespace vsa::cpu
