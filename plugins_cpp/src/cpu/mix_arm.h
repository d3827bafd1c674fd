// Sums of rows of codes, each row times an x of its own, on Arm.
//
// Rows are what is added up, and each has its own scale: it goes into x. For each group of columns
//     sum over rows of x (scale code + minimum) = unit sum (128 high + low) code + sum x minimum,
// where x scale ~ unit * (128 high + low). Bytes of four rows are brought side by side. Included by
// read_codes.h only.
#pragma once

#include "cpu/products_arm.h"

namespace kvlathe {
namespace {

constexpr int kPieceRows = kLanes;
constexpr int kMostRows = 64;  // rows that are summed up together

// x times the scales of one group of columns: for four rows 16 bytes that repeat them.
struct Scaled {
  alignas(64) int8_t first[4 * kMostRows], second[4 * kMostRows];
  float unit, lowest;  // lowest: sum of x times minimum
};
static_assert(sizeof(Scaled) <= kDotScratch * sizeof(float), "kDotScratch is too small");

// The integer form of M rows of x times their scales: metadata is read once for all of them.
template <class W, int M>
void scale_rows(const float* x, int64_t ldx, const Rows& rows, int group, Scaled* const* out) {
  Floats product[M][kMostRows / kLanes], lowest[M], most[M];
  for (int m = 0; m < M; ++m) lowest[m] = most[m] = Floats{};
  for (int r = 0; r < rows.rows; r += kLanes) {
    const int left = rows.rows - r;
    const Ints real = first_of(left);  // past the last row they may be anything
    Floats scale, minimum;
    affine_of_rows<W>(rows, r, group, scale, minimum);
    scale = real ? scale : Floats{}, minimum = real ? minimum : Floats{};
    for (int m = 0; m < M; ++m) {
      const Floats values = load_first(x + m * ldx + r, left);
      product[m][r / kLanes] = values * scale;
      lowest[m] += values * minimum;
      most[m] = larger_size(most[m], product[m][r / kLanes]);
    }
  }
  for (int m = 0; m < M; ++m) {
    const float top = largest(most[m]), per_unit = top > 0 ? 16256.f / top : 0.f;
    out[m]->unit = top / 16256.f;
    out[m]->lowest = sum(lowest[m]);
    for (int r = 0; r < rows.rows; r += kLanes) {
      SignedBytes first, second;
      Products::repeat(to_nearest(product[m][r / kLanes] * per_unit), first, second);
      std::memcpy(out[m]->first + 4 * r, &first, sizeof first);
      std::memcpy(out[m]->second + 4 * r, &second, sizeof second);
    }
  }
}

// 16 bytes of kLanes rows (segments of each of a, b, c, d are four rows from each other), with four
// rows side by side: first all columns of the first four rows, in kColumnVectors vectors.
constexpr int kColumnVectors = 4 / kSegments;
inline void side_by_side(Bytes a, Bytes b, Bytes c, Bytes d, Bytes* out) {
  const Bytes ab = zip_first(a, b), cd = zip_first(c, d);
  out[0] = zip_first_pairs(ab, cd), out[1] = zip_second_pairs(ab, cd);
  const Bytes ab2 = zip_second(a, b), cd2 = zip_second(c, d);
  out[2] = zip_first_pairs(ab2, cd2), out[3] = zip_second_pairs(ab2, cd2);
}

// One piece of kLanes rows, brought together: of codes in one run 16 bytes, of a block of 3-bit codes
// 8 bytes of each run. Its columns come in `parts` of `together` vectors.
template <class W>
struct Piece {
  static constexpr int vectors =
      W::runs == 1 || kSegments == 4 ? kColumnVectors : kColumnVectors / 2;
  static constexpr int together = vectors < 2 ? vectors : 2, parts = vectors / together;
  static constexpr int part_columns = kLanes * together * W::planes;
  static constexpr int columns = parts * part_columns;
  Bytes of_run[W::runs][4];

