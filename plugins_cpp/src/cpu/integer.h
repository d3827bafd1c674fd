// Products with codes on the integer dot product of AVX-512 VNNI (unsigned bytes times signed bytes), without dequantizing.
//
// x becomes a 15-bit integer, 128 * high + low with both in a signed byte: x ~ unit * (128 high + low). Per group of a row
//     sum x (scale code + minimum) = scale unit (128 sum high code + sum low code) + minimum sum x,
// so its error is that of x alone, at most max |x| / 32512 an element. Included by kernels.cc only.
#pragma once

#include "vector.h"

namespace kvlathe {
namespace {

// Up to 64 elements of one group: what one vector holds.
struct Piece {
  int start, length, group;
  bool last;       // of its group
  int64_t offset;  // of its codes, in bytes
  uint64_t bytes;  // a bit for each byte of its codes
};

struct Split {
  alignas(64) int8_t high[64], low[64];
};

// One row of x, piece by piece. Sized by kDotScratch.
struct Prepared {
  Split pieces[64];
  float sums[64];  // of x in each group
  float unit;
};
static_assert(sizeof(Prepared) <= kDotScratch * sizeof(float), "kDotScratch is too small");

int pieces_of(const Rows& rows, Piece* out) {
  int count = 0;
  for (int chunk = 0, end; chunk < rows.inner / 16; chunk = end) {
    end = group_end(rows, chunk);
    for (int start = 16 * chunk; start < 16 * end; start += 64) {
      const int left = 16 * end - start, length = left < 64 ? left : 64;
      const uint64_t bytes = ~uint64_t{0} >> (64 - length * rows.bits / 8);
      out[count++] = {start, length, rows.group_of[chunk], left <= 64, int64_t{start} * rows.bits / 8, bytes};
    }
  }
  return count;
}

void split(const float* x, int inner, const Piece* pieces, int count, Prepared& out) {
  Floats most{};
  for (int i = 0; i < inner; i += kLanes) most = larger(most, larger(load(x + i), -load(x + i)));
  const float top = largest(most);
  out.unit = top / 16256.f;
  const __m512 per_unit = _mm512_set1_ps(top > 0 ? 16256.f / top : 0.f);
  for (int p = 0; p < count; ++p) {
    const Piece& piece = pieces[p];
    if (p == 0 || pieces[p - 1].last) out.sums[piece.group] = 0;
    __m512i total = _mm512_setzero_si512();
    for (int i = 0; i < 64; i += 16) {
      const __m512 values = i < piece.length ? _mm512_loadu_ps(x + piece.start + i) : _mm512_setzero_ps();
      const __m512i number = _mm512_cvtps_epi32(_mm512_mul_ps(values, per_unit));
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(number, _mm512_set1_epi32(64)), 7);
      _mm_store_si128((__m128i*)(out.pieces[p].high + i), _mm512_cvtepi32_epi8(high));
      _mm_store_si128((__m128i*)(out.pieces[p].low + i), _mm512_cvtepi32_epi8(_mm512_sub_epi32(number, _mm512_slli_epi32(high, 7))));
      total = _mm512_add_epi32(total, number);
    }
    out.sums[piece.group] += out.unit * float(_mm512_reduce_add_epi32(total));
  }
}

// A piece's codes as bytes, zeros behind them. `row`: where the row starts.
template <int bits>
inline __m512i load_codes(const uint8_t* row, const Piece& piece) {
  const uint8_t* at = row + piece.offset;
  if constexpr (bits == 8) return _mm512_maskz_loadu_epi8(piece.bytes, at);
  if constexpr (bits == 4) {
    const __m512i wide = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(__mmask32(piece.bytes), at));
    return _mm512_and_si512(_mm512_or_si512(wide, _mm512_slli_epi16(wide, 4)), _mm512_set1_epi8(15));
  }
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(__mmask16(piece.bytes), at));
  const __m512i pairs = _mm512_or_si512(wide, _mm512_slli_epi32(wide, 6));
  return _mm512_and_si512(_mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 12)), _mm512_set1_epi8(3));
}

