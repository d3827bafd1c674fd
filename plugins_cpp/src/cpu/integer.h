// Products with codes on the integer dot product of AVX-512 VNNI (unsigned bytes times signed
// bytes), without dequantizing.
//
// x becomes a 15-bit integer, 128 * high + low with both in a signed byte: x ~ unit * (128 high +
// low). Per group of a row
//     sum x (scale code + minimum) = scale unit (128 sum high code + sum low code) + minimum sum x,
// so its error is that of x alone, at most max |x| / 32512 an element. Included by read_codes.h
// only.
//
// Codes are taken in pieces of 16 bytes. A vector holds the same piece of four rows, so that what
// is left to add up at the end of a group are four numbers a row and not sixteen. A byte of 4 or 2
// bit codes is not unpacked: its first codes are a mask away, the next ones a shift and a mask, and
// x lies in that order.
#pragma once

#include "cpu/rows_ahead.h"
#include "cpu/vector.h"

namespace kvlathe {
namespace {

constexpr int kSections = 64;  // of a row, at most: ranks are at most 1024, groups multiples of 16
constexpr int kMostTogether = 512;  // elements whose products of 8 and 15 bits 32 bits hold

// What is added up as integers: one group, or a part of a very long one.
struct Section {
  int start, end;  // elements
  int group;
  int first, pieces;  // of x, counted over all sections
};

// One row of x: for each piece its elements in the order of planes (those that are first in a byte,
// those that are second ...), zeros past the section. Sized by kDotScratch.
struct Prepared {
  alignas(64) int8_t high[64 * kSections + 64], low[64 * kSections + 64];
  float sums[kSections];  // of x in each section
  float unit;
};
static_assert(sizeof(Prepared) <= kDotScratch * sizeof(float), "kDotScratch is too small");

int sections_of(const Rows& rows, Section* out) {
  int count = 0, pieces = 0;
  for (int chunk = 0, end; chunk < rows.inner / 16; chunk = end) {
    end = group_end(rows, chunk);
    for (int start = 16 * chunk; start < 16 * end; start += kMostTogether) {
      const int stop = 16 * end < start + kMostTogether ? 16 * end : start + kMostTogether,
                size = ((stop - start) * rows.bits + 127) / 128;
      out[count++] = {start, stop, rows.group_of[chunk], pieces, size};
      pieces += size;
    }
  }
  return count;
}

// Bytes of 64 elements, packed from four vectors of numbers and so by dwords in the order (128
// bits, vector), as planes of pieces.
template <int bits>
inline __m512i as_planes(__m512i packed) {
  const __m512i across = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i ordered = _mm512_permutexvar_epi32(across, packed);
  if constexpr (bits == 8) return ordered;
  if constexpr (bits == 4) {
    const __m512i apart =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    return _mm512_permutex_epi64(_mm512_shuffle_epi8(ordered, apart), 0xd8);
  }
  const __m512i apart =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  return _mm512_permutexvar_epi32(across, _mm512_shuffle_epi8(ordered, apart));
}

template <int bits>
void split(const float* x, int inner, const Section* sections, int count, Prepared& out) {
  __m512 most = _mm512_setzero_ps();
  for (int i = 0; i < inner; i += 16)
    most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_loadu_ps(x + i)));
  const float top = _mm512_reduce_max_ps(most);
  out.unit = top / 16256.f;
  const __m512 per_unit = _mm512_set1_ps(top > 0 ? 16256.f / top : 0.f);
  const auto highs = [](__m512i n) {
    return _mm512_srai_epi16(_mm512_add_epi16(n, _mm512_set1_epi16(64)), 7);
  };
  const auto lows = [](__m512i n, __m512i high) {
    return _mm512_sub_epi16(n, _mm512_slli_epi16(high, 7));
  };
  for (int k = 0; k < count; ++k) {
    const Section& section = sections[k];
    __m512i total = _mm512_setzero_si512();
    int at = section.first * (128 / bits);
    for (int i = section.start; i < section.end; i += 64, at += 64) {
      __m512i number[4];
      for (int j = 0; j < 4; ++j) {
        const bool inside = i + 16 * j < section.end;
        number[j] =
            inside ? _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i + 16 * j), per_unit))
                   : _mm512_setzero_si512();
        total = _mm512_add_epi32(total, number[j]);
      }
      const __m512i ab = _mm512_packs_epi32(number[0], number[1]),
                    cd = _mm512_packs_epi32(number[2], number[3]);
      const __m512i high_ab = highs(ab), high_cd = highs(cd);
      _mm512_storeu_si512(out.high + at, as_planes<bits>(_mm512_packs_epi16(high_ab, high_cd)));
      _mm512_storeu_si512(
          out.low + at, as_planes<bits>(_mm512_packs_epi16(lows(ab, high_ab), lows(cd, high_cd))));
    }
    out.sums[k] = out.unit * float(_mm512_reduce_add_epi32(total));
  }
}

// 16 bytes of each of four rows.
inline __m512i load_quad(const uint8_t* at, int64_t stride) {
  const auto row = [&](int i) { return _mm_loadu_si128((const __m128i*)(at + i * stride)); };
  const __m256i a = _mm256_inserti128_si256(_mm256_castsi128_si256(row(0)), row(1), 1);
  const __m256i b = _mm256_inserti128_si256(_mm256_castsi128_si256(row(2)), row(3), 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}

// sum += products. In assembly: as an intrinsic, GCC 12 copies the sum back and forth.
inline void add_products(__m512i& sum, __m512i codes, __m512i x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x));
}

