// 16-bit elements: how they are rounded, and how operands of matrix products lie in shared memory, on Hopper and later.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace vsa::sm90 {

constexpr int kSwizzleColumns = 64;      // elements of a 128-byte row
constexpr int kSwizzleAtomBytes = 1024;  // 8 rows: the swizzle repeats

// (low, high) rounded to nearest even, in one register.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    __half2 x = __floats2half2_rn(low, high);
    return reinterpret_cast<uint32_t&>(x);
  } else {
    __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<uint32_t&>(x);
  }
}

}  // namespace vsa::sm90
