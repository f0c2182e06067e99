// Online softmax in base 2 over accumulators of m64nN products (the register layout is in wgmma.cuh).
#pragma once

#include <cmath>
#include <cstdint>

#include "lists.cuh"
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

// A row's weights are relative to an offset that follows its largest logit only when that has grown by more
// than this (base 2): most steps then rescale nothing, and no weight exceeds 2**8.
constexpr float kSlack = 8;

// Of the two rows a thread has a part of. Invariant: `top` is the logit that weights are relative to, the same in
// all four lanes of a row, at most kSlack under the largest so far; `total` is the sum of
// exp2(scale_log2 * (logit - top)) over this lane's columns alone.
struct RowStatistics {
  float top[2], total[2], factor[2];
  bool rescales;  // whether any factor of this warp is not 1

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      top[row] = -INFINITY;
      total[row] = 0;
    }
  }

  // Replaces logits by weights, of the first `keys` columns; the others become 0. Sums over earlier columns must
  // be multiplied by `factor`.
  template <int kCount>
  __device__ __forceinline__ void update(float (&logits)[kCount], int keys, float scale_log2) {
    if (keys < kCount * 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (accumulator_column(i) >= keys) logits[i] = -INFINITY;
      }
    }
    float offset[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float largest = fmaxf(logits[row * 2], logits[row * 2 + 1]);
#pragma unroll
      for (int i = row * 2 + 4; i < kCount; i += 4) largest = fmaxf(largest, fmaxf(logits[i], logits[i + 1]));
      largest = across_row(largest, [](float a, float b) { return fmaxf(a, b); });
      const bool grown = (largest - top[row]) * scale_log2 > kSlack;  // true while top is -inf, unless largest is too
      const float before = top[row];
      if (grown) top[row] = largest;
      // -inf - -inf would be NaN: a row that has seen nothing but -inf subtracts 0.
      offset[row] = top[row] == -INFINITY ? 0 : top[row] * scale_log2;
      factor[row] = grown ? exp2_approx(fmaf(before, scale_log2, -offset[row])) : 1;
    }
    rescales = __any_sync(kWholeWarp, factor[0] != 1 || factor[1] != 1);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float sum = 0;
#pragma unroll
      for (int i = row * 2; i < kCount; i += 4) {
        logits[i] = exp2_approx(fmaf(logits[i], scale_log2, -offset[row]));
        logits[i + 1] = exp2_approx(fmaf(logits[i + 1], scale_log2, -offset[row]));
        sum += logits[i] + logits[i + 1];
      }
      total[row] = fmaf(total[row], factor[row], sum);
    }
  }

  template <int kCount>
  __device__ __forceinline__ void rescale(float (&out)[kCount]) const {
    if (!rescales) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] *= factor[i / 2 % 2];
  }

  // The factor that normalises a row's output, and its LSE. `any_keys`: whether the row had keys at all; one
  // that had, all of logit -inf, is NaN, as in dense attention.
  __device__ __forceinline__ void finish(int row, bool any_keys, float scale_log2, float* norm, float* lse) {
    const float sum = across_row(total[row], [](float a, float b) { return a + b; });
    *norm = sum == 0 ? (any_keys ? NAN : 0) : 1 / sum;
    *lse = sum == 0 ? (any_keys ? NAN : -INFINITY) : fmaf(top[row], scale_log2, log2f(sum));
  }
};

}  // namespace vsa::sm90
