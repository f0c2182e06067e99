// Online softmax in base 2 over accumulators of m64nN products (the register layout is in wgmma.cuh).
#pragma once

#include <cmath>
#include "ptx.cuh"

namespace vsa::sm90 {

// Row and column, in a warpgroup's [64, N], of accumulator i of this thread.
__device__ __forceinline__ int accumulator_row(int i) {
  return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
}
__device__ __forceinline__ int accumulator_column(int i) {
  return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
}

// The four lanes that share a row.
template <class Combine>
__device__ __forceinline__ float across_row(float x, Combine combine) {
  x = combine(x, __shfl_xor_sync(kWholeWarp, x, 1));
  return combine(x, __shfl_xor_sync(kWholeWarp, x, 2));
}

// A row's weights are relative to an offset, which any logit near the largest will do for: weights are floating-point
// numbers. Until every row of the warp has seen a finite logit, as a rule in the first step, a step takes the largest
// of its first columns; later ones trust the offset they find. All look at the sum of their weights afterwards. So
// most steps need no maxima, no shuffles, and rescale nothing.
constexpr float kLargeSum = 0x1p15f;  // of a lane's weights: then the offset grows; each is still a finite float16
constexpr float kLostSum = 0x1p100f;  // weights may have overflowed

// Rows of a warp decide together, so padded rows of Q must hold no logits of their own: their Q is made 0.

// Of the two rows a thread has a part of. Invariant: `offset` (base 2, -inf before any finite logit) is the same in all
// four lanes of a row; `total` is the sum of exp2(scale_log2 * logit - offset) over this lane's columns alone.
struct RowStatistics {
  static constexpr int kParts = 4;  // chains of sums of a row; one measured the same
  static constexpr int kFirstColumns = 16;

  float offset[2], total[2], factor[2];
  bool trusted;   // every row has an offset
  bool rescales;  // whether any factor of this warp is not 1

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      offset[row] = -INFINITY;
      total[row] = 0;
      factor[row] = 1;
    }
    trusted = rescales = false;
  }

  // Replaces logits by weights, of the first `keys` columns; the others become 0. Sums over earlier columns must
  // be multiplied by `factor`. False: the logits are lost, since the offset was far too small for them; make them anew,
  // and ask again with `all_columns`, which takes maxima of all and is never false.
  template <int kCount>
  __device__ __forceinline__ bool update(float (&logits)[kCount], int keys, float scale_log2,
                                         bool all_columns = false) {
    if (keys < kCount * 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (accumulator_column(i) >= keys) logits[i] = -INFINITY;
      }
    }
    if (!all_columns) {  // else of the attempt before
      factor[0] = factor[1] = 1;
      rescales = false;
    }
    if (!trusted || all_columns) take_offsets(logits, scale_log2, all_columns);
    float sum[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      // -inf - -inf would be NaN: a row that has seen nothing but -inf subtracts 0.
      const float subtracted = offset[row] == -INFINITY ? 0 : offset[row];
      float part[kParts];
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
        float* const pair = logits + j * 4 + row * 2;
        pair[0] = exp2_approx(fmaf(pair[0], scale_log2, -subtracted));
        pair[1] = exp2_approx(fmaf(pair[1], scale_log2, -subtracted));
        const float of_pair = pair[0] + pair[1];
        part[j % kParts] = j < kParts ? of_pair : part[j % kParts] + of_pair;
      }
      sum[row] = (part[0] + part[1]) + (part[2] + part[3]);
    }
    if (__any_sync(kWholeWarp, fmaxf(sum[0], sum[1]) > kLargeSum)) {
      if (!all_columns && __any_sync(kWholeWarp, fmaxf(sum[0], sum[1]) > kLostSum)) return false;
      raise_offsets(logits, sum);
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) total[row] = fmaf(total[row], factor[row], sum[row]);
    return true;
  }

  template <int kCount>
  __device__ __forceinline__ void rescale(float (&out)[kCount]) const {
    if (!rescales) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] *= factor[i / 2 % 2];
  }

  // The factor that normalises a row's output, and its LSE. `any_keys`: whether the row had keys at all; one
  // that had, all of logit -inf, is NaN, as in dense attention.
  __device__ __forceinline__ void finish(int row, bool any_keys, float* norm, float* lse) const {
    const float sum = across_row(total[row], [](float a, float b) { return a + b; });
    *norm = sum == 0 ? (any_keys ? NAN : 0) : 1 / sum;
    *lse = sum == 0 ? (any_keys ? NAN : -INFINITY) : offset[row] + log2f(sum);
  }

 private:
  // The largest logit of the first columns, where it is well above the offset; of all columns, where some row
  // has no finite one there, or is known to need it.
  template <int kCount>
  __device__ __forceinline__ void take_offsets(const float (&logits)[kCount], float scale_log2, bool all_columns) {
    float largest[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) largest[row] = scale_log2 * largest_of<kFirstColumns>(logits, row);
    if (all_columns || __any_sync(kWholeWarp, largest[0] == -INFINITY || largest[1] == -INFINITY)) {
#pragma unroll
      for (int row = 0; row < 2; ++row) largest[row] = scale_log2 * largest_of<2 * kCount>(logits, row);
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      constexpr float kSlack = 8;
      const bool grown = largest[row] - offset[row] > kSlack;  // true while offset is -inf, unless largest is too
      if (grown) factor[row] *= exp2_approx(offset[row] - largest[row]);
      if (grown) offset[row] = largest[row];
    }
    rescales = __any_sync(kWholeWarp, factor[0] != 1 || factor[1] != 1);
    trusted = __all_sync(kWholeWarp, offset[0] != -INFINITY && offset[1] != -INFINITY);
  }

  template <int kColumns, int kCount>
  __device__ __forceinline__ static float largest_of(const float (&logits)[kCount], int row) {
    float largest = -INFINITY;
#pragma unroll
    for (int i = row * 2; i < kColumns / 2; i += 4) largest = fmaxf(largest, fmaxf(logits[i], logits[i + 1]));
    return across_row(largest, [](float a, float b) { return fmaxf(a, b); });
  }

  // Where a row's weights have grown large: takes them down and its offset up, by a power of two.
  template <int kCount>
  __device__ __forceinline__ void raise_offsets(float (&logits)[kCount], float (&sum)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float most = across_row(sum[row], [](float a, float b) { return fmaxf(a, b); });
      const int exponent = most > kLargeSum ? (__float_as_int(most) >> 23) - 127 : 0;
      const float down = __int_as_float((127 - exponent) << 23);
      factor[row] *= down;
      offset[row] += exponent;
      sum[row] *= down;
#pragma unroll
      for (int i = row * 2; i < kCount; i += 4) {
        logits[i] *= down;
        logits[i + 1] *= down;
      }
    }
    rescales = true;
  }
};

}  // namespace vsa::sm90