inline __m512i join(__m512i a, __m512i b, __m512i c, __m512i d) {  // lane sums: four of a, b, c, d in each 128 bits
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

inline __m512i fold(__m512i a, __m512i b) {  // sums of neighbouring 128 bits
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

// out[m] += products of 16 rows with one piece of M rows of x.
template <int bits, int M>
inline void sixteen(const Rows& rows, const uint8_t* at, const Piece& piece, const Split* const* x, __m512i* out) {
  __m512i high[M], low[M], four[M][4];
  const Piece mine = piece;
  const int64_t stride = rows.stride;
  for (int m = 0; m < M; ++m) high[m] = _mm512_load_si512(x[m]->high), low[m] = _mm512_load_si512(x[m]->low);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __m512i sums[M][4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i codes = load_codes<bits>(at, mine);
      at += stride;
      for (int m = 0; m < M; ++m) {
        const __m512i upper = _mm512_slli_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, high[m]), 7);
        sums[m][j] = _mm512_dpbusd_epi32(upper, codes, low[m]);
      }
    }
    for (int m = 0; m < M; ++m) four[m][i] = join(sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
  }
  for (int m = 0; m < M; ++m) out[m] = _mm512_add_epi32(out[m], fold(fold(four[m][0], four[m][1]), fold(four[m][2], four[m][3])));
}

// (scale, minimum) of one group of 16 rows.
inline void load_pairs(const Rows& rows, int first, int group, __m512& scale, __m512& minimum) {
  const auto* at = reinterpret_cast<const int32_t*>(rows.meta + first * rows.meta_stride) + group;
  __m512i pairs;
  if (rows.meta_stride == 2) {
    pairs = _mm512_loadu_si512(at);
  } else {
    alignas(64) int32_t found[16];
    for (int j = 0; j < 16; ++j) found[j] = at[j * rows.meta_stride / 2];
    pairs = _mm512_load_si512(found);
  }
  scale = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs));
  minimum = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)));
}

template <int bits, int M>
void dots_of_codes(const Rows& rows, const Piece* pieces, int count, const Prepared* const* x, float* out, int64_t ldo, bool add) {
  // Rows come in sixteens: pages hold multiples of 16 tokens and ranks are such, so those past the last are readable.
  for (int r = 0; r < rows.rows; r += 16) {
    const uint8_t* at = rows.data + r * rows.stride;
    const __mmask16 real = rows.rows - r < 16 ? __mmask16((1 << (rows.rows - r)) - 1) : __mmask16(0xffff);
    fetch_ahead(rows, r, 16);
    __m512 total[M];
    for (int m = 0; m < M; ++m) total[m] = add ? _mm512_maskz_loadu_ps(real, out + m * ldo + r) : _mm512_setzero_ps();
    for (int p = 0; p < count; ++p) {
      __m512i dots[M];
      for (int m = 0; m < M; ++m) dots[m] = _mm512_setzero_si512();
      for (;; ++p) {
        const Split* splits[M];
        for (int m = 0; m < M; ++m) splits[m] = &x[m]->pieces[p];
        sixteen<bits, M>(rows, at, pieces[p], splits, dots);
        if (pieces[p].last) break;
      }
      __m512 scale, minimum;
      load_pairs(rows, r, pieces[p].group, scale, minimum);
      for (int m = 0; m < M; ++m) {
        total[m] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(x[m]->sums[pieces[p].group]), total[m]);
        total[m] = _mm512_fmadd_ps(_mm512_mul_ps(scale, _mm512_set1_ps(x[m]->unit)), _mm512_cvtepi32_ps(dots[m]), total[m]);
      }
    }
    for (int m = 0; m < M; ++m) _mm512_mask_storeu_ps(out + m * ldo + r, real, total[m]);
  }
}

template <int bits>
void rows_of_x(const Rows& rows, const Piece* pieces, int count, const Prepared* const* x, float* out, int64_t ldo, int m, bool add) {
  int i = 0;
  for (; i + 2 <= m; i += 2) dots_of_codes<bits, 2>(rows, pieces, count, x + i, out + i * ldo, ldo, add);
  if (i < m) dots_of_codes<bits, 1>(rows, pieces, count, x + i, out + i * ldo, ldo, add);
}

void integer_dots(const float* x, int64_t ldx, const Rows& rows, float* out, int64_t ldo, int m, bool add, bool again, float* scratch) {
  Piece pieces[64];
  const Prepared* prepared[64];
  const int count = pieces_of(rows, pieces);
  for (int done = 0; done < m; done += 64) {
    const int some = m - done < 64 ? m - done : 64;
    for (int i = 0; i < some; ++i) {
      auto* form = reinterpret_cast<Prepared*>(scratch + (done + i) * kDotScratch);
      if (!again) split(x + (done + i) * ldx, rows.inner, pieces, count, *form);
      prepared[i] = form;
    }
    float* to = out + done * ldo;
    if (rows.bits == 8) rows_of_x<8>(rows, pieces, count, prepared, to, ldo, some, add);
    if (rows.bits == 4) rows_of_x<4>(rows, pieces, count, prepared, to, ldo, some, add);
    if (rows.bits == 2) rows_of_x<2>(rows, pieces, count, prepared, to, ldo, some, add);
  }
}

}  // namespace
}  // namespace kvlathe
