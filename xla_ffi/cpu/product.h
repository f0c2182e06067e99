// The one matrix product that both kernels are made of: streamed rows times a panel of stationary tokens.
#pragma once

#include "xla_ffi/cpu/simd.h"

namespace vsa::cpu::VSA_ISA {

// c[i] = (kAdd ? c[i] : 0) + sum over k of a[i * row_stride + k * depth_stride] * b[k], for kRows rows; b[k] and c[i]
// are rows of a panel.
template <bool kAdd, int kRows, typename A>
inline __attribute__((always_inline)) void MultiplyRows(int64_t depth, const A* a, int64_t row_stride,
                                                        int64_t depth_stride, const A* b, A* c) {
  constexpr int64_t kLanes = kPanelLanes<A>, kHalf = kVectorLanes<A>;
  Vector<A> sums[kRows][2];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    sums[i][0] = kAdd ? Load(c + i * kLanes) : Vector<A>{};
    sums[i][1] = kAdd ? Load(c + i * kLanes + kHalf) : Vector<A>{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    const Vector<A> left = Load(b + k * kLanes), right = Load(b + k * kLanes + kHalf);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Vector<A> factor = Broadcast(a[i * row_stride + k * depth_stride]);
      sums[i][0] += factor * left;
      sums[i][1] += factor * right;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    Store(c + i * kLanes, sums[i][0]);
    Store(c + i * kLanes + kHalf, sums[i][1]);
  }
}

// The same for any number of rows.
template <bool kAdd, typename A>
inline void Multiply(int64_t rows, int64_t depth, const A* a, int64_t row_stride, int64_t depth_stride, const A* b,
                     A* c) {
  constexpr int64_t kLanes = kPanelLanes<A>;
  int64_t i = 0;
  for (; i + kRegisterRows <= rows; i += kRegisterRows) {
    MultiplyRows<kAdd, kRegisterRows>(depth, a + i * row_stride, row_stride, depth_stride, b, c + i * kLanes);
  }
  if (kRegisterRows > 4 && i + 4 <= rows) {
    MultiplyRows<kAdd, 4>(depth, a + i * row_stride, row_stride, depth_stride, b, c + i * kLanes);
    i += 4;
  }
  if (i + 2 <= rows) {
    MultiplyRows<kAdd, 2>(depth, a + i * row_stride, row_stride, depth_stride, b, c + i * kLanes);
    i += 2;
  }
  if (i < rows) {
    MultiplyRows<kAdd, 1>(depth, a + i * row_stride, row_stride, depth_stride, b, c + i * kLanes);
  }
}

// x *= factor. A loop of its own, so that no product is fused into the difference it goes into: weights are powers of
// rounded logits less an LSE of rounded logits, and large ones fit no others.
template <typename A>
inline void Scale(int64_t count, A factor, A* x) {
  for (int64_t at = 0; at < count; at += kVectorLanes<A>) Store(x + at, Load(x + at) * factor);
}

}  // namespace vsa::cpu::VSA_ISA
