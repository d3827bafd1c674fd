// Reading and writing the number formats of the cache, portably.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace kvlathe {

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of_half(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000u) << 16, exponent = (half >> 10) & 31u,
                 fraction = half & 1023u;
  if (exponent == 31) return float_of_bits(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) return (sign ? -1.f : 1.f) * std::ldexp(float(fraction), -24);
  return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

// To the nearest, ties to even.
inline uint16_t half_of_float(float value) {
  const uint32_t bits = bits_of_float(value), sign = (bits >> 16) & 0x8000u,
                 magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
  if (magnitude < 0x38800000u)
    return uint16_t(sign | uint32_t(std::nearbyint(std::ldexp(float_of_bits(magnitude), 24))));
  const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
  return uint16_t(sign | rounded >> 13);
}

inline float float_of_bfloat(uint16_t value) { return float_of_bits(uint32_t(value) << 16); }

inline uint16_t bfloat_of_float(float value) {
  const uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40u);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace kvlathe
