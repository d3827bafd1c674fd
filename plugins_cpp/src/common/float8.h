// Floats of 8 bits: e4m3 of the OCP specification (largest 448, no infinities), as codes of the
// cache. kvlathe/plan/codec.py writes the same bytes.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/formats.h"

namespace kvlathe {
namespace {  // each file's own: those for other processors include it, too

constexpr float kFloat8Top = 448.f;
constexpr uint16_t kLargestHalf = 0x7bff;

// A code's sign, exponent and fraction are those of a half that is 2^8 times smaller, whether it is
// subnormal or not. The two codes that are not numbers become 480, so that all are finite.
constexpr float kFloat8Unit = 256.f;
KVLATHE_ANYWHERE constexpr uint16_t small_half_of(uint8_t code) {
  return uint16_t((code & 0x80) << 8 | (code & 0x7f) << 7);
}

// The nearest code, of two the even one; +-448 beyond them.
KVLATHE_ANYWHERE inline uint8_t float8_of(float x) {
  uint32_t bits, low;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = bits >> 24 & 0x80;
  float magnitude = x < 0 ? -x : x;
  magnitude = magnitude < kFloat8Top ? magnitude : kFloat8Top;
  // Three bits of the fraction stay. The exponent's bias was 127 and becomes 7.
  std::memcpy(&bits, &magnitude, sizeof bits);
  bits = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
  // Below the least normal number codes are 2^-9 apart, as floats from 2^14 on are. 8 is that number.
  const float rounded = magnitude + 0x1.8p14f;
  std::memcpy(&low, &rounded, sizeof low);
  return uint8_t(sign | (magnitude < 0x1p-6f ? low & 15 : bits));
}

// The least half that is `x` or more, of the half nearest to x and its float; not above the largest.
// 0 where x is not above 0.
KVLATHE_ANYWHERE constexpr uint16_t least_half(float x, uint16_t half, float value) {
  if (!(x > 0)) return 0;
  const uint16_t found = uint16_t(half + (value < x));
  return found < kLargestHalf ? found : kLargestHalf;
}

}  // namespace
}  // namespace kvlathe
