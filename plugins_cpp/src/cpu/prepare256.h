// x of a product with rows of codes as integers, in the order in which codes come apart (Prepared of
// sections.h). Included by dots256.h only.
#pragma once

#include "cpu/products256.h"

namespace kvlathe {
namespace {

// x from `from` on as integers: 32 elements, those outside of begin .. end - 1 zeros. Returns the
// numbers, summed up by lanes.
inline __m256i integers(const float* x, int from, int begin, int end, __m256 per_unit,
                        __m256i& high, __m256i& low) {
  const auto highs = [](__m256i n) {
    return _mm256_srai_epi16(_mm256_add_epi16(n, _mm256_set1_epi16(64)), 7);
  };
  const auto lows = [](__m256i n, __m256i high) {
    return _mm256_sub_epi16(n, _mm256_slli_epi16(high, 7));
  };
  __m256i number[4], total = _mm256_setzero_si256();
  for (int j = 0; j < 4; ++j) {
    const int i = from + 8 * j;
    const bool inside = i >= begin && i < end;
    number[j] = inside ? _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), per_unit))
                       : _mm256_setzero_si256();
    total = _mm256_add_epi32(total, number[j]);
  }
  const __m256i ab = _mm256_packs_epi32(number[0], number[1]),
                cd = _mm256_packs_epi32(number[2], number[3]);
  const __m256i high_ab = highs(ab), high_cd = highs(cd);
  const __m256i across = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const auto ordered = [&](__m256i a, __m256i b) {
    return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), across);
  };
  high = ordered(high_ab, high_cd);
  low = ordered(lows(ab, high_ab), lows(cd, high_cd));
  return total;
}

// 64 bytes in the order of planes of pieces.
template <int bits>
inline void in_planes(__m256i* x) {
  if constexpr (is_nibble(bits)) {
    const __m256i apart = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0,
                                           2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    for (int i = 0; i < 2; ++i)
      x[i] = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(x[i], apart), 0xd8);
  } else if constexpr (is_crumb(bits)) {
    const __m256i apart = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0,
                                           4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m256i across = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int i = 0; i < 2; ++i)
      x[i] = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(x[i], apart), across);
    const __m256i even = _mm256_unpacklo_epi64(x[0], x[1]), odd = _mm256_unpackhi_epi64(x[0], x[1]);
    x[0] = _mm256_permute2x128_si256(even, odd, 0x20);
    x[1] = _mm256_permute2x128_si256(even, odd, 0x31);
  } else if constexpr (in_blocks(bits)) {
    // elements 8 t + c: columns 0 and 2, 1 and 3, 4 and 5, 6 and 7 form a plane
    constexpr int column[8] = {0, 2, 1, 3, 4, 5, 6, 7};
    alignas(32) uint8_t from[64], to[64];
    _mm256_store_si256((__m256i*)from, x[0]), _mm256_store_si256((__m256i*)from + 1, x[1]);
    for (int i = 0; i < 64; ++i) to[i] = from[i % 8 * 8 + column[i / 8]];
    x[0] = _mm256_load_si256((const __m256i*)to), x[1] = _mm256_load_si256((const __m256i*)to + 1);
  }
}

template <class W>
void prepare(const float* x, const Rows& rows, const Section* sections, int count, Prepared& out) {
  __m256 most = _mm256_setzero_ps();
  for (int i = 0; i < rows.inner; i += 8)
    most = _mm256_max_ps(most, absolute(_mm256_loadu_ps(x + i)));
  const float top = highest(most);
  out.unit = top / 16256.f;
  const __m256 per_unit = _mm256_set1_ps(top > 0 ? 16256.f / top : 0.f);
  for (int k = 0; k < count; ++k) {
    const Section& section = sections[k];
    __m256i total = _mm256_setzero_si256(), high[2], low[2];
    int at = section.first * (W::blocks ? kBlockCodes : 128 / W::bits);
    int from = section.start;
    if (W::blocks) from -= (rows.first + from) % kBlockCodes;  // its block's begin
    for (; from < section.end; from += 64, at += 64) {
      for (int i = 0; i < 2; ++i) {
        const __m256i own =
            integers(x, from + 32 * i, section.start, section.end, per_unit, high[i], low[i]);
        total = _mm256_add_epi32(total, own);
      }
      in_planes<W::bits>(high), in_planes<W::bits>(low);
      for (int i = 0; i < 2; ++i) {
        if (Products<W>::words) as_words(high[i], low[i]);
        _mm256_storeu_si256((__m256i*)(out.high + at + 32 * i), high[i]);
        _mm256_storeu_si256((__m256i*)(out.low + at + 32 * i), low[i]);
      }
    }
    out.sums[k] = out.unit * added_up(_mm256_cvtepi32_ps(total));
  }
}

}  // namespace
}  // namespace kvlathe
