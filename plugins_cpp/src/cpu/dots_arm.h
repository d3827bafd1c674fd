// Products of x with rows of codes on Arm: a segment of a vector holds a piece of one row, and the rows
// of four vectors are summed up together. Included by read_codes.h only.
#pragma once

#include <type_traits>

#include "cpu/products_arm.h"

namespace kvlathe {
namespace {

// Which of 64 elements of x stands at each place, so that planes of codes lie beside theirs.
struct Order {
  uint8_t element[64];
};
constexpr Order order_of(int bits) {
  constexpr int column[8] = {0, 2, 1, 3, 4, 5, 6, 7};  // of a 3-bit block: two columns form a plane
  Order order{};
  for (int i = 0; i < 64; ++i) {
    const int planes = 8 / bits, piece = 16 * planes;
    order.element[i] =
        uint8_t(in_blocks(bits) ? i % 8 * 8 + column[i / 8]
                                : i / piece * piece + planes * (i % 16) + i % piece / 16);
  }
  return order;
}
template <int bits>
constexpr Order kOrder = order_of(bits);

template <int bits>
inline int8x16x4_t in_planes(const int8x16x4_t& x) {
  if constexpr (is_byte(bits)) return x;
  int8x16x4_t out;
  for (int i = 0; i < 4; ++i) out.val[i] = vqtbl4q_s8(x, vld1q_u8(kOrder<bits>.element + 16 * i));
  return out;
}

// x from `from` on as integers: 64 elements, those outside of begin .. end - 1 zeros. Returns the
// numbers, summed up by lanes.
inline int32x4_t integers(const float* x, int from, int begin, int end, float per_unit,
                          int8x16x4_t& high, int8x16x4_t& low) {
  int32x4_t total = vdupq_n_s32(0);
  for (int j = 0; j < 4; ++j) {
    const int i = from + 16 * j;
    int32x4_t number[4];
    for (int k = 0; k < 4; ++k) {
      const bool inside = i >= begin && i < end;
      number[k] =
          inside ? vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i + 4 * k), per_unit)) : vdupq_n_s32(0);
      total = vaddq_s32(total, number[k]);
    }
    const int16x8_t a = vcombine_s16(vmovn_s32(number[0]), vmovn_s32(number[1])),
                    b = vcombine_s16(vmovn_s32(number[2]), vmovn_s32(number[3]));
    high.val[j] = vcombine_s8(vmovn_s16(high_of(a)), vmovn_s16(high_of(b)));
    low.val[j] = vcombine_s8(vmovn_s16(low_of(a)), vmovn_s16(low_of(b)));
  }
  return total;
}

template <class W>
void prepare(const float* x, const Rows& rows, const Section* sections, int count, Prepared& out) {
  float32x4_t most = vdupq_n_f32(0);
  for (int i = 0; i < rows.inner; i += 4) most = vmaxq_f32(most, vabsq_f32(vld1q_f32(x + i)));
  const float top = vmaxvq_f32(most), per_unit = top > 0 ? 16256.f / top : 0.f;
  out.unit = top / 16256.f;
  for (int k = 0; k < count; ++k) {
    const Section& section = sections[k];
    int32x4_t total = vdupq_n_s32(0);
    int at = section.first * (W::blocks ? kBlockCodes : 128 / W::bits);
    int from = section.start;
    if (W::blocks) from -= (rows.first + from) % kBlockCodes;  // its block's begin
    for (; from < section.end; from += 64, at += 64) {
      int8x16x4_t high, low;
      total = vaddq_s32(total, integers(x, from, section.start, section.end, per_unit, high, low));
      high = in_planes<W::bits>(high), low = in_planes<W::bits>(low);
      for (int i = 0; i < 4; ++i) {
        if (Products::words) as_words(high.val[i], low.val[i]);
        vst1q_s8(out.high + at + 16 * i, high.val[i]);
        vst1q_s8(out.low + at + 16 * i, low.val[i]);
      }
    }
    out.sums[k] = out.unit * vaddvq_f32(vcvtq_f32_s32(total));
  }
}

// The pieces of kLanes rows, in four vectors.
template <class W>
struct PiecesOfRows {
  static constexpr int planes = W::planes;
  const uint8_t* at;
  int64_t stride;
  Bytes packed[4];

