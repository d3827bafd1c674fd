// Products of x with rows of codes on 256 bits: a vector holds the same piece of two rows, and
// eight rows are summed up together. Included by read_codes.h only.
#pragma once

#include "cpu/prepare256.h"

namespace kvlathe {
namespace {

// The pieces of rows r and r + 4, for two r.
template <class W>
struct PiecesOfTwo {
  static constexpr int planes = W::planes;
  const uint8_t* at;
  int64_t stride;
  __m256i table, packed[2];

  PiecesOfTwo(const uint8_t* row, const Rows& rows, const Section& section, __m256i table)
      : at(row + section.start * W::bits / 8), stride(rows.stride), table(table) {}

  void next() {
    for (int i = 0; i < 2; ++i) packed[i] = load_two(at + i * stride, 4 * stride);
    at += 16;
  }

  // Shifts are by 16 bits at a time; what comes from the neighbour is masked.
  __m256i codes(int i, int plane) const {
    if constexpr (!W::packed) return packed[i];
    const __m256i own = plane ? _mm256_srli_epi16(packed[i], W::bits * plane) : packed[i];
    return worth_of<W>(low_bits(own, W::bits), table);
  }
};

// Likewise of 3-bit codes: planes as in_planes lays them out for x.
template <class W>
struct BlocksOfTwo {
  static constexpr int planes = 4;
  const uint8_t* row;
  int64_t stride, begin, whole;
  __m256i table, pair[2], third[2];

  BlocksOfTwo(const uint8_t* row, const Rows& rows, const Section& section, __m256i table)
      : row(row),
        stride(rows.stride),
        begin((rows.first + section.start) / kBlockCodes * kBlockCodes),
        whole(rows.whole),
        table(table) {}

  void next() {
    const Threes place = threes_at(begin, whole);
    const uint8_t* at = row + place.at;
    for (int i = 0; i < 2; ++i, at += stride) {
      pair[i] = place.run == 8 ? load_two(at, 4 * stride)
                               : _mm256_unpacklo_epi64(load_halves(at, 4 * stride),
                                                       load_halves(at + place.run, 4 * stride));
      third[i] = load_halves(at + 2 * place.run, 4 * stride);
    }
    begin += kBlockCodes;
  }

  __m256i codes(int i, int plane) const {
    const auto thirds = [&](int first, int second) {
      return _mm256_unpacklo_epi64(_mm256_srli_epi16(third[i], first),
                                   _mm256_srli_epi16(third[i], second));
    };
    __m256i code = pair[i];
    if (plane == 1) code = _mm256_srli_epi16(pair[i], 3);
    if (plane == 2) code = thirds(0, 3);
    if (plane < 3) return worth_of<W>(low_bits(code, 3), table);
    const __m256i low = low_bits(_mm256_srli_epi16(pair[i], 6), 2);
    const __m256i top = _mm256_and_si256(thirds(4, 5), _mm256_set1_epi8(4));
    return worth_of<W>(_mm256_or_si256(low, top), table);
  }
};

// Sums of four of a, b, c, d in each 128 bits.
inline __m256i join(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  const __m256i cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
  return _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
}

// Products of rows r, r + 1, r + 4 and r + 5 with a section of M rows of x: totals first and
// first + 1 of each. Row r begins at `at`.
template <class W, int M>
inline void four(const uint8_t* at, const Rows& rows, const Section& section,
                 const Prepared* const* x, __m256i table, int first, __m256i (*out)[4]) {
  using Pieces = std::conditional_t<W::blocks, BlocksOfTwo<W>, PiecesOfTwo<W>>;
  Products<W> sums[M][2];
  Pieces pieces(at, rows, section, table);
  for (int p = section.first; p < section.first + section.pieces; ++p) {
    pieces.next();
#pragma GCC unroll 4
    for (int plane = 0; plane < Pieces::planes; ++plane) {
      const int place = Pieces::planes * p + plane;
      const __m256i codes[2] = {pieces.codes(0, plane), pieces.codes(1, plane)};
      for (int m = 0; m < M; ++m) {
        const auto of = [&](const int8_t* x) {
          return _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)x + place));
        };
        const __m256i one = of(x[m]->high), other = of(x[m]->low);
        for (int i = 0; i < 2; ++i) sums[m][i].add(codes[i], one, other);
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int i = 0; i < 2; ++i) out[m][first + i] = sums[m][i].total();
  }
}

// Rows come in eights: pages hold multiples of 16 tokens and ranks are such, so those past the last
// are readable. So are 16 bytes where a piece has fewer: metadata follows the codes.
template <class W, int M>
void dots_of_codes(const Rows& rows, const Section* sections, int count, const Prepared* const* x,
                   float* out, int64_t ldo, bool add) {
  const __m256i table = table_of<W>(rows);
  for (int r = 0; r < rows.rows; r += 8) {
    const uint8_t* at = rows.data + r * rows.stride;
    const __m256i real = first_of(rows.rows - r);
    fetch_ahead(rows, r, 8);
    __m256 total[M];
    for (int m = 0; m < M; ++m)
      total[m] = add ? _mm256_maskload_ps(out + m * ldo + r, real) : _mm256_setzero_ps();
    for (int k = 0; k < count; ++k) {
      __m256i dots[M][4];
      __m256 scale, minimum;
      four<W, M>(at, rows, sections[k], x, table, 0, dots);
      four<W, M>(at + 2 * rows.stride, rows, sections[k], x, table, 2, dots);
      affine_of_eight<W::levels>(rows, r, sections[k].group, scale, minimum);
      for (int m = 0; m < M; ++m) {
        const __m256 sums =
            _mm256_cvtepi32_ps(join(dots[m][0], dots[m][1], dots[m][2], dots[m][3]));
        total[m] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(x[m]->sums[k]), total[m]);
        total[m] =
            _mm256_fmadd_ps(_mm256_mul_ps(scale, _mm256_set1_ps(x[m]->unit)), sums, total[m]);
      }
    }
    for (int m = 0; m < M; ++m) _mm256_maskstore_ps(out + m * ldo + r, real, total[m]);
  }
}

}  // namespace
}  // namespace kvlathe
