// The instructions that Blackwell (sm_100a, sm_103a) adds to those of Hopper, one function each, named after the PTX
// instruction; what both have is in ../sm90/ptx.cuh. In quotes: the section of the PTX ISA.
#pragma once

#include "../sm90/ptx.cuh"

#ifdef VSA_SIM
#include "../sim/blackwell.h"
#else

namespace vsa::sm100 {

using namespace sm90;

// Tensor memory ("Tensor Memory"): 128 lanes of 512 columns of 32 bits, at lane << 16 | column. A warp reaches lanes
// 32 * (warp % 4) and the 31 after.

// "tcgen05.alloc": a whole warp; the address of so many columns goes to shared memory at `to`.
__device__ __forceinline__ void tmem_alloc(uint32_t to, int columns) {
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(to), "r"(columns) : "memory");
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
}

// "tcgen05.dealloc": a whole warp, once nobody uses them.
__device__ __forceinline__ void tmem_dealloc(uint32_t address, int columns) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns) : "memory");
}

// "tcgen05.fence": asynchronous tcgen05 operations before the first are ordered before what other threads do once they
// know, and those after the second behind what this thread knows.
__device__ __forceinline__ void tcgen05_fence_before_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ __forceinline__ void tcgen05_fence_after_sync() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// "tcgen05.mma", by one thread: D += A B, or D = A B. D in tensor memory, B in shared memory, A in shared memory or, packed
// in pairs along K, in tensor memory; descriptors as in mma.cuh.
__device__ __forceinline__ void tcgen05_mma(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %4, 0;\n"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, add;\n"
      "}\n" ::"r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(static_cast<uint32_t>(add))
      : "memory");
}
__device__ __forceinline__ void tcgen05_mma(uint32_t d, uint32_t a, uint64_t b, uint32_t instruction, bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %4, 0;\n"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, %3, add;\n"
      "}\n" ::"r"(d),
      "r"(a), "l"(b), "r"(instruction), "r"(static_cast<uint32_t>(add))
      : "memory");
}

// "tcgen05.commit": an arrival at an mbarrier when all that this thread has issued so far is done.
__device__ __forceinline__ void tcgen05_commit(uint32_t barrier) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier) : "memory");
}

// "tcgen05.ld", "tcgen05.st" of shape 32x32b, by a whole warp: lane i of the warp has kCount columns of its lane of tensor
// memory. Loaded registers may be read after tmem_wait_load of them.

#define VSA_8(f, x, i) f(x, i), f(x, i + 1), f(x, i + 2), f(x, i + 3), f(x, i + 4), f(x, i + 5), f(x, i + 6), f(x, i + 7)
#define VSA_16(f, x, i) VSA_8(f, x, i), VSA_8(f, x, i + 8)
#define VSA_32(f, x, i) VSA_16(f, x, i), VSA_16(f, x, i + 16)
#define VSA_OUT(x, i) "=r"(x[i])
#define VSA_IN(x, i) "r"(x[i])
#define VSA_NAMES16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define VSA_NAMES32 \
  VSA_NAMES16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"

__device__ __forceinline__ void tmem_load(uint32_t (&to)[16], uint32_t address) {
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x16.b32 {" VSA_NAMES16 "}, [%16];"
               : VSA_16(VSA_OUT, to, 0)
               : "r"(address));
}
__device__ __forceinline__ void tmem_load(uint32_t (&to)[32], uint32_t address) {
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x32.b32 {" VSA_NAMES32 "}, [%32];"
               : VSA_32(VSA_OUT, to, 0)
               : "r"(address));
}
__device__ __forceinline__ void tmem_store(uint32_t address, const uint32_t (&from)[16]) {
  asm volatile("tcgen05.st.sync.aligned.32x32b.x16.b32 [%16], {" VSA_NAMES16 "};" ::VSA_16(VSA_IN, from, 0),
               "r"(address)
               : "memory");
}
__device__ __forceinline__ void tmem_store(uint32_t address, const uint32_t (&from)[32]) {
  asm volatile("tcgen05.st.sync.aligned.32x32b.x32.b32 [%32], {" VSA_NAMES32 "};" ::VSA_32(VSA_IN, from, 0),
               "r"(address)
               : "memory");
}

#undef VSA_8
#undef VSA_16
#undef VSA_32
#undef VSA_OUT
#undef VSA_IN
#undef VSA_NAMES16
#undef VSA_NAMES32

// "tcgen05.wait": all loads of this thread have written their registers; its stores have been done. The compiler sees
// only through `loaded` that those registers change here.
template <int kParts, int kCount>
__device__ __forceinline__ void tmem_wait_load(uint32_t (&loaded)[kParts][kCount]) {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(loaded[part][i]));
  }
}
__device__ __forceinline__ void tmem_wait_store() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }

// "clusterlaunchcontrol.try_cancel": asks for the work of a CTA that has not started. 16 bytes arrive at `response`, and
// `barrier` counts them.
__device__ __forceinline__ void try_cancel(uint32_t response, uint32_t barrier) {
  asm volatile("clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%0], [%1];" ::"r"(
                   response),
               "r"(barrier)
               : "memory");
}

// "clusterlaunchcontrol.query_cancel": the index of that CTA, or -1: there is none, and nothing may be asked for any more.
__device__ __forceinline__ int cancelled_cta(uint32_t response) {
  int index;
  asm volatile(
      "{\n"
      ".reg .b128 response;\n"
      ".reg .pred cancelled;\n"
      "ld.shared.b128 response, [%1];\n"
      "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 cancelled, response;\n"
      "mov.s32 %0, -1;\n"
      "@cancelled clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %0, response;\n"
      "}\n"
      : "=r"(index)
      : "r"(response)
      : "memory");
  return index;
}

// "fma", "add" of .f32x2: two at a time.
__device__ __forceinline__ float2 fma2(float2 a, float2 b, float2 c) {
  uint64_t d;
  asm("fma.rn.f32x2 %0, %1, %2, %3;"
      : "=l"(d)
      : "l"(reinterpret_cast<uint64_t&>(a)), "l"(reinterpret_cast<uint64_t&>(b)), "l"(reinterpret_cast<uint64_t&>(c)));
  return reinterpret_cast<float2&>(d);
}
__device__ __forceinline__ float2 add2(float2 a, float2 b) {
  uint64_t d;
  asm("add.rn.f32x2 %0, %1, %2;" : "=l"(d) : "l"(reinterpret_cast<uint64_t&>(a)), "l"(reinterpret_cast<uint64_t&>(b)));
  return reinterpret_cast<float2&>(d);
}
__device__ __forceinline__ float2 mul2(float2 a, float2 b) {
  uint64_t d;
  asm("mul.rn.f32x2 %0, %1, %2;" : "=l"(d) : "l"(reinterpret_cast<uint64_t&>(a)), "l"(reinterpret_cast<uint64_t&>(b)));
  return reinterpret_cast<float2&>(d);
}

// "add" rounded down, "max" of which NaN is a part.
__device__ __forceinline__ float add_down(float a, float b) { return __fadd_rd(a, b); }
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

}  // namespace vsa::sm100

#endif  // VSA_SIM
