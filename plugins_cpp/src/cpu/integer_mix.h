// Sums of rows of codes, each row times an x of its own, on the integer dot product (integer.h has
// the products with rows).
//
// Rows are what is added up, and each has its own scale: it goes into x. For each group of columns
//     sum over rows of x (scale code + minimum) = unit sum (128 high + low) code + sum x minimum,
// where x scale ~ unit * (128 high + low). Bytes of four rows are brought side by side for the dot
// product, 16 bytes of 16 rows at a time; lanes of 128 bits hold rows 0-3, 4-7, 8-11 and 12-15.
// Included by read_codes.h only.
#pragma once

#include "cpu/integer.h"

namespace kvlathe {
namespace {

constexpr int kPieceRows = 16;
constexpr int kMostRows = 512;  // that 32 bits can sum up

// x times the scales of one group of columns: for 16 rows one vector in which a lane repeats its
// four rows.
struct Scaled {
  __m512i high[kMostRows / 16], low[kMostRows / 16];
  float unit, lowest;  // lowest: sum of x times minimum
};
static_assert(sizeof(Scaled) <= kDotScratch * sizeof(float), "kDotScratch is too small");

template <bool levels>
void scale_row(const float* x, const Rows& rows, int group, Scaled& out) {
  alignas(64) float scaled[kMostRows];
  __m512 lowest = _mm512_setzero_ps(), most = lowest;
  for (int r = 0; r < rows.rows; r += 16) {
    const __mmask16 real =
        rows.rows - r < 16 ? __mmask16((1 << (rows.rows - r)) - 1) : __mmask16(0xffff);
    __m512 scale, minimum;
    load_pairs<levels>(rows, r, group, scale, minimum);  // past the last row they may be anything
    const __m512 values = _mm512_maskz_loadu_ps(real, x + r),
                 product = _mm512_maskz_mul_ps(real, values, scale);
    lowest = _mm512_mask3_fmadd_ps(values, minimum, lowest, real);
    most = _mm512_max_ps(most, _mm512_abs_ps(product));
    _mm512_store_ps(scaled + r, product);
  }
  const float top = _mm512_reduce_max_ps(most);
  out.unit = top / 16256.f;
  out.lowest = _mm512_reduce_add_ps(lowest);
  const __m512 per_unit = _mm512_set1_ps(top > 0 ? 16256.f / top : 0.f);
  const __m512i repeat = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  const auto bytes = [&](__m512i x) {
    return _mm512_permutexvar_epi32(repeat, _mm512_castsi128_si512(_mm512_cvtepi32_epi8(x)));
  };
  for (int r = 0; r < rows.rows; r += 16) {
    const __m512i number = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(scaled + r), per_unit));
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(number, _mm512_set1_epi32(64)), 7);
    out.high[r / 16] = bytes(high);
    out.low[r / 16] = bytes(_mm512_sub_epi32(number, _mm512_slli_epi32(high, 7)));
  }
}

// The integer form of M rows of x times their scales.
template <class W, int M>
void scale_rows(const float* x, int64_t ldx, const Rows& rows, int group, Scaled* const* out) {
  for (int m = 0; m < M; ++m) scale_row<W::levels>(x + m * ldx, rows, group, *out[m]);
}

// 16 bytes of 16 rows as four vectors: in each, four columns of bytes with four rows side by side.
inline void bring_together(const uint8_t* at, int64_t stride, __m512i* out) {
  const auto quad = [&](int i) { return load_quad(at + i * stride, 4 * stride); };
  const __m512i a = quad(0), b = quad(1), c = quad(2), d = quad(3);
  const __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
  const __m512i ab2 = _mm512_unpackhi_epi8(a, b), cd2 = _mm512_unpackhi_epi8(c, d);
  out[0] = _mm512_unpacklo_epi16(ab, cd), out[1] = _mm512_unpackhi_epi16(ab, cd);
  out[2] = _mm512_unpacklo_epi16(ab2, cd2), out[3] = _mm512_unpackhi_epi16(ab2, cd2);
}

// The first 8 of those bytes as two vectors.
inline void bring_half(const uint8_t* at, int64_t stride, __m512i* out) {
  const auto quad = [&](int i) { return load_quad(at + i * stride, 4 * stride); };
  const __m512i ab = _mm512_unpacklo_epi8(quad(0), quad(1)),
                cd = _mm512_unpacklo_epi8(quad(2), quad(3));
  out[0] = _mm512_unpacklo_epi16(ab, cd), out[1] = _mm512_unpackhi_epi16(ab, cd);
}