  void load(const Rows& rows, int row, int column) {
    const uint8_t* at = rows.data + row * rows.stride;
    const int64_t stride = rows.stride;
    if constexpr (W::runs == 1) {
      at += column * W::bits / 8;
      const auto quarter = [&](int j) { return load_pieces(at + j * stride, 4 * stride); };
      side_by_side(quarter(0), quarter(1), quarter(2), quarter(3), of_run[0]);
    } else {
      const Threes place = threes_of(rows, column);
      at += place.at;
      for (int i = 0; i < W::runs; ++i, at += place.run) {
        const auto half = [&](int j) { return load_halves(at + j * stride, 0, 4 * stride); };
        side_by_side(half(0), half(1), half(2), half(3), of_run[i]);
      }
    }
  }

  Bytes codes(int vector, int plane) const {
    if constexpr (!W::blocks) return bits_from(of_run[0][vector], W::bits * plane, W::bits);
    if (plane < 6) return bits_from(of_run[plane / 2][vector], plane % 2 * 3, 3);
    const Bytes top = of_run[W::runs - 1][vector] >> uint8_t(plane - 2) & uint8_t(4);
    return bits_from(of_run[plane - 6][vector], 6, 2) | top;
  }
};

// Columns in their order, from planes: those with even numbers, put in order, alternate with the
// others.
template <int planes>
inline void in_order(const Floats* plane, int step, Floats* out) {
  if constexpr (planes == 1) {
    out[0] = plane[0];
  } else {
    Floats even[planes / 2], odd[planes / 2];
    in_order<planes / 2>(plane, 2 * step, even);
    in_order<planes / 2>(plane + step, 2 * step, odd);
    for (int i = 0; i < planes / 2; ++i) {
      out[2 * i] = zip_first(even[i], odd[i]);
      out[2 * i + 1] = zip_second(even[i], odd[i]);
    }
  }
}

// The columns of one part of `groups` pieces for M rows of x: kLanes in each vector of `out`.
template <class W, int M>
inline void mix_part(const Piece<W>* pieces, int groups, const Scaled* const* x, Bytes table,
                     int part, Floats (*out)[Piece<W>::together * W::planes]) {
  constexpr int together = Piece<W>::together;
  Floats planes[M][together][W::planes];
#pragma GCC unroll 8
  for (int plane = 0; plane < W::planes; ++plane) {
    Products sums[M][together];
    for (int g = 0; g < groups; ++g) {
      for (int four = 0; four < kSegments; ++four) {
        const int place = 16 * (kSegments * g + four);
        SignedBytes first[M], second[M];
        for (int m = 0; m < M; ++m)
          first[m] = repeated(x[m]->first + place), second[m] = repeated(x[m]->second + place);
        for (int i = 0; i < together; ++i) {
          const int vector = kColumnVectors * four + together * part + i;
          const Bytes codes = worth_of<W>(pieces[g].codes(vector, plane), table);
          for (int m = 0; m < M; ++m) sums[m][i].add(codes, first[m], second[m]);
        }
      }
    }
    for (int m = 0; m < M; ++m) {
      for (int i = 0; i < together; ++i)
        planes[m][i][plane] =
            __builtin_convertvector(sums[m][i].total(), Floats) * x[m]->unit + x[m]->lowest;
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int i = 0; i < together; ++i) in_order<W::planes>(planes[m][i], 1, out[m] + i * W::planes);
  }
}

// The first `count` columns of one piece into out [M, ...].
template <class W, int M>
inline void write_piece(const Piece<W>* pieces, int groups, const Scaled* const* x, Bytes table,
                        float* out, int64_t ldo, int count, bool add) {
  constexpr int vectors = Piece<W>::together * W::planes;
  for (int part = 0; part < Piece<W>::parts && part * Piece<W>::part_columns < count; ++part) {
    Floats columns[M][vectors];
    mix_part<W, M>(pieces, groups, x, table, part, columns);
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
      for (int i = 0; i < vectors; ++i) {
        const int column = part * Piece<W>::part_columns + kLanes * i;
        if (column >= count) continue;
        float* to = out + m * ldo + column;
        store(to, add ? load(to) + columns[m][i] : columns[m][i]);
      }
    }
  }
}

}  // namespace
}  // namespace kvlathe
