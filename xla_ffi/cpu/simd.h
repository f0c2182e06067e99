// Vectors, the exponential, and the four element types.
//
// Compiled once for each instruction set, under its own namespace: nothing here may be shared between them, and
// the standard library stays out of it (an inline function of it, compiled for AVX-512, could be the one copy
// that the linker keeps for everybody).
#pragma once

#include <cstdint>
#include <cstring>

#ifndef VSA_ISA
#define VSA_ISA baseline
#endif

namespace vsa::cpu::VSA_ISA {

#if defined(__AVX512F__)
constexpr int64_t kVectorBytes = 64;
constexpr int kRegisterRows = 8;  // rows of a register block, two vectors wide: 16 sums
#elif defined(__AVX__)
constexpr int64_t kVectorBytes = 32;
constexpr int kRegisterRows = 4;  // 8 sums of 16 registers
#else
constexpr int64_t kVectorBytes = 16;
constexpr int kRegisterRows = 4;
#endif

template <typename A>
struct VectorOf {
  typedef A type __attribute__((vector_size(kVectorBytes), may_alias));
};
template <typename A>
using Vector = typename VectorOf<A>::type;

// A panel is two vectors of stationary tokens; all arrays of the kernels are [panel][row][lane].
template <typename A>
constexpr int64_t kVectorLanes = kVectorBytes / sizeof(A);
template <typename A>
constexpr int64_t kPanelLanes = 2 * kVectorLanes<A>;

template <typename A>
inline Vector<A> Load(const A* from) {
  return *reinterpret_cast<const Vector<A>*>(from);
}
template <typename A>
inline void Store(A* to, Vector<A> x) {
  *reinterpret_cast<Vector<A>*>(to) = x;
}
template <typename A>
inline Vector<A> Broadcast(A x) {
  return x - Vector<A>{};
}
template <typename A>
inline Vector<A> Max(Vector<A> a, Vector<A> b) {
  return a > b ? a : b;
}

constexpr double kLog2E = 1.4426950408889634;

inline float Log2(float x) { return __builtin_log2f(x); }
inline double Log2(double x) { return __builtin_log2(x); }

template <typename A>
constexpr A kInfinity = static_cast<A>(__builtin_inf());

// 2^x of float and double to about one unit in the last place; exact at 0; -inf gives 0, NaN stays.
// x = n + f with n an integer, which adding the shift leaves in the low bits of the sum; 2^f is a polynomial.
template <typename A>
struct Exponential;

template <>
struct Exponential<float> {
  using Bits = uint32_t;
  static constexpr float kShift = 12582912.0f;  // 1.5 * 2^23
  static constexpr float kLowest = -126, kHighest = 128;
  static constexpr int kMantissa = 23;
  // Relative error 2e-9, fitted to [-1/2, 1/2].
  static constexpr float kCoefficients[] = {1.5353358e-4f, 1.33988757e-3f, 9.61843738e-3f, 5.55033247e-2f,
                                            2.40226479e-1f, 6.93147203e-1f, 1.0f};
};

template <>
struct Exponential<double> {
  using Bits = uint64_t;
  static constexpr double kShift = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLowest = -1022, kHighest = 1024;
  static constexpr int kMantissa = 52;
  // ln(2)^k / k!, k = 13 down to 0: the first term left out is 5e-18.
  static constexpr double kCoefficients[] = {
      1.3691488853904128e-12, 2.5678435993488206e-11, 4.4455382718708116e-10, 7.0549116208011234e-09,
      1.0178086009239699e-07, 1.3215486790144309e-06, 1.5252733804059841e-05, 1.5403530393381608e-04,
      1.3333558146428441e-03, 9.6181291076284769e-03, 5.5504108664821576e-02, 2.4022650695910070e-01,
      6.9314718055994529e-01, 1.0};
};

template <typename A>
inline Vector<A> Exp2(Vector<A> x) {
  using E = Exponential<A>;
  using Integers = Vector<typename E::Bits>;
  const Vector<A> lowest = Broadcast<A>(E::kLowest), highest = Broadcast<A>(E::kHighest);
  Vector<A> within = x < lowest ? lowest : x;
  within = within > highest ? highest : within;
  const Vector<A> shifted = within + E::kShift;
  const Vector<A> fraction = within - (shifted - E::kShift);
  Vector<A> power = Broadcast<A>(E::kCoefficients[0]);
#pragma GCC unroll 16
  for (int k = 1; k < static_cast<int>(sizeof(E::kCoefficients) / sizeof(A)); ++k) {
    power = power * fraction + E::kCoefficients[k];
  }
  const Integers exponent = reinterpret_cast<Integers>(shifted) << E::kMantissa;
  power = reinterpret_cast<Vector<A>>(reinterpret_cast<Integers>(power) + exponent);
  power = x < lowest ? Vector<A>{} : power;
  return x == x ? power : x;
}

// Storage: what an array holds.  Sums are float, double for double.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <typename T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <typename T>
using Accumulator = typename AccumulatorOf<T>::type;

inline float FloatOf(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float Widen(float x) { return x; }
inline double Widen(double x) { return x; }
inline float Widen(BFloat16 x) { return FloatOf(uint32_t{x.bits} << 16); }
// No step of it makes a denormal float, which tasks flush to zero (parallel.h).
inline float Widen(Half x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16, rest = x.bits & 0x7fffu;
  const uint32_t normal = (rest << 13) + (112u << 23);
  const uint32_t special = (rest << 13) + (224u << 23);
  const uint32_t denormal = BitsOf(FloatOf((rest << 13) + (113u << 23)) - FloatOf(113u << 23));
  const uint32_t magnitude = rest < 0x400u ? denormal : rest < 0x7c00u ? normal : special;
  return FloatOf(sign | magnitude);
}

inline void Narrow(float x, float* to) { *to = x; }
inline void Narrow(double x, double* to) { *to = x; }
// To nearest, ties to even.
inline void Narrow(float x, BFloat16* to) {
  const uint32_t bits = BitsOf(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  to->bits = static_cast<uint16_t>(x == x ? rounded : (bits >> 16) | 0x40);
}
inline void Narrow(float x, Half* to) {
  const uint32_t bits = BitsOf(x), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
  const uint32_t normal = (rest - (112u << 23) + 0xfffu + ((rest >> 13) & 1)) >> 13;
  const uint32_t denormal = BitsOf(FloatOf(rest) + 0.5f) - BitsOf(0.5f);  // the addition rounds
  const uint32_t huge = rest > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t magnitude = rest < 0x38800000u ? denormal : rest < 0x47800000u ? normal : huge;
  to->bits = static_cast<uint16_t>(sign | magnitude);
}

}  // namespace vsa::cpu::VSA_ISA
