// Products with rows of codes as integers, over all rows of x: what every instruction set does alike.
// Two rows of x are taken at a time, so that codes are read, and come apart, once for both. Included
// by read_codes.h only, after what an instruction set does in a way of its own:
//
//   prepare<W>, dots_of_codes<W, M>      products with rows (integer.h, dots256.h, dots_arm.h)
//   Piece<W>, scale_rows<W, M>, write_piece<W, M>, table_of<W>
//                                        sums of rows (integer_mix.h, mix256.h, mix_arm.h)
//
// W: CodeForm. A piece has kPieceRows rows, and kMostRows are summed up together.
#pragma once

#include "cpu/sections.h"

namespace kvlathe {
namespace {

template <class W>
void dots_of(const float* x, int64_t ldx, const Rows& rows, float* out, int64_t ldo, int m,
             bool add, bool again, float* scratch) {
  Section sections[kSections];
  const int count = sections_of(rows, sections);
  const Prepared* pair[2];
  for (int i = 0; i < m; ++i) {
    auto* form = reinterpret_cast<Prepared*>(scratch + i * kDotScratch);
    if (!again) prepare<W>(x + i * ldx, rows, sections, count, *form);
    pair[i % 2] = form;
    if (i % 2) {
      dots_of_codes<W, 2>(rows, sections, count, pair, out + (i - 1) * ldo, ldo, add);
    } else if (i == m - 1) {
      dots_of_codes<W, 1>(rows, sections, count, pair, out + i * ldo, ldo, add);
    }
  }
}

void integer_dots(const float* x, int64_t ldx, const Rows& rows, float* out, int64_t ldo, int m,
                  bool add, bool again, float* scratch) {
  with_codes(rows, [&](auto codes) {
    dots_of<decltype(codes)>(x, ldx, rows, out, ldo, m, add, again, scratch);
  });
}

template <class W>
void mix_of(const float* x, int64_t ldx, const Rows& rows, float* out, int64_t ldo, int m, bool add,
            float* scratch) {
  const int groups = (rows.rows + kPieceRows - 1) / kPieceRows;
  const auto table = table_of<W>(rows);
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
      next = W::blocks ? block_end(rows, column) : column + Piece<W>::columns;
      if (next > 16 * end) next = 16 * end;
      const int fetched = rows.rows * column / rows.inner;
      fetch_ahead(rows, fetched, rows.rows * next / rows.inner - fetched);
      Piece<W> pieces[kMostRows / kPieceRows];
      for (int g = 0; g < groups; ++g) {
        pieces[g].load(rows, kPieceRows * g, column);
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
    with_codes(rows, [&](auto codes) {
      mix_of<decltype(codes)>(x, ldx, rows, out, ldo, m, add, scratch);
    });
  }
}

}  // namespace
}  // namespace kvlathe
