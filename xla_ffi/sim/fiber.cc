#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>
#include <vector>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace vsa::sim {
namespace {

Fiber* running = nullptr;

// A stack whose overflow is a fault, not a neighbour's stack. Launches come and go; stacks stay for the next.
std::vector<void*> free_stacks;

void* TakeStack() {
  if (!free_stacks.empty()) {
    void* const stack = free_stacks.back();
    free_stacks.pop_back();
    return stack;
  }
  void* const stack = mmap(nullptr, Fiber::kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (stack == MAP_FAILED || mprotect(stack, 4096, PROT_NONE) != 0) throw std::bad_alloc();
  return stack;
}

}  // namespace

#if defined(__x86_64__) || defined(__aarch64__)

// Saves the callee-saved registers on the stack at hand, leaves its pointer at `from`, and goes on at `to`. ucontext
// does the same with two system calls a switch.
extern "C" void vsa_sim_switch(void** from, void* to);

#if defined(__x86_64__)
asm(R"(
.text
.globl vsa_sim_switch
.hidden vsa_sim_switch
.type vsa_sim_switch, @function
vsa_sim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size vsa_sim_switch, .-vsa_sim_switch
)");
constexpr int kSavedWords = 6, kReturnWord = 6;
#else
asm(R"(
.text
.globl vsa_sim_switch
.hidden vsa_sim_switch
.type vsa_sim_switch, %function
vsa_sim_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size vsa_sim_switch, .-vsa_sim_switch
)");
constexpr int kSavedWords = 20, kReturnWord = 11;
#endif

struct Fiber::Context {
  void* stack = TakeStack();
  void* here = nullptr;    // the stack pointer of the fiber, while it does not run
  void* caller = nullptr;  // and of who resumed it
};

#else

struct Fiber::Context {
  void* stack = TakeStack();
  ucontext_t here, caller;
};

#endif

Fiber::Fiber(std::function<void()> body)
    : body_(std::move(body)), context_(std::make_unique<Context>()) {
  Context& context = *context_;
#if defined(__x86_64__) || defined(__aarch64__)
  auto* top = reinterpret_cast<uintptr_t*>(static_cast<char*>(context.stack) + kStackBytes);
#if defined(__x86_64__)
  *--top = 0;  // so that `enter` finds the stack as a call would leave it: 8 bytes past a multiple of 16
  *--top = reinterpret_cast<uintptr_t>(&Fiber::enter);
  for (int i = 0; i < kSavedWords; ++i) *--top = 0;
#else
  top -= kSavedWords;
  for (int i = 0; i < kSavedWords; ++i) top[i] = 0;
  top[kReturnWord] = reinterpret_cast<uintptr_t>(&Fiber::enter);
#endif
  context.here = top;
#else
  getcontext(&context.here);
  context.here.uc_stack.ss_sp = context.stack;
  context.here.uc_stack.ss_size = kStackBytes;
  context.here.uc_link = nullptr;
  makecontext(&context.here, reinterpret_cast<void (*)()>(&Fiber::enter), 0);
#endif
}

Fiber::~Fiber() { free_stacks.push_back(context_->stack); }

void Fiber::enter() {
  Fiber* const self = running;
  self->body_();
  self->finished_ = true;
  yield();
}

void Fiber::resume() {
  running = this;
#if defined(__x86_64__) || defined(__aarch64__)
  vsa_sim_switch(&context_->caller, context_->here);
#else
  swapcontext(&context_->caller, &context_->here);
#endif
  running = nullptr;
}

void Fiber::yield() {
  Context& context = *running->context_;
#if defined(__x86_64__) || defined(__aarch64__)
  vsa_sim_switch(&context.here, context.caller);
#else
  swapcontext(&context.here, &context.caller);
#endif
}

}  // namespace vsa::sim
