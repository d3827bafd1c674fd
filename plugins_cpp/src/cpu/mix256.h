// Sums of rows of codes, each row times an x of its own, on 256 bits.
//
// Rows are what is added up, and each has its own scale: it goes into x. For each group of columns
//     sum over rows of x (scale code + minimum) = unit sum (128 high + low) code + sum x minimum,
// where x scale ~ unit * (128 high + low). Bytes of four rows are brought side by side; lanes of
// 128 bits hold rows 0-3 and 4-7. Included by read_codes.h only.
#pragma once

#include "cpu/products256.h"

namespace kvlathe {
namespace {

constexpr int kPieceRows = 8;
constexpr int kMostRows = 64;  // rows that Narrow can sum up

// x times the scales of one group of columns: for 8 rows one vector in which a lane repeats its four
// rows.
struct Scaled {
  __m256i first[kMostRows / 8], second[kMostRows / 8];
  float unit, lowest;  // lowest: sum of x times minimum
};
static_assert(sizeof(Scaled) <= kDotScratch * sizeof(float), "kDotScratch is too small");

// Eight integers, one for each row.
template <bool words>
inline void repeat_rows(__m256i number, __m256i& first, __m256i& second) {
  if constexpr (words) {
    const __m256i even = _mm256_set1_epi32(0x05040100), odd = _mm256_set1_epi32(0x07060302);
    const __m256i packed = _mm256_packs_epi32(number, number);
    first = _mm256_shuffle_epi8(packed, even), second = _mm256_shuffle_epi8(packed, odd);
    return;
  }
  const __m256i high = _mm256_srai_epi32(_mm256_add_epi32(number, _mm256_set1_epi32(64)), 7);
  const __m256i low = _mm256_sub_epi32(number, _mm256_slli_epi32(high, 7));
  const __m256i both = _mm256_packs_epi32(high, low), bytes = _mm256_packs_epi16(both, both);
  first = _mm256_shuffle_epi32(bytes, 0x00), second = _mm256_shuffle_epi32(bytes, 0x55);
}

// The integer form of M rows of x times their scales: metadata is read once for all of them.
template <class W, int M>
void scale_rows(const float* x, int64_t ldx, const Rows& rows, int group, Scaled* const* out) {
  __m256 product[M][kMostRows / 8], lowest[M], most[M];
  for (int m = 0; m < M; ++m) lowest[m] = most[m] = _mm256_setzero_ps();
  for (int r = 0; r < rows.rows; r += 8) {
    const __m256i real = first_of(rows.rows - r);
    __m256 scale, minimum;
    affine_of_eight<W::levels>(rows, r, group, scale, minimum);
    // past the last row they may be anything
    scale = _mm256_and_ps(scale, _mm256_castsi256_ps(real));
    minimum = _mm256_and_ps(minimum, _mm256_castsi256_ps(real));
    for (int m = 0; m < M; ++m) {
      const __m256 values = _mm256_maskload_ps(x + m * ldx + r, real);
      product[m][r / 8] = _mm256_mul_ps(values, scale);
      lowest[m] = _mm256_fmadd_ps(values, minimum, lowest[m]);
      most[m] = _mm256_max_ps(most[m], absolute(product[m][r / 8]));
    }
  }
  for (int m = 0; m < M; ++m) {
    const float top = highest(most[m]);
    out[m]->unit = top / 16256.f;
    out[m]->lowest = added_up(lowest[m]);
    const __m256 per_unit = _mm256_set1_ps(top > 0 ? 16256.f / top : 0.f);
    for (int i = 0; i < (rows.rows + 7) / 8; ++i) {
      const __m256i number = _mm256_cvtps_epi32(_mm256_mul_ps(product[m][i], per_unit));
      repeat_rows<Products<W>::words>(number, out[m]->first[i], out[m]->second[i]);
    }
  }
}

// 16 bytes of 8 rows as four vectors: in each, four columns of bytes with four rows side by side.
inline void bring_together(const uint8_t* at, int64_t stride, __m256i* out) {
  const auto two = [&](int i) { return load_two(at + i * stride, 4 * stride); };
  const __m256i a = two(0), b = two(1), c = two(2), d = two(3);
  const __m256i ab = _mm256_unpacklo_epi8(a, b), cd = _mm256_unpacklo_epi8(c, d);
  const __m256i ab2 = _mm256_unpackhi_epi8(a, b), cd2 = _mm256_unpackhi_epi8(c, d);
  out[0] = _mm256_unpacklo_epi16(ab, cd), out[1] = _mm256_unpackhi_epi16(ab, cd);
  out[2] = _mm256_unpacklo_epi16(ab2, cd2), out[3] = _mm256_unpackhi_epi16(ab2, cd2);
}

// The first 8 of those bytes as two vectors.
inline void bring_half(const uint8_t* at, int64_t stride, __m256i* out) {
  const auto two = [&](int i) { return load_halves(at + i * stride, 4 * stride); };
  const __m256i ab = _mm256_unpacklo_epi8(two(0), two(1)),
                cd = _mm256_unpacklo_epi8(two(2), two(3));
  out[0] = _mm256_unpacklo_epi16(ab, cd), out[1] = _mm256_unpackhi_epi16(ab, cd);
}

// One piece of 8 rows, brought together: of codes in one run 16 bytes, of a block of 3-bit codes 8
// bytes of each run. Its columns come in `parts` of 8 bytes: two vectors.
template <class W>
struct Piece {
  static constexpr int parts = W::runs == 1 ? 2 : 1, part_columns = 8 * W::planes;
  static constexpr int columns = parts * part_columns;
  __m256i of_run[W::runs][2 * parts];

