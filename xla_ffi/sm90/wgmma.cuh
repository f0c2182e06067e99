// wgmma: D[64, N] += A[64, 16] B[16, N] by one warpgroup, A and B of 16-bit T, D float32 in registers.
//
// Accumulator d[i] of a thread (PTX ISA, wgmma m64nNk16): row 16 * warp + lane / 4 + 8 * (i / 2 % 2), column
// 8 * (i / 4) + 2 * (lane % 4) + i % 2. A in registers has the same layout, two columns a register, so the
// accumulators of one product, rounded, are the A operand of the next.
//
// In shared memory an operand is made of 128-byte rows of 64 elements with the 128-byte swizzle, in blocks of
// any number of rows (TMA boxes of tensor_map.h); blocks start at multiples of 1024 bytes. A matrix stored as
// [rows, columns] can enter with its columns as the K dimension ("K-major") or with its rows as K ("MN-major").
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "elements.cuh"
#include "ptx.cuh"

namespace vsa::sm90 {

// A matrix in shared memory, as wgmma takes it (PTX ISA, "Matrix descriptor format"): addresses in units of 16
// bytes. Only the low word changes from step to step, by constants: one uniform add per wgmma.
struct Operand {
  uint32_t low, high;

  // `leading_bytes`: between blocks of 64 columns of an MN-major matrix; K-major ignores it.
  __device__ __forceinline__ Operand(const void* blocks, int leading_bytes)
      : low((shared_address(blocks) & 0x3ffff) >> 4 | leading_bytes >> 4 << 16),  // in a cluster the high bits are the CTA's rank
        high(kSwizzleAtomBytes >> 4 | 1u << 30) {}

  __device__ __forceinline__ uint64_t at(int bytes) const {
    return static_cast<uint64_t>(high) << 32 | (low + (bytes >> 4));
  }
};

// Rows are M or N, columns are K, 16 a step.
template <int kBlockBytes>
struct KMajor : Operand {
  __device__ __forceinline__ explicit KMajor(const void* blocks) : Operand(blocks, 16) {}
  __device__ __forceinline__ uint64_t step(int k) const {
    constexpr int kSteps = kSwizzleColumns / 16;
    return at(k / kSteps * kBlockBytes + k % kSteps * 32);
  }
};

// Rows are K, 16 a step, columns are M or N.
template <int kBlockBytes>
struct MNMajor : Operand {
  __device__ __forceinline__ explicit MNMajor(const void* blocks) : Operand(blocks, kBlockBytes) {}
  __device__ __forceinline__ uint64_t step(int k) const { return at(k * 2 * kSwizzleAtomBytes); }
};

enum class Major { kK, kMN };

#ifdef VSA_SIM

template <class T, Major kA, Major kB, int kAccumulators>
void wgmma(float (&d)[kAccumulators], uint64_t a, uint64_t b, int add) {
  sim::IssueProduct({d, nullptr, a, b, 2 * kAccumulators, std::is_same_v<T, __half>, kA == Major::kMN,
                     kB == Major::kMN, add != 0});
}

template <class T, Major kB, int kAccumulators>
void wgmma(float (&d)[kAccumulators], const uint32_t* a, uint64_t b, int add) {
  sim::IssueProduct({d, a, 0, b, 2 * kAccumulators, std::is_same_v<T, __half>, false, kB == Major::kMN, add != 0});
}

#else

// Before the first wgmma of a sequence, and after registers it reads were written.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// At most kPending committed groups are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Pins registers at this point of the program: the compiler does not see that wgmma writes them later.
template <int kCount>
__device__ __forceinline__ void pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

#define VSA_D8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define VSA_D32(d, i) VSA_D8(d, i), VSA_D8(d, i + 8), VSA_D8(d, i + 16), VSA_D8(d, i + 24)
#define VSA_NAMES32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define VSA_NAMES64 \
  VSA_NAMES32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
// The operands that follow D: A's descriptor, B's, whether D is added to, and the transposes.
#define VSA_SS(n, type, names, a, b, add, ta, tb)                                                      \
  "{.reg .pred p; setp.ne.b32 p, " add ", 0; wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type \
  " {" names "}, " a ", " b ", p, 1, 1, " ta ", " tb ";}"
