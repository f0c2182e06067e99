// tcgen05.mma: D[M, N] += A[M, 16] B[16, N], A and B of 16-bit T, D float32 in tensor memory.
//
// In shared memory an operand lies as for wgmma: 128-byte rows of 64 elements with the 128-byte swizzle, in blocks of any
// number of rows (TMA boxes of ../sm90/tensor_map.h); blocks start at multiples of 1024 bytes. A matrix stored as [rows,
// columns] can enter with its columns as the K dimension ("K-major") or with its rows as K ("MN-major").
//
// Of D with M = 128, row i is lane i, column j column j. A in tensor memory: row i is lane i, columns 2 j and 2 j + 1 are
// the low and the high half of column j.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../sm90/elements.cuh"
#include "ptx.cuh"

namespace vsa::sm100 {

// A shared memory descriptor (PTX ISA, "tcgen05 shared memory descriptor"): bits 0..13 the address, 16..29 the leading and
// 32..45 the stride byte offset, all / 16; 46..48 are 1; 61..63 the swizzle, 2 of them 128 bytes.
__device__ __forceinline__ uint64_t operand(uint32_t address, int leading_bytes) {
  constexpr uint32_t kHigh = kSwizzleAtomBytes >> 4 | 1u << (46 - 32) | 2u << (61 - 32);
  const uint32_t low = (address & 0x3ffff) >> 4 | static_cast<uint32_t>(leading_bytes) >> 4 << 16;
  return static_cast<uint64_t>(kHigh) << 32 | low;
}

// 16 columns from 16 * step on, as K; the blocks are `block_bytes` apart. K-major: the leading offset does not count.
__device__ __forceinline__ uint64_t k_major(uint32_t blocks, int block_bytes, int step) {
  constexpr int kSteps = kSwizzleColumns / 16;
  return operand(blocks + step / kSteps * block_bytes + step % kSteps * 32, 16);
}

// 16 rows from 16 * step on, as K.
__device__ __forceinline__ uint64_t mn_major(uint32_t blocks, int block_bytes, int step) {
  return operand(blocks + step * 2 * kSwizzleAtomBytes, block_bytes);
}

enum class Major : uint32_t { kK, kMN };

// An instruction descriptor (PTX ISA, "Instruction descriptor" of kind::f16): bits 4..5 the type of D, 1 is float32; 7..9 and
// 10..12 those of A and B, 0 float16, 1 bfloat16; 15 and 16 whether A and B are MN-major; 17..22 N / 8; 24..28 M / 16.
template <class T>
constexpr uint32_t Instruction(int m, int n, Major a, Major b) {
  constexpr uint32_t kType = std::is_same_v<T, __half> ? 0 : 1;
  return 1u << 4 | kType << 7 | kType << 10 | static_cast<uint32_t>(a) << 15 | static_cast<uint32_t>(b) << 16 |
         static_cast<uint32_t>(n / 8) << 17 | static_cast<uint32_t>(m / 16) << 24;
}

}  // namespace vsa::sm100
