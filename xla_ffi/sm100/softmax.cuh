// Online softmax in base 2 of rows of 128 logits, a row a thread.
#pragma once

#include <cmath>

#include "mma.cuh"
#include "ptx.cuh"

namespace vsa::sm100 {

constexpr int kParts = 4, kPartColumns = 32;  // of a row of logits in registers

// A row of a step: raw logits, then weights, as bits.
using RowBits = uint32_t[kParts][kPartColumns];

__device__ __forceinline__ float2 pair_of(const RowBits& row, int part, int i) {
  return {__int_as_float(static_cast<int>(row[part][i])), __int_as_float(static_cast<int>(row[part][i + 1]))};
}

// 2 ** x by arithmetic, since the unit that has ex2 makes 16 a cycle only: 2 ** f, f in [0, 1), is a polynomial with a relative
// error of 3e-6, so that the LSE is good to 1e-6 (one of degree 3, 9e-5, would do for the weights, which are rounded to 16
// bits); the integer goes into the exponent. Gives 0 below -127, and nonsense for NaN.
__device__ __forceinline__ float2 exp2_emulated(float2 x) {
  constexpr float kToInteger = 0x1.8p23f;  // x + this, rounded down: the integer below x, in the low bits
  x = {fmaxf(x.x, -127), fmaxf(x.y, -127)};
  const float2 whole = {add_down(x.x, kToInteger), add_down(x.y, kToInteger)};
  const float2 below = add2(whole, {-kToInteger, -kToInteger});
  const float2 fraction = fma2(below, {-1, -1}, x);
  float2 power = fma2(fraction, {0.013426684f, 0.013426684f}, {0.052242474f, 0.052242474f});
  power = fma2(power, fraction, {0.24128021f, 0.24128021f});
  power = fma2(power, fraction, {0.69304485f, 0.69304485f});
  power = fma2(power, fraction, {1, 1});
  const auto scaled = [](float power, float whole) {
    return __int_as_float(static_cast<int>(static_cast<uint32_t>(__float_as_int(power)) +
                                           (static_cast<uint32_t>(__float_as_int(whole)) << 23)));
  };
  return {scaled(power.x, whole.x), scaled(power.y, whole.y)};
}

// What a row has seen. Sums are of weights exp2(scale_log2 * (logit - offset)).
class RowStatistics {
 public:
  // Takes the logits of a step, of which `keys` columns count: the others become -inf. Returns what sums so far are to be
  // multiplied with, often 1: the offset stays where it is until a weight would pass 2 ** 8.
  __device__ __forceinline__ float see(RowBits& row, int keys, float scale_log2) {
    if (keys < kParts * kPartColumns) {
      constexpr uint32_t kMinusInfinity = 0xff800000;
#pragma unroll
      for (int i = 0; i < kParts * kPartColumns; ++i) {
        if (i >= keys) row[i / kPartColumns][i % kPartColumns] = kMinusInfinity;
      }
    }
    float largest[kParts];  // a NaN is the largest of all: then all weights are
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      largest[part] = part == 0 ? offset_ : -INFINITY;
#pragma unroll
      for (int i = 0; i < kPartColumns; ++i) {
        largest[part] = max_or_nan(largest[part], __int_as_float(static_cast<int>(row[part][i])));
      }
    }
    const float most = max_or_nan(max_or_nan(largest[0], largest[1]), max_or_nan(largest[2], largest[3]));
    constexpr float kSlack = 8;
    const float exponent = (offset_ - most) * scale_log2;  // NaN while nothing finite was seen, or if something is NaN
    factor_ = 1;
    if (!(exponent >= -kSlack) && most != -INFINITY) {
      factor_ = exp2_approx(exponent);
      offset_ = most;
    }
    subtracted_ = offset_ == -INFINITY ? 0 : offset_ * scale_log2;  // -inf - -inf would be NaN
    return factor_;
  }

  // Logits of a part become weights; rounded ones, two a word, go to `words`. A fifth of them without ex2.
  template <class T>
  __device__ __forceinline__ void weigh(RowBits& row, int part, float scale_log2, uint32_t (&words)[kPartColumns / 2]) const {
#pragma unroll
    for (int i = 0; i < kPartColumns; i += 2) {
      const float2 x = fma2(pair_of(row, part, i), {scale_log2, scale_log2}, {-subtracted_, -subtracted_});
      const bool emulated = i % 16 >= 12 && part < kParts - 1;
      const float2 weights = emulated ? exp2_emulated(x) : float2{exp2_approx(x.x), exp2_approx(x.y)};
      row[part][i] = static_cast<uint32_t>(__float_as_int(weights.x));
      row[part][i + 1] = static_cast<uint32_t>(__float_as_int(weights.y));
      words[i / 2] = pack<T>(weights.x, weights.y);
    }
  }

  // Adds the weights of a step.
  __device__ __forceinline__ void add(const RowBits& row) {
    float2 sum[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      sum[part] = pair_of(row, part, 0);
#pragma unroll
      for (int i = 2; i < kPartColumns; i += 2) sum[part] = add2(sum[part], pair_of(row, part, i));
    }
    const float2 all = add2(add2(sum[0], sum[1]), add2(sum[2], sum[3]));
    total_ = fmaf(total_, factor_, all.x + all.y);
  }

  // What normalises the row's output, and its LSE. One that had keys, all of logit -inf, is NaN, as in dense attention.
  __device__ __forceinline__ void finish(bool any_keys, float scale_log2, float* norm, float* lse) const {
    const float none = any_keys ? NAN : 0;
    *norm = total_ == 0 ? none : 1 / total_;
    *lse = total_ == 0 ? (any_keys ? NAN : -INFINITY) : fmaf(offset_, scale_log2, log2f(total_));
  }

 private:
  float offset_ = -INFINITY;  // raw
  float total_ = 0;
  float factor_ = 1, subtracted_ = 0;  // of the step at hand
};

}  // namespace vsa::sm100
