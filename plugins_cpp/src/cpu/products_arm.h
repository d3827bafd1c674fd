// Integer products of codes with x on Arm. sections.h has the equations. Vectors consist of segments
// of 128 bits: one with NEON (vector_neon.h), several with SVE (vector_sve.h). Included by dots_arm.h
// and mix_arm.h only.
//
// A product takes 16 codes and the 15-bit form of x beside them in each segment, and leaves four sums
// of four. x comes as two vectors, `first` and `second`:
//
//   with the dot product (sdot)   bytes, high and low. Codes are signed there: those that fill a byte
//                                 come as code - 128, and the minimum makes up for it
//   without                       words, even and odd. Codes come apart into words
#pragma once

#include "cpu/sections.h"
#include "cpu/vector.h"

#if defined(KVLATHE_SVE)
#include "cpu/vector_sve.h"
#else
#include "cpu/vector_neon.h"
#endif

namespace kvlathe {
namespace {

// Numbers of 15 bits as 128 * high + low.
inline int16x8_t high_of(int16x8_t number) { return vrshrq_n_s16(number, 7); }
inline int16x8_t low_of(int16x8_t number) {
  return vsubq_s16(number, vshlq_n_s16(high_of(number), 7));
}

#if defined(KVLATHE_SVE)
inline Ints dot(Ints sum, Bytes codes, SignedBytes x) {
  return svdot_s32(sum, svreinterpret_s8_u8(codes), x);
}
#elif defined(__ARM_FEATURE_DOTPROD)
inline Ints dot(Ints sum, Bytes codes, SignedBytes x) {
  return vdotq_s32(sum, vreinterpretq_s8_u8(codes), x);
}
#endif

#if defined(KVLATHE_SVE) || defined(__ARM_FEATURE_DOTPROD)
struct Products {
  static constexpr bool words = false;
  Ints high{}, low{};

  void add(Bytes codes, SignedBytes first, SignedBytes second) {
    high = dot(high, codes, first), low = dot(low, codes, second);
  }
  Ints total() const { return low + high * 128; }

  // Numbers of rows, for four of which a segment holds codes side by side.
  static void repeat(Ints number, SignedBytes& first, SignedBytes& second) {
    const Ints high = (number + 64) >> 7;
    first = repeat_bytes(high), second = repeat_bytes(number - (high << 7));
  }
};
#else
struct Products {
  static constexpr bool words = true;
  Ints lower{}, upper{};  // of the first 8 codes, and the others

  void add(Bytes codes, SignedBytes first, SignedBytes second) {
    const uint16x8_t pairs = vreinterpretq_u16_u8(codes);
    add_words(vandq_u16(pairs, vdupq_n_u16(255)), first);
    add_words(vshrq_n_u16(pairs, 8), second);
  }
  void add_words(uint16x8_t codes, SignedBytes x) {
    const int16x8_t own = vreinterpretq_s16_u16(codes), factors = vreinterpretq_s16_s8(x);
    lower = vmlal_s16(lower, vget_low_s16(own), vget_low_s16(factors));
    upper = vmlal_high_s16(upper, own, factors);
  }
  Ints total() const { return vpaddq_s32(lower, upper); }

  static void repeat(Ints number, SignedBytes& first, SignedBytes& second) {
    const int16x4_t four = vmovn_s32(number);
    const int16x8_t own = vcombine_s16(four, four);
    first = vreinterpretq_s8_s16(vuzp1q_s16(own, own));
    second = vreinterpretq_s8_s16(vuzp2q_s16(own, own));
  }
};
#endif

// Codes that come as code - 128.
template <class W>
constexpr bool is_centred = !Products::words && (!W::packed || W::levels);

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
inline Bytes bits_from(Bytes x, int shift, int bits) {
  const Bytes own = shift ? x >> uint8_t(shift) : x;
  return shift + is_byte(bits) ? own : own & uint8_t((1 << bits) - 1);
}

// What codes are worth, as Products takes it. `table`: table_of.
template <class W>
inline Bytes worth_of(Bytes codes, Bytes table) {
  if constexpr (W::levels) return look_up(table, codes);
  return is_centred<W> ? codes ^ table : codes;
}
template <class W>
inline Bytes table_of(const Rows& rows) {
  const Bytes half = halves_of(is_centred<W> ? 128 : 0, is_centred<W> ? 128 : 0);
  if constexpr (!W::levels) return half;
  return repeated(level_table(rows)) ^ half;
}

// (scale, minimum) of one group of kLanes rows from `first` on, for what worth_of gives.
template <class W>
inline void affine_of_rows(const Rows& rows, int first, int group, Floats& scale, Floats& minimum) {
  const uint16_t* at = rows.meta + first * rows.meta_stride;
  if constexpr (W::levels) {
    const Floats magnitude = load_magnitudes(at + group, rows.meta_stride);
    scale = magnitude * kTwo255ths, minimum = -magnitude;
  } else {
    load_pairs(at + 2 * group, rows.meta_stride, scale, minimum);
  }
  if (is_centred<W>) minimum += scale * 128.f;
}

}  // namespace
}  // namespace kvlathe
