// bfloat16 and float16, rounded to nearest even.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace vsa::sim {

inline uint16_t ToBfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (std::isnan(x)) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float FromBfloat16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline float FromFloat16(uint16_t x) {
  const int exponent = x >> 10 & 31, mantissa = x & 1023;
  const float magnitude = exponent == 31 ? (mantissa ? NAN : INFINITY)
                          : exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                          : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  return x >> 15 ? -magnitude : magnitude;
}
inline uint16_t ToFloat16(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  x = std::fabs(x);
  if (std::isnan(x)) return 0x7fff;
  if (x >= 65520) return sign | 0x7c00;
  if (x == 0) return sign;
  int exponent;
  std::frexp(x, &exponent);  // x in [2**(exponent - 1), 2**exponent)
  const int unit = std::max(exponent - 11, -24);
  const auto steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(x, -unit)));  // of 2**unit; may carry over
  return static_cast<uint16_t>(sign | (unit == -24 ? steps : (static_cast<uint32_t>(unit + 24) << 10) + steps));
}

}  // namespace vsa::sim

struct __nv_bfloat16 { uint16_t bits; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
struct __half { uint16_t bits; };
struct __half2 { __half x, y; };
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {{vsa::sim::ToBfloat16(x)}, {vsa::sim::ToBfloat16(y)}};
}
inline __half2 __floats2half2_rn(float x, float y) { return {{vsa::sim::ToFloat16(x)}, {vsa::sim::ToFloat16(y)}}; }
