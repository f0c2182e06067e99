// Fibers: functions with stacks of their own that hand control back and forth. One thread runs them all.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace vsa::sim {

class Fiber {
 public:
  static constexpr size_t kStackBytes = 128 << 10;

  explicit Fiber(std::function<void()> body);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Runs the body until it yields or returns. Not from within a fiber.
  void resume();
  // Back to whoever resumed the running fiber.
  static void yield();
  bool finished() const { return finished_; }

 private:
  struct Context;
  static void enter();

  std::function<void()> body_;
  std::unique_ptr<Context> context_;
  bool finished_ = false;
};

}  // namespace vsa::sim