  PiecesOfRows(const uint8_t* row, const Rows& rows, const Section& section)
      : at(row + section.start * W::bits / 8), stride(rows.stride) {}

  void next() {
    for (int i = 0; i < 4; ++i) packed[i] = load_pieces(at + i * kSegments * stride, stride);
    at += 16;
  }
  Bytes codes(int i, int plane) const { return bits_from(packed[i], W::bits * plane, W::bits); }
};

// Likewise of 3-bit codes: planes as kOrder lays them out for x.
template <class W>
struct BlocksOfRows {
  static constexpr int planes = 4;
  const uint8_t* row;
  int64_t stride, begin, whole;
  Bytes pair[4], third[4];  // the first run and the second; the third one twice

  BlocksOfRows(const uint8_t* row, const Rows& rows, const Section& section)
      : row(row),
        stride(rows.stride),
        begin((rows.first + section.start) / kBlockCodes * kBlockCodes),
        whole(rows.whole) {}

  void next() {
    const Threes place = threes_at(begin, whole);
    const uint8_t* at = row + place.at;
    for (int i = 0; i < 4; ++i, at += kSegments * stride) {
      pair[i] = load_halves(at, place.run, stride);
      third[i] = load_halves(at + 2 * place.run, 0, stride);
    }
    begin += kBlockCodes;
  }
  Bytes codes(int i, int plane) const {
    if (plane < 2) return bits_from(pair[i], 3 * plane, 3);
    if (plane == 2) return third[i] >> halves_of(0, 3) & uint8_t(7);
    return bits_from(pair[i], 6, 2) | (third[i] >> halves_of(4, 5) & uint8_t(4));
  }
};

// Products of kLanes rows, from `at`, with a section of M rows of x.
template <class W, int M>
inline void dots_of_rows(const uint8_t* at, const Rows& rows, const Section& section,
                         const Prepared* const* x, Bytes table, Ints* out) {
  using Pieces = std::conditional_t<W::blocks, BlocksOfRows<W>, PiecesOfRows<W>>;
  Products sums[M][4];
  Pieces pieces(at, rows, section);
  for (int p = section.first; p < section.first + section.pieces; ++p) {
    pieces.next();
#pragma GCC unroll 4
    for (int plane = 0; plane < Pieces::planes; ++plane) {
      const int place = 16 * (Pieces::planes * p + plane);
      SignedBytes first[M], second[M];
      for (int m = 0; m < M; ++m)
        first[m] = repeated(x[m]->high + place), second[m] = repeated(x[m]->low + place);
      for (int i = 0; i < 4; ++i) {
        const Bytes codes = worth_of<W>(pieces.codes(i, plane), table);
        for (int m = 0; m < M; ++m) sums[m][i].add(codes, first[m], second[m]);
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    const auto two = [&](int i) {
      return add_neighbours(sums[m][i].total(), sums[m][i + 1].total());
    };
    out[m] = add_neighbours(two(0), two(2));
  }
}

// Pages hold multiples of 16 tokens and ranks are such, so those past the last of kLanes rows are
// readable. So are 16 bytes where a piece has fewer: metadata follows the codes.
template <class W, int M>
void dots_of_codes(const Rows& rows, const Section* sections, int count, const Prepared* const* x,
                   float* out, int64_t ldo, bool add) {
  const Bytes table = table_of<W>(rows);
  for (int r = 0; r < rows.rows; r += kLanes) {
    const int left = rows.rows - r;
    fetch_ahead(rows, r, kLanes);
    Floats total[M];
    for (int m = 0; m < M; ++m) total[m] = add ? load_first(out + m * ldo + r, left) : Floats{};
    for (int k = 0; k < count; ++k) {
      Ints dots[M];
      Floats scale, minimum;
      dots_of_rows<W, M>(rows.data + r * rows.stride, rows, sections[k], x, table, dots);
      affine_of_rows<W>(rows, r, sections[k].group, scale, minimum);
      for (int m = 0; m < M; ++m) {
        total[m] += minimum * x[m]->sums[k];
        total[m] += scale * x[m]->unit * __builtin_convertvector(dots[m], Floats);
      }
    }
    for (int m = 0; m < M; ++m) store_first(out + m * ldo + r, total[m], left);
  }
}

}  // namespace
}  // namespace kvlathe