// Sums of four of a, b, c, d in each 128 bits.
inline __m512i join(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

// Products of 16 rows, from `at`, with a section of M rows of x.
template <int bits, int M>
inline void sixteen(const uint8_t* at, int64_t stride, const Section& section,
                    const Prepared* const* x, __m512i* out) {
  constexpr int planes = 8 / bits;
  __m512i high[M][4], low[M][4];
  for (int m = 0; m < M; ++m) {
    for (int i = 0; i < 4; ++i) high[m][i] = low[m][i] = _mm512_setzero_si512();
  }
  const uint8_t* codes = at + section.start * bits / 8;
  for (int p = section.first; p < section.first + section.pieces; ++p, codes += 16) {
    __m512i packed[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) packed[i] = load_quad(codes + i * stride, 4 * stride);
#pragma GCC unroll 4
    for (int plane = 0; plane < planes; ++plane) {
      __m512i upper[M], lower[M];
      for (int m = 0; m < M; ++m) {
        upper[m] =
            _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)x[m]->high + planes * p + plane));
        lower[m] =
            _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)x[m]->low + planes * p + plane));
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        __m512i code = packed[i];
        if (bits < 8)
          code = _mm512_and_si512(plane ? _mm512_srli_epi16(code, bits * plane) : code,
                                  _mm512_set1_epi8((1 << bits) - 1));
        for (int m = 0; m < M; ++m) {
          add_products(high[m][i], code, upper[m]);
          add_products(low[m][i], code, lower[m]);
        }
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int i = 0; i < 4; ++i)
      low[m][i] = _mm512_add_epi32(low[m][i], _mm512_slli_epi32(high[m][i], 7));
    out[m] = join(low[m][0], low[m][1], low[m][2], low[m][3]);
  }
}

// (scale, minimum) of one group of 16 rows.
inline void load_pairs(const Rows& rows, int first, int group, __m512& scale, __m512& minimum) {
  const int32_t* at =
      reinterpret_cast<const int32_t*>(rows.meta + first * rows.meta_stride) + group;
  const int32_t groups = int32_t(rows.meta_stride / 2);
  const __m512i count_up = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i pairs;
  if (groups == 1) {
    pairs = _mm512_loadu_si512(at);
  } else if (groups == 2) {
    const __m512i places =
        _mm512_add_epi32(_mm512_add_epi32(count_up, count_up), _mm512_set1_epi32(group));
    pairs = _mm512_permutex2var_epi32(_mm512_loadu_si512(at - group), places,
                                      _mm512_loadu_si512(at - group + 16));
  } else {
    pairs = _mm512_i32gather_epi32(_mm512_mullo_epi32(count_up, _mm512_set1_epi32(groups)), at, 4);
  }
  scale = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs));
  minimum = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)));
}

template <int bits, int M>
void dots_of_codes(const Rows& rows, const Section* sections, int count, const Prepared* const* x,
                   float* out, int64_t ldo, bool add) {
  // Rows come in sixteens: pages hold multiples of 16 tokens and ranks are such, so those past the
  // last are readable. So are 16 bytes where a piece has fewer: metadata follows the codes.
  for (int r = 0; r < rows.rows; r += 16) {
    const uint8_t* at = rows.data + r * rows.stride;
    const __mmask16 real =
        rows.rows - r < 16 ? __mmask16((1 << (rows.rows - r)) - 1) : __mmask16(0xffff);
    fetch_ahead(rows, r, 16);
    __m512 total[M];
    for (int m = 0; m < M; ++m)
      total[m] = add ? _mm512_maskz_loadu_ps(real, out + m * ldo + r) : _mm512_setzero_ps();
    for (int k = 0; k < count; ++k) {
      __m512i dots[M];
      __m512 scale, minimum;
      sixteen<bits, M>(at, rows.stride, sections[k], x, dots);
      load_pairs(rows, r, sections[k].group, scale, minimum);
      for (int m = 0; m < M; ++m) {
        total[m] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(x[m]->sums[k]), total[m]);
        total[m] = _mm512_fmadd_ps(_mm512_mul_ps(scale, _mm512_set1_ps(x[m]->unit)),
                                   _mm512_cvtepi32_ps(dots[m]), total[m]);
      }
    }
    for (int m = 0; m < M; ++m) _mm512_mask_storeu_ps(out + m * ldo + r, real, total[m]);
  }
}

template <int bits>
void dots_of(const float* x, int64_t ldx, const Rows& rows, float* out, int64_t ldo, int m,
             bool add, bool again, float* scratch) {
  Section sections[kSections];
  const int count = sections_of(rows, sections);
  const Prepared* pair[2];
  for (int i = 0; i < m; ++i) {
    auto* form = reinterpret_cast<Prepared*>(scratch + i * kDotScratch);
    if (!again) split<bits>(x + i * ldx, rows.inner, sections, count, *form);
    pair[i % 2] = form;
    if (i % 2) {
      dots_of_codes<bits, 2>(rows, sections, count, pair, out + (i - 1) * ldo, ldo, add);
    } else if (i == m - 1) {
      dots_of_codes<bits, 1>(rows, sections, count, pair, out + i * ldo, ldo, add);
    }
  }
}

void integer_dots(const float* x, int64_t ldx, const Rows& rows, float* out, int64_t ldo, int m,
                  bool add, bool again, float* scratch) {
  if (rows.bits == 8) dots_of<8>(x, ldx, rows, out, ldo, m, add, again, scratch);
  if (rows.bits == 4) dots_of<4>(x, ldx, rows, out, ldo, m, add, again, scratch);
  if (rows.bits == 2) dots_of<2>(x, ldx, rows, out, ldo, m, add, again, scratch);
}

}  // namespace
}  // namespace kvlathe
