// Integer products of codes with x in vectors of 256 bits: AVX2, and AVX-VNNI where it is there.
// sections.h has the equations. Included by dots256.h and mix256.h only.
//
// A product takes 32 codes and the 15-bit form of x beside them, and leaves eight sums of four. x
// comes as two vectors, `first` and `second`, which each way of multiplying lays out for itself:
//
//   Fused    bytes, high and low      one instruction each (vpdpbusd of AVX-VNNI)
//   Narrow   bytes, high and low      codes up to 15: pairs of products are summed up in 16 bits
//   Wide     words, even and odd      codes up to 255: they come apart into words
#pragma once

#include <type_traits>

#include "cpu/sections.h"
#include "cpu/vector.h"

namespace kvlathe {
namespace {

// Bytes whose sums of four neighbours are wanted: 128 * high + low, as words (even, odd).
inline void as_words(__m256i& high, __m256i& low) {
  const auto even = [](__m256i x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); };
  const auto odd = [](__m256i x) { return _mm256_srai_epi16(x, 8); };
  const auto both = [](__m256i high, __m256i low) {
    return _mm256_add_epi16(_mm256_slli_epi16(high, 7), low);
  };
  const __m256i evens = both(even(high), even(low)), odds = both(odd(high), odd(low));
  high = evens, low = odds;
}

struct Narrow {
  static constexpr bool words = false;
  __m256i high = _mm256_setzero_si256(), low = _mm256_setzero_si256();

  void add(__m256i codes, __m256i first, __m256i second) {
    high = _mm256_add_epi16(high, _mm256_maddubs_epi16(codes, first));
    low = _mm256_add_epi16(low, _mm256_maddubs_epi16(codes, second));
  }
  __m256i total() const {
    return _mm256_add_epi32(_mm256_madd_epi16(high, _mm256_set1_epi16(128)),
                            _mm256_madd_epi16(low, _mm256_set1_epi16(1)));
  }
};

struct Wide {
  static constexpr bool words = true;
  __m256i sum = _mm256_setzero_si256();

  void add(__m256i codes, __m256i first, __m256i second) {
    const __m256i even = _mm256_and_si256(codes, _mm256_set1_epi16(255));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even, first));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_srli_epi16(codes, 8), second));
  }
  __m256i total() const { return sum; }
};

#if defined(__AVXVNNI__)
struct Fused {
  static constexpr bool words = false;
  __m256i high = _mm256_setzero_si256(), low = _mm256_setzero_si256();

  void add(__m256i codes, __m256i first, __m256i second) {
    high = _mm256_dpbusd_avx_epi32(high, codes, first);
    low = _mm256_dpbusd_avx_epi32(low, codes, second);
  }
  __m256i total() const { return _mm256_add_epi32(low, _mm256_slli_epi32(high, 7)); }
};
template <class W>
using Products = Fused;
#else
template <class W>
using Products = std::conditional_t<!W::packed || W::levels, Wide, Narrow>;
#endif

// 16 bytes, or 8, of each of two rows.
inline __m256i load_two(const uint8_t* at, int64_t apart) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)at)),
                                 _mm_loadu_si128((const __m128i*)(at + apart)), 1);
}
inline __m256i load_halves(const uint8_t* at, int64_t apart) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadl_epi64((const __m128i*)at)),
                                 _mm_loadl_epi64((const __m128i*)(at + apart)), 1);
}

inline __m256i low_bits(__m256i x, int bits) {
  return _mm256_and_si256(x, _mm256_set1_epi8(char((1 << bits) - 1)));
}

// What the levels of `rows` are worth, in each lane of 128 bits.
template <class W>
inline __m256i table_of(const Rows& rows) {
  if constexpr (!W::levels) return _mm256_setzero_si256();
  return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)level_table(rows)));
}
template <class W>
inline __m256i worth_of(__m256i codes, __m256i table) {
  return W::levels ? _mm256_shuffle_epi8(table, codes) : codes;
}

inline float highest(__m256 x) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
inline float added_up(__m256 x) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline __m256 absolute(__m256 x) {
  return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)));
}

// Ones for the first `count` of eight.
inline __m256i first_of(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// Eight dwords of halves, as the floats of their lower and of their upper halves.
inline void floats_of_pairs(__m256i pairs, __m256& lower, __m256& upper) {
  const __m256i low = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff)),
                packed = _mm256_packus_epi32(low, _mm256_srli_epi32(pairs, 16)),
                ordered = _mm256_permute4x64_epi64(packed, 0xd8);
  lower = _mm256_cvtph_ps(_mm256_castsi256_si128(ordered));
  upper = _mm256_cvtph_ps(_mm256_extracti128_si256(ordered, 1));
}

// Of eight rows with `apart` dwords each the first one.
inline __m256i dwords_of_rows(const int32_t* at, int apart) {
  if (apart == 1) return _mm256_loadu_si256((const __m256i*)at);
  const __m256i count_up = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_i32gather_epi32(at, _mm256_mullo_epi32(count_up, _mm256_set1_epi32(apart)), 4);
}

// The same for two dwords a row, of which `which` is wanted.
inline __m256i dwords_of_pairs(const int32_t* at, int which) {
  const __m256 a = _mm256_loadu_ps((const float*)at), b = _mm256_loadu_ps((const float*)at + 8);
  const __m256 found = which ? _mm256_shuffle_ps(a, b, 0xdd) : _mm256_shuffle_ps(a, b, 0x88);
  return _mm256_permute4x64_epi64(_mm256_castps_si256(found), 0xd8);
}

// (scale, minimum) of one group of rows first .. first + 7.
template <bool levels>
inline void affine_of_eight(const Rows& rows, int first, int group, __m256& scale,
                            __m256& minimum) {
  const int64_t apart = rows.meta_stride;
  const uint16_t* at = rows.meta + first * apart;
  if constexpr (!levels) {
    const auto* pairs = reinterpret_cast<const int32_t*>(at);
    const __m256i found =
        apart == 4 ? dwords_of_pairs(pairs, group) : dwords_of_rows(pairs + group, int(apart / 2));
    return floats_of_pairs(found, scale, minimum);
  }
  __m256 magnitude, other;
  if (apart == 1) {
    magnitude = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at));
  } else if (apart == 2) {
    floats_of_pairs(_mm256_loadu_si256((const __m256i*)at), magnitude, other);
    if (group) magnitude = other;
  } else {  // from the upper halves of dwords: so nothing behind the last one is read
    const __m256i places = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                              _mm256_set1_epi32(int32_t(apart)));
    floats_of_pairs(_mm256_i32gather_epi32((const int32_t*)(at + group - 1), places, 2), other,
                    magnitude);
  }
  scale = _mm256_mul_ps(magnitude, _mm256_set1_ps(kTwo255ths));
  minimum = _mm256_sub_ps(_mm256_setzero_ps(), magnitude);
}

}  // namespace
}  // namespace kvlathe
