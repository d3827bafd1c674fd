// Integer products of codes with x on NEON, whose vectors have 128 bits. sections.h has the equations.
// Included by dots_neon.h and mix_neon.h only.
//
// A product takes 16 codes and the 15-bit form of x beside them, and leaves four sums of four. x
// comes as two vectors, `first` and `second`:
//
//   with the dot product (sdot)   bytes, high and low. Codes are signed there: those that fill a byte
//                                 come as code - 128, and the minimum makes up for it
//   without                       words, even and odd. Codes come apart into words
#pragma once

#include <arm_neon.h>

#include "cpu/sections.h"
#include "cpu/vector.h"

namespace kvlathe {
namespace {

#if defined(__ARM_FEATURE_DOTPROD)
struct Products {
  static constexpr bool words = false;
  int32x4_t high = vdupq_n_s32(0), low = vdupq_n_s32(0);

  void add(uint8x16_t codes, int8x16_t first, int8x16_t second) {
    high = vdotq_s32(high, vreinterpretq_s8_u8(codes), first);
    low = vdotq_s32(low, vreinterpretq_s8_u8(codes), second);
  }
  int32x4_t total() const { return vmlaq_n_s32(low, high, 128); }
};
#else
struct Products {
  static constexpr bool words = true;
  int32x4_t lower = vdupq_n_s32(0), upper = vdupq_n_s32(0);  // of the first 8 codes, and the others

  void add(uint8x16_t codes, int8x16_t first, int8x16_t second) {
    const uint16x8_t pairs = vreinterpretq_u16_u8(codes);
    add_words(vandq_u16(pairs, vdupq_n_u16(255)), first);
    add_words(vshrq_n_u16(pairs, 8), second);
  }
  void add_words(uint16x8_t codes, int8x16_t x) {
    const int16x8_t own = vreinterpretq_s16_u16(codes), factors = vreinterpretq_s16_s8(x);
    lower = vmlal_s16(lower, vget_low_s16(own), vget_low_s16(factors));
    upper = vmlal_high_s16(upper, own, factors);
  }
  int32x4_t total() const { return vpaddq_s32(lower, upper); }
};
#endif

// Codes that come as code - 128.
template <class W>
constexpr bool is_centred = !Products::words && (W::bits == 8 || W::fixed);

// Bytes of x, whose sums of four neighbours are wanted: 128 * high + low as words (even, odd).
inline void as_words(int8x16_t& high, int8x16_t& low) {
  const auto even = [](int8x16_t x) {
    return vshrq_n_s16(vshlq_n_s16(vreinterpretq_s16_s8(x), 8), 8);
  };
  const auto odd = [](int8x16_t x) { return vshrq_n_s16(vreinterpretq_s16_s8(x), 8); };
  const int16x8_t evens = vaddq_s16(vshlq_n_s16(even(high), 7), even(low));
  const int16x8_t odds = vaddq_s16(vshlq_n_s16(odd(high), 7), odd(low));
  high = vreinterpretq_s8_s16(evens), low = vreinterpretq_s8_s16(odds);
}

// The bits of each byte from `shift` on.
inline uint8x16_t bits_from(uint8x16_t x, int shift, int bits) {
  const uint8x16_t own = shift ? x >> uint8_t(shift) : x;
  return shift + bits == 8 ? own : own & uint8_t((1 << bits) - 1);
}

inline uint8x16_t two_halves(const uint8_t* lower, const uint8_t* upper) {
  return vcombine_u8(vld1_u8(lower), vld1_u8(upper));
}

// What codes are worth, as Products takes it. `table`: table_of.
template <class W>
inline uint8x16_t worth_of(uint8x16_t codes, uint8x16_t table) {
  if constexpr (W::fixed) return vqtbl1q_u8(table, codes);
  return is_centred<W> ? veorq_u8(codes, table) : codes;
}
template <class W>
inline uint8x16_t table_of(const Rows& rows) {
  const uint8x16_t half = vdupq_n_u8(is_centred<W> ? 128 : 0);
  if constexpr (!W::fixed) return half;
  return veorq_u8(vld1q_u8(level_table(rows)), half);
}

// Ones for the first `count` of four.
inline uint32x4_t first_of(int count) {
  const int32x4_t count_up = {0, 1, 2, 3};
  return vcltq_s32(count_up, vdupq_n_s32(count));
}

inline float32x4_t where(uint32x4_t real, float32x4_t x) {
  return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), real));
}

// The first `count` of four floats, zeros past them.
inline float32x4_t load_first(const float* p, int count) {
  if (count >= 4) return vld1q_f32(p);
  float32x4_t x = vdupq_n_f32(0);
  for (int i = 0; i < count; ++i) x[i] = p[i];
  return x;
}
inline void store_first(float* p, float32x4_t x, int count) {
  if (count >= 4) return vst1q_f32(p, x);
  for (int i = 0; i < count; ++i) p[i] = x[i];
}

inline float32x4_t floats_of(uint16x4_t halves) {
  return vcvt_f32_f16(vreinterpret_f16_u16(halves));
}

// (scale, minimum) of one group of rows first .. first + 3, for what worth_of gives.
template <class W>
inline void affine_of_four(const Rows& rows, int first, int group, float32x4_t& scale,
                           float32x4_t& minimum) {
  const int64_t apart = rows.meta_stride;
  const uint16_t* at = rows.meta + first * apart;
  if constexpr (W::fixed) {
    uint16x4_t halves;
    for (int i = 0; i < 4; ++i) halves[i] = at[i * apart + group];
    const float32x4_t magnitude = floats_of(halves);
    scale = vmulq_n_f32(magnitude, kTwo255ths), minimum = vnegq_f32(magnitude);
  } else {
    uint32x4_t pairs;
    for (int i = 0; i < 4; ++i) {
      uint32_t pair;
      std::memcpy(&pair, at + i * apart + 2 * group, sizeof pair);
      pairs[i] = pair;
    }
    scale = floats_of(vmovn_u32(pairs)), minimum = floats_of(vshrn_n_u32(pairs, 16));
  }
  if (is_centred<W>) minimum = vfmaq_n_f32(minimum, scale, 128.f);
}

// Numbers of 15 bits as 128 * high + low.
inline int16x8_t high_of(int16x8_t number) { return vrshrq_n_s16(number, 7); }
inline int16x8_t low_of(int16x8_t number) {
  return vsubq_s16(number, vshlq_n_s16(high_of(number), 7));
}

}  // namespace
}  // namespace kvlathe