  void load(const Rows& rows, int row, int column) {
    const uint8_t* at = rows.data + row * rows.stride;
    if constexpr (W::runs == 1) {
      bring_together(at + column * W::bits / 8, rows.stride, of_run[0]);
    } else {
      const Threes place = threes_of(rows, column);
      for (int i = 0; i < W::runs; ++i)
        bring_half(at + place.at + i * place.run, rows.stride, of_run[i]);
    }
  }

  // One plane of the codes in a vector. Shifts are by 16 bits at a time; what comes from the
  // neighbour is masked.
  __m256i codes(int vector, int plane, __m256i table) const {
    const auto shifted = [&](int run, int bits) {
      return bits ? _mm256_srli_epi16(of_run[run][vector], bits) : of_run[run][vector];
    };
    if constexpr (!W::packed) return of_run[0][vector];
    if constexpr (!W::blocks)
      return worth_of<W>(low_bits(shifted(0, W::bits * plane), W::bits), table);
    if (plane < 6) return worth_of<W>(low_bits(shifted(plane / 2, plane % 2 * 3), 3), table);
    const __m256i top = _mm256_and_si256(shifted(W::runs - 1, plane - 2), _mm256_set1_epi8(4));
    return worth_of<W>(_mm256_or_si256(low_bits(shifted(plane - 6, 6), 2), top), table);
  }
};

inline __m256i fold(__m256i a, __m256i b) {  // sums of the two lanes of each
  return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20),
                          _mm256_permute2x128_si256(a, b, 0x31));
}

// a[0] b[0] a[1] b[1] ...
inline void alternate(__m256 a, __m256 b, __m256& first, __m256& second) {
  const __m256 low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
  first = _mm256_permute2f128_ps(low, high, 0x20);
  second = _mm256_permute2f128_ps(low, high, 0x31);
}

// A part's columns in their order, from planes: those with even numbers, put in order, alternate
// with the others.
template <int planes>
inline void in_order(const __m256* plane, int step, __m256* out) {
  if constexpr (planes == 1) {
    out[0] = plane[0];
  } else {
    __m256 even[planes / 2], odd[planes / 2];
    in_order<planes / 2>(plane, 2 * step, even);
    in_order<planes / 2>(plane + step, 2 * step, odd);
    for (int i = 0; i < planes / 2; ++i) alternate(even[i], odd[i], out[2 * i], out[2 * i + 1]);
  }
}

// The columns of one part of `groups` pieces for M rows of x: 8 in each vector of `out`.
template <class W, int M>
inline void mix_part(const Piece<W>* pieces, int groups, const Scaled* const* x, __m256i table,
                     int part, __m256 (*out)[W::planes]) {
  __m256 planes[M][W::planes];
#pragma GCC unroll 8
  for (int plane = 0; plane < W::planes; ++plane) {
    Products<W> sums[M][2];
    for (int g = 0; g < groups; ++g) {
      const __m256i codes[2] = {pieces[g].codes(2 * part, plane, table),
                                pieces[g].codes(2 * part + 1, plane, table)};
      for (int m = 0; m < M; ++m) {
        for (int i = 0; i < 2; ++i) sums[m][i].add(codes[i], x[m]->first[g], x[m]->second[g]);
      }
    }
    for (int m = 0; m < M; ++m) {
      const __m256 found = _mm256_cvtepi32_ps(fold(sums[m][0].total(), sums[m][1].total()));
      planes[m][plane] =
          _mm256_fmadd_ps(found, _mm256_set1_ps(x[m]->unit), _mm256_set1_ps(x[m]->lowest));
    }
  }
  for (int m = 0; m < M; ++m) in_order<W::planes>(planes[m], 1, out[m]);
}

// The first `count` columns of one piece into out [M, ...].
template <class W, int M>
inline void write_piece(const Piece<W>* pieces, int groups, const Scaled* const* x, __m256i table,
                        float* out, int64_t ldo, int count, bool add) {
  for (int part = 0; part < Piece<W>::parts && part * Piece<W>::part_columns < count; ++part) {
    __m256 columns[M][W::planes];
    mix_part<W, M>(pieces, groups, x, table, part, columns);
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int i = 0; i < W::planes; ++i) {
        const int column = part * Piece<W>::part_columns + 8 * i;
        if (column >= count) continue;
        float* to = out + m * ldo + column;
        const __m256 own = columns[m][i];
        _mm256_storeu_ps(to, add ? _mm256_add_ps(_mm256_loadu_ps(to), own) : own);
      }
    }
  }
}

}  // namespace
}  // namespace kvlathe
