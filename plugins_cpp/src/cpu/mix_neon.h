// Sums of rows of codes, each row times an x of its own, on NEON.
//
// Rows are what is added up, and each has its own scale: it goes into x. For each group of columns
//     sum over rows of x (scale code + minimum) = unit sum (128 high + low) code + sum x minimum,
// where x scale ~ unit * (128 high + low). Bytes of four rows are brought side by side. Included by
// read_codes.h only.
#pragma once

#include "cpu/products_neon.h"

namespace kvlathe {
namespace {

constexpr int kMostRows = 64;  // rows that are summed up together

// x times the scales of one group of columns: for four rows one vector that repeats them.
struct Scaled {
  int8x16_t first[kMostRows / 4], second[kMostRows / 4];
  float unit, lowest;  // lowest: sum of x times minimum
};
static_assert(sizeof(Scaled) <= kDotScratch * sizeof(float), "kDotScratch is too small");

// Four integers, one for each row.
inline void repeat_rows(int32x4_t number, int8x16_t& first, int8x16_t& second) {
  const int16x4_t four = vmovn_s32(number);
  const int16x8_t own = vcombine_s16(four, four);
  if (Products::words) {
    first = vreinterpretq_s8_s16(vuzp1q_s16(own, own));
    second = vreinterpretq_s8_s16(vuzp2q_s16(own, own));
    return;
  }
  const auto repeated = [](int16x8_t x) {
    const int8x8_t bytes = vmovn_s16(x);
    return vcombine_s8(bytes, bytes);
  };
  first = repeated(high_of(own)), second = repeated(low_of(own));
}

// The integer form of M rows of x times their scales: metadata is read once for all of them.
template <class W, int M>
void scale_rows(const float* x, int64_t ldx, const Rows& rows, int group, Scaled* const* out) {
  float32x4_t product[M][kMostRows / 4], lowest[M], most[M];
  for (int m = 0; m < M; ++m) lowest[m] = most[m] = vdupq_n_f32(0);
  for (int r = 0; r < rows.rows; r += 4) {
    const int left = rows.rows - r;
    const uint32x4_t real = first_of(left);  // past the last row they may be anything
    float32x4_t scale, minimum;
    affine_of_four<W>(rows, r, group, scale, minimum);
    scale = where(real, scale), minimum = where(real, minimum);
    for (int m = 0; m < M; ++m) {
      const float32x4_t values = load_first(x + m * ldx + r, left);
      product[m][r / 4] = vmulq_f32(values, scale);
      lowest[m] = vfmaq_f32(lowest[m], values, minimum);
      most[m] = vmaxq_f32(most[m], vabsq_f32(product[m][r / 4]));
    }
  }
  for (int m = 0; m < M; ++m) {
    const float top = vmaxvq_f32(most[m]), per_unit = top > 0 ? 16256.f / top : 0.f;
    out[m]->unit = top / 16256.f;
    out[m]->lowest = vaddvq_f32(lowest[m]);
    for (int i = 0; i < (rows.rows + 3) / 4; ++i) {
      const int32x4_t number = vcvtnq_s32_f32(vmulq_n_f32(product[m][i], per_unit));
      repeat_rows(number, out[m]->first[i], out[m]->second[i]);
    }
  }
}

// Bytes of four rows: in each vector, four columns of bytes with the rows side by side.
inline void side_by_side(uint8x16_t a, uint8x16_t b, uint8x16_t c, uint8x16_t d, uint8x16_t* out) {
  const auto zipped = [&](uint8x16_t x, uint8x16_t y, uint8x16_t* to) {
    const uint16x8_t left = vreinterpretq_u16_u8(x), right = vreinterpretq_u16_u8(y);
    to[0] = vreinterpretq_u8_u16(vzip1q_u16(left, right));
    to[1] = vreinterpretq_u8_u16(vzip2q_u16(left, right));
  };
  zipped(vzip1q_u8(a, b), vzip1q_u8(c, d), out);
  zipped(vzip2q_u8(a, b), vzip2q_u8(c, d), out + 2);
}

// One piece of four rows, brought together: of codes in one run 16 bytes, of a block of 3-bit codes
// 8 bytes of each run. Its columns come in `parts` of 8 bytes: two vectors.
template <class W>
struct Piece {
  static constexpr int parts = W::runs == 1 ? 2 : 1, part_columns = 8 * W::planes;
  static constexpr int columns = parts * part_columns;
  uint8x16_t of_run[W::runs][4];

  void load(const Rows& rows, int row, int column) {
    const uint8_t* at = rows.data + row * rows.stride;
    const int64_t stride = rows.stride;
    if constexpr (W::runs == 1) {
      at += column * W::bits / 8;
      side_by_side(vld1q_u8(at), vld1q_u8(at + stride), vld1q_u8(at + 2 * stride),
                   vld1q_u8(at + 3 * stride), of_run[0]);
    } else {
      const Threes place = threes_of(rows, column);
      at += place.at;
      for (int i = 0; i < W::runs; ++i, at += place.run) {
        const auto half = [&](int j) { return two_halves(at + j * stride, at + j * stride); };
        side_by_side(half(0), half(1), half(2), half(3), of_run[i]);
      }
    }
  }