inline __m512i fold(__m512i a, __m512i b) {  // sums of neighbouring 128 bits
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

// a[0] b[0] a[1] b[1] ...
inline void alternate(__m512 a, __m512 b, __m512& first, __m512& second) {
  const __m512i places = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  first = _mm512_permutex2var_ps(a, places, b);
  second = _mm512_permutex2var_ps(a, _mm512_add_epi32(places, _mm512_set1_epi32(8)), b);
}

// Columns of one piece for one row of x, plane by plane, in the order of the columns: the planes
// with even numbers, put in order, alternate with the others.
template <int planes>
inline void in_order(const __m512* plane, int step, __m512* out) {
  if constexpr (planes == 1) {
    out[0] = plane[0];
  } else {
    __m512 even[planes / 2], odd[planes / 2];
    in_order<planes / 2>(plane, 2 * step, even);
    in_order<planes / 2>(plane + step, 2 * step, odd);
    for (int i = 0; i < planes / 2; ++i) alternate(even[i], odd[i], out[2 * i], out[2 * i + 1]);
  }
}

// A block of 3-bit codes has planes of 8 columns, two to a vector: plane i and plane i + 4.
inline void block_in_order(const __m512* plane, __m512* out) {
  __m512 columns[4];
  in_order<4>(plane, 1, columns);  // planes 0 to 3 of eight columns each, then planes 4 to 7
  const __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i later = _mm512_add_epi32(places, _mm512_set1_epi32(8));
  for (int i = 0; i < 2; ++i) {
    out[2 * i] = _mm512_permutex2var_ps(columns[i], places, columns[i + 2]);
    out[2 * i + 1] = _mm512_permutex2var_ps(columns[i], later, columns[i + 2]);
  }
}

// One piece of 16 rows, brought together: of codes in one run 16 bytes as four vectors, of a block
// of 3-bit codes 8 bytes of each run as two.
template <class W>
struct Piece {
  static constexpr int vectors = W::runs == 1 ? 4 : 2;
  static constexpr int columns = 4 * vectors * W::planes;
  __m512i of_run[W::runs][vectors];

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
};

// The sums of `count` planes of a piece of `groups` times 16 rows, `apart` planes from each other,
// for M rows of x: 16 columns in each vector of `out`.
template <class W, int M, int count>
inline void mix_planes(const Piece<W>* pieces, int groups, const Scaled* const* x, __m512i table,
                       int first, int apart, __m512 (*out)[4]) {
  constexpr int vectors = Piece<W>::vectors, together = 4 / count;  // that share the loads of x
  __m512i found[M][count * vectors];
  for (int vector = 0; vector < vectors; vector += together) {
    __m512i high[M][count][together], low[M][count][together];
    for (int m = 0; m < M; ++m) {
      for (int i = 0; i < count * together; ++i)
        high[m][i / together][i % together] = low[m][i / together][i % together] =
            _mm512_setzero_si512();
    }
    for (int g = 0; g < groups; ++g) {
      __m512i upper[M], lower[M];
      for (int m = 0; m < M; ++m) upper[m] = x[m]->high[g], lower[m] = x[m]->low[g];
#pragma GCC unroll 4
      for (int j = 0; j < together; ++j) {
        const __m512i* packed = &pieces[g].of_run[0][vector + j];
#pragma GCC unroll 4
        for (int i = 0; i < count; ++i) {
          const __m512i code = codes_of<W>(packed, vectors, first + i * apart, table);
          for (int m = 0; m < M; ++m) {
            add_products(high[m][i][j], code, upper[m]);
            add_products(low[m][i][j], code, lower[m]);
          }
        }
      }
    }
    for (int m = 0; m < M; ++m) {
      for (int i = 0; i < count; ++i) {
        for (int j = 0; j < together; ++j)
          found[m][i * vectors + vector + j] =
              _mm512_add_epi32(low[m][i][j], _mm512_slli_epi32(high[m][i][j], 7));
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int i = 0; i < count * vectors / 4; ++i) {
      const __m512i* four = found[m] + 4 * i;
      const __m512 sums = _mm512_cvtepi32_ps(fold(fold(four[0], four[1]), fold(four[2], four[3])));
      out[m][i] = _mm512_fmadd_ps(sums, _mm512_set1_ps(x[m]->unit), _mm512_set1_ps(x[m]->lowest));
    }
  }
}

// The columns of one piece for M rows of x, in their order.
template <class W, int M>
inline void mix_piece(const Piece<W>* pieces, int groups, const Scaled* const* x, __m512i table,
                      __m512 (*out)[4]) {
  __m512 planes[M][4];
  if constexpr (!W::blocks) {
    mix_planes<W, M, W::planes>(pieces, groups, x, table, 0, 1, planes);
    for (int m = 0; m < M; ++m) in_order<W::planes>(planes[m], 1, out[m]);
  } else {
    // in pairs: four planes' sums and their codes are more than the registers hold
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      __m512 pair[M][4];
      mix_planes<W, M, 2>(pieces, groups, x, table, i, 4, pair);
      for (int m = 0; m < M; ++m) planes[m][i] = pair[m][0];
    }
    for (int m = 0; m < M; ++m) block_in_order(planes[m], out[m]);
  }
}

// The first `count` columns of one piece into out [M, ...].
template <class W, int M>
inline void write_piece(const Piece<W>* pieces, int groups, const Scaled* const* x, __m512i table,
                        float* out, int64_t ldo, int count, bool add) {
  __m512 columns[M][4];
  mix_piece<W, M>(pieces, groups, x, table, columns);
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int i = 0; i < Piece<W>::columns / 16; ++i) {
      if (16 * i >= count) continue;
      float* to = out + m * ldo + 16 * i;
      _mm512_storeu_ps(to, add ? _mm512_add_ps(_mm512_loadu_ps(to), columns[m][i]) : columns[m][i]);
    }
  }
}

}  // namespace
}  // namespace kvlathe