#define VSA_RS(n, type, names, a0, a1, a2, a3, b, add, tb)                                              \
  "{.reg .pred p; setp.ne.b32 p, " add ", 0; wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type \
  " {" names "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b ", p, 1, 1, " tb ";}"

// D (+)= A B with both operands in shared memory; add = 0 overwrites D.
template <class T, Major kA, Major kB, int kAccumulators>
__device__ __forceinline__ void wgmma(float (&d)[kAccumulators], uint64_t a, uint64_t b, int add) {
  static_assert(kAccumulators == 32 || kAccumulators == 64, "N = 64 or 128");
  constexpr int ta = kA == Major::kMN, tb = kB == Major::kMN;
  if constexpr (kAccumulators == 32) {
    if constexpr (std::is_same_v<T, __half>) {
      asm volatile(VSA_SS("64", "f16", VSA_NAMES32, "%32", "%33", "%34", "%35", "%36")
                   : VSA_D32(d, 0) : "l"(a), "l"(b), "r"(add), "n"(ta), "n"(tb));
    } else {
      asm volatile(VSA_SS("64", "bf16", VSA_NAMES32, "%32", "%33", "%34", "%35", "%36")
                   : VSA_D32(d, 0) : "l"(a), "l"(b), "r"(add), "n"(ta), "n"(tb));
    }
  } else {
    if constexpr (std::is_same_v<T, __half>) {
      asm volatile(VSA_SS("128", "f16", VSA_NAMES64, "%64", "%65", "%66", "%67", "%68")
                   : VSA_D32(d, 0), VSA_D32(d, 32) : "l"(a), "l"(b), "r"(add), "n"(ta), "n"(tb));
    } else {
      asm volatile(VSA_SS("128", "bf16", VSA_NAMES64, "%64", "%65", "%66", "%67", "%68")
                   : VSA_D32(d, 0), VSA_D32(d, 32) : "l"(a), "l"(b), "r"(add), "n"(ta), "n"(tb));
    }
  }
}

// D (+)= A B with A in four registers of two elements.
template <class T, Major kB, int kAccumulators>
__device__ __forceinline__ void wgmma(float (&d)[kAccumulators], const uint32_t* a, uint64_t b, int add) {
  static_assert(kAccumulators == 32 || kAccumulators == 64, "N = 64 or 128");
  constexpr int tb = kB == Major::kMN;
  if constexpr (kAccumulators == 32) {
    if constexpr (std::is_same_v<T, __half>) {
      asm volatile(VSA_RS("64", "f16", VSA_NAMES32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
                   : VSA_D32(d, 0)
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(tb));
    } else {
      asm volatile(VSA_RS("64", "bf16", VSA_NAMES32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
                   : VSA_D32(d, 0)
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(tb));
    }
  } else {
    if constexpr (std::is_same_v<T, __half>) {
      asm volatile(VSA_RS("128", "f16", VSA_NAMES64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
                   : VSA_D32(d, 0), VSA_D32(d, 32)
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(tb));
    } else {
      asm volatile(VSA_RS("128", "bf16", VSA_NAMES64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
                   : VSA_D32(d, 0), VSA_D32(d, 32)
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(tb));
    }
  }
}

#undef VSA_D8
#undef VSA_D32
#undef VSA_NAMES32
#undef VSA_NAMES64
#undef VSA_SS
#undef VSA_RS

#endif  // VSA_SIM

// Where 16 bytes of a row lie in swizzled blocks.
template <int kBlockBytes>
__device__ __forceinline__ uint32_t swizzled(const void* blocks, int row, int chunk) {
  return shared_address(blocks) + chunk / 8 * kBlockBytes + row * 128 + (chunk % 8 ^ row % 8) * 16;
}

// Rows 16 * warp .. + 15 and columns 16 * k .. + 15 of a matrix [64 rows, columns] in swizzled blocks: the A operand
// of a K step, in registers.
template <int kBlockBytes>
__device__ __forceinline__ void load_a(uint32_t* a, const void* blocks, int k) {
  const int lane = threadIdx.x % 32;
  ldmatrix(a, swizzled<kBlockBytes>(blocks, threadIdx.x % 128 / 32 * 16 + lane % 16, 2 * k + lane / 16));
}

// Makes the rows from `first` on 0, of K steps in registers.
template <int kCount>
__device__ __forceinline__ void clear_a(uint32_t (&a)[kCount], int first) {
  if (first >= 64) return;
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (row + i % 2 * 8 >= first) a[i] = 0;
  }
}

// D[16, 8] += A[16, 16] B[16, 8] by one warp.
template <class T>
__device__ __forceinline__ void mma(float* d, const uint32_t* a, const uint32_t* b) {
#ifdef VSA_SIM
  sim::MultiplyInWarp(d, a, b, std::is_same_v<T, __half>);
#else
#define VSA_MMA(type)                                                                                             \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "  \
               "{%8, %9}, {%0, %1, %2, %3};"                                                                       \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
  if constexpr (std::is_same_v<T, __half>) VSA_MMA("f16");
  else VSA_MMA("bf16");
#undef VSA_MMA
#endif
}

// D = A B^T as wgmma would leave it, by a warp alone: A in registers, as `load_a` loads it, kSteps * 16 columns; B's
// 2 * kCount rows in swizzled blocks. Slow: for what happens rarely, and not in all warps of a warpgroup.
template <class T, int kBlockBytes, int kSteps, int kCount>
__device__ __forceinline__ void multiply_in_warp(float (&d)[kCount], const uint32_t (&a)[4 * kSteps],
                                                 const void* blocks) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kCount; ++i) d[i] = 0;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    // One address at a time: registers are few here.
    const uint32_t first = opaque(swizzled<kBlockBytes>(blocks, lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
    for (int row = 0; row < 2 * kCount; row += 16) {
      uint32_t b[4];
      ldmatrix(b, first + row * 128);
      mma<T>(d + row / 2, a + 4 * k, b);
      mma<T>(d + row / 2 + 4, a + 4 * k, b + 2);
    }
  }
}

}  // namespace vsa::sm90