  uint8x16_t codes(int vector, int plane) const {
    if constexpr (W::bits != 3) return bits_from(of_run[0][vector], W::bits * plane, W::bits);
    if (plane < 6) return bits_from(of_run[plane / 2][vector], plane % 2 * 3, 3);
    const uint8x16_t top = of_run[W::runs - 1][vector] >> uint8_t(plane - 2) & uint8_t(4);
    return bits_from(of_run[plane - 6][vector], 6, 2) | top;
  }
};

// Columns in their order, from planes: those with even numbers, put in order, alternate with the
// others.
template <int planes>
inline void in_order(const float32x4_t* plane, int step, float32x4_t* out) {
  if constexpr (planes == 1) {
    out[0] = plane[0];
  } else {
    float32x4_t even[planes / 2], odd[planes / 2];
    in_order<planes / 2>(plane, 2 * step, even);
    in_order<planes / 2>(plane + step, 2 * step, odd);
    for (int i = 0; i < planes / 2; ++i) {
      out[2 * i] = vzip1q_f32(even[i], odd[i]);
      out[2 * i + 1] = vzip2q_f32(even[i], odd[i]);
    }
  }
}

// The columns of one part of `groups` pieces for M rows of x: four in each vector of `out`.
template <class W, int M>
inline void mix_part(const Piece<W>* pieces, int groups, const Scaled* const* x, uint8x16_t table,
                     int part, float32x4_t (*out)[2 * W::planes]) {
  float32x4_t planes[M][2][W::planes];
#pragma GCC unroll 8
  for (int plane = 0; plane < W::planes; ++plane) {
    Products sums[M][2];
    for (int g = 0; g < groups; ++g) {
      for (int i = 0; i < 2; ++i) {
        const uint8x16_t codes = worth_of<W>(pieces[g].codes(2 * part + i, plane), table);
        for (int m = 0; m < M; ++m) sums[m][i].add(codes, x[m]->first[g], x[m]->second[g]);
      }
    }
    for (int m = 0; m < M; ++m) {
      for (int i = 0; i < 2; ++i)
        planes[m][i][plane] =
            vfmaq_n_f32(vdupq_n_f32(x[m]->lowest), vcvtq_f32_s32(sums[m][i].total()), x[m]->unit);
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int i = 0; i < 2; ++i) in_order<W::planes>(planes[m][i], 1, out[m] + i * W::planes);
  }
}

// The first `count` columns of one piece into out [M, ...].
template <class W, int M>
inline void write_piece(const Piece<W>* pieces, int groups, const Scaled* const* x,
                        uint8x16_t table, float* out, int64_t ldo, int count, bool add) {
  for (int part = 0; part < Piece<W>::parts && part * Piece<W>::part_columns < count; ++part) {
    float32x4_t columns[M][2 * W::planes];
    mix_part<W, M>(pieces, groups, x, table, part, columns);
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
      for (int i = 0; i < 2 * W::planes; ++i) {
        const int column = part * Piece<W>::part_columns + 4 * i;
        if (column >= count) continue;
        float* to = out + m * ldo + column;
        vst1q_f32(to, add ? vaddq_f32(vld1q_f32(to), columns[m][i]) : columns[m][i]);
      }
    }
  }
}

template <class W>
void mix_of(const float* x, int64_t ldx, const Rows& rows, float* out, int64_t ldo, int m, bool add,
            float* scratch) {
  const int groups = (rows.rows + 3) / 4;
  const uint8x16_t table = table_of<W>(rows);
  const auto form = [&](int i) { return reinterpret_cast<Scaled*>(scratch + i * kDotScratch); };
  for (int chunk = 0, end; chunk < rows.inner / 16; chunk = end) {
    end = group_end(rows, chunk);
    for (int i = 0; i < m; i += 2) {
      Scaled* pair[2] = {form(i), form(i + 1)};
      const int group = rows.group_of[chunk];
      if (i + 1 < m) {
        scale_rows<W, 2>(x + i * ldx, ldx, rows, group, pair);
      } else {
        scale_rows<W, 1>(x + i * ldx, ldx, rows, group, pair);
      }
    }
    for (int column = 16 * chunk, next; column < 16 * end; column = next) {
      next = W::bits == 3 ? block_end(rows, column) : column + Piece<W>::columns;
      if (next > 16 * end) next = 16 * end;
      Piece<W> pieces[kMostRows / 4];
      for (int g = 0; g < groups; ++g) {
        if (column == 0) fetch_ahead(rows, 4 * g, 4);
        pieces[g].load(rows, 4 * g, column);
      }
      for (int i = 0; i < m; i += 2) {
        const Scaled* pair[2] = {form(i), form(i + 1 < m ? i + 1 : i)};
        float* to = out + i * ldo + column;
        if (i + 1 < m) {
          write_piece<W, 2>(pieces, groups, pair, table, to, ldo, next - column, add);
        } else {
          write_piece<W, 1>(pieces, groups, pair, table, to, ldo, next - column, add);
        }
      }
    }
  }
}

void integer_mix(const float* x, int64_t ldx, const Rows& all, float* out, int64_t ldo, int m,
                 bool add, float* scratch) {
  for (int first = 0; first < all.rows; first += kMostRows, x += kMostRows, add = true) {
    Rows rows = all;
    rows.data += first * rows.stride, rows.meta += first * rows.meta_stride,
        rows.ahead += first * rows.ahead_step;
    rows.rows = all.rows - first < kMostRows ? all.rows - first : kMostRows;
    with_width(rows, [&](auto width) {
      mix_of<decltype(width)>(x, ldx, rows, out, ldo, m, add, scratch);
    });
  }
}

}  // namespace
}  // namespace kvlathe
