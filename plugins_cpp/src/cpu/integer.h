// Products with codes on the integer dot product of AVX-512 VNNI (unsigned bytes times signed
// bytes), without dequantizing (sections.h has the equations, and how pieces lie). A vector holds the same piece of four rows, so
// that what is left to add up at the end of a group are four numbers a row and not sixteen.
// Included by read_codes.h only.
#pragma once

#include <cstring>
#include <type_traits>

#include "cpu/sections.h"
#include "cpu/vector.h"

namespace kvlathe {
namespace {

// Bytes of 64 elements, packed from four vectors of numbers and so by dwords in the order (128
// bits, vector), as planes of pieces.
template <int bits>
inline __m512i as_planes(__m512i packed) {
  const __m512i across = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i ordered = _mm512_permutexvar_epi32(across, packed);
  if constexpr (is_byte(bits)) return ordered;
  if constexpr (is_nibble(bits)) {
    const __m512i apart =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    return _mm512_permutex_epi64(_mm512_shuffle_epi8(ordered, apart), 0xd8);
  }
  const __m512i apart =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  return _mm512_permutexvar_epi32(across, _mm512_shuffle_epi8(ordered, apart));
}

// Bytes of a block of 3-bit codes, packed as above, as its four planes (add_blocks): of the 8
// columns that elements 8 t + c form, two lie in a plane, the second one `run` bytes on.
inline void store_block(int8_t* out, __m512i packed, int64_t run) {
  const __m512i across = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i apart =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
  const __m512i columns = _mm512_cvtepu8_epi16(
      _mm256_setr_epi8(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27, 4, 12, 20, 28, 5,
                       13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31));
  const __m512i pairs = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(across, packed), apart);
  alignas(64) int8_t bytes[64];
  _mm512_store_si512(bytes, _mm512_permutexvar_epi16(columns, pairs));
  constexpr int column[4][2] = {{0, 2}, {1, 3}, {4, 5}, {6, 7}};
  _mm512_storeu_si512(out, _mm512_setzero_si512());
  for (int plane = 0; plane < 4; ++plane) {
    std::memcpy(out + 16 * plane, bytes + 8 * column[plane][0], 8);
    std::memcpy(out + 16 * plane + run, bytes + 8 * column[plane][1], 8);
  }
}

// x as integers: 64 elements from `from` on, those outside of begin .. end - 1 zeros. Bytes are
// packed by dwords in the order (128 bits, vector). Returns the numbers, summed up by lanes.
__attribute__((always_inline)) inline __m512i integers(const float* x, int from, int begin, int end,
                                                       __m512 per_unit, __m512i& high,
                                                       __m512i& low) {
  const auto highs = [](__m512i n) {
    return _mm512_srai_epi16(_mm512_add_epi16(n, _mm512_set1_epi16(64)), 7);
  };
  const auto lows = [](__m512i n, __m512i high) {
    return _mm512_sub_epi16(n, _mm512_slli_epi16(high, 7));
  };
  __m512i number[4], total = _mm512_setzero_si512();
  for (int j = 0; j < 4; ++j) {
    const int i = from + 16 * j;
    const bool inside = i >= begin && i < end;
    number[j] = inside ? _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), per_unit))
                       : _mm512_setzero_si512();
    total = _mm512_add_epi32(total, number[j]);
  }
  const __m512i ab = _mm512_packs_epi32(number[0], number[1]),
                cd = _mm512_packs_epi32(number[2], number[3]);
  const __m512i high_ab = highs(ab), high_cd = highs(cd);
  high = _mm512_packs_epi16(high_ab, high_cd);
  low = _mm512_packs_epi16(lows(ab, high_ab), lows(cd, high_cd));
  return total;
}

template <class W>
__attribute__((always_inline)) inline void prepare(const float* x, const Rows& rows,
                                                   const Section* sections, int count,
                                                   Prepared& out) {
  __m512 most = _mm512_setzero_ps();
  for (int i = 0; i < rows.inner; i += 16)
    most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_loadu_ps(x + i)));
  const float top = _mm512_reduce_max_ps(most);
  out.unit = top / 16256.f;
  const __m512 per_unit = _mm512_set1_ps(top > 0 ? 16256.f / top : 0.f);
  for (int k = 0; k < count; ++k) {
    const Section& section = sections[k];
    __m512i total = _mm512_setzero_si512(), high, low;
    int at = section.first * (W::blocks ? kBlockCodes : 128 / W::bits);
    int from = section.start;
    if (W::blocks) from -= (rows.first + from) % kBlockCodes;  // its block's begin
    for (; from < section.end; from += 64, at += 64) {
      const __m512i own = integers(x, from, section.start, section.end, per_unit, high, low);
      total = _mm512_add_epi32(total, own);
      if constexpr (W::blocks) {
        const int64_t run = threes_of(rows, from).run;
        store_block(out.high + at, high, run);
        store_block(out.low + at, low, run);
      } else {
        _mm512_storeu_si512(out.high + at, as_planes<W::bits>(high));
        _mm512_storeu_si512(out.low + at, as_planes<W::bits>(low));
      }
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

// In each lane of 128 bits.
template <class W>
inline __m512i table_of(const Rows& rows) {
  if constexpr (!W::levels) return _mm512_setzero_si512();
  return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)level_table(rows)));
}

// Codes of 3 bits whose lower two are in `low`; the highest are in bit 2 of `high`.
inline __m512i with_tops(__m512i low, __m512i high) {
  return _mm512_ternarylogic_epi32(low, high, _mm512_set1_epi8(4), 0xf8);  // low | high & 4
}

// One plane of the codes in a vector of each run (`apart` vectors apart), as bytes. Shifts are by
// 16 bits at a time; what comes from the neighbour is masked.
template <class W>
inline __m512i codes_of(const __m512i* packed, int apart, int plane, __m512i table) {
  const auto cut = [](__m512i x, int bits) {
    return _mm512_and_si512(x, _mm512_set1_epi8(char((1 << bits) - 1)));
  };
  __m512i code = packed[0];
  if constexpr (W::blocks) {
    if (plane < 6) {
      const __m512i own = packed[plane / 2 * apart];
      code = cut(plane % 2 ? _mm512_srli_epi16(own, 3) : own, 3);
    } else {
      const __m512i low = cut(_mm512_srli_epi16(packed[(plane - 6) * apart], 6), 2);
      code = with_tops(low, _mm512_srli_epi16(packed[2 * apart], unsigned(plane - 2)));
    }
  } else if constexpr (W::packed) {
    code = cut(plane ? _mm512_srli_epi16(code, unsigned(W::bits * plane)) : code, W::bits);
  }
  return W::levels ? _mm512_shuffle_epi8(table, code) : code;
}

// How a block of 3-bit codes comes apart: its first two runs lie in one vector, the third twice in
// another. `pairs` and `tops` are shifts of its words, for the first copy and for the second.
struct BlockShifts {
  __m512i twice, pairs, tops;

  explicit BlockShifts(int64_t run) {
    const __m128i byte = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m128i begin = _mm_set1_epi8(char(run));
    const __mmask16 second = _mm_cmpge_epi8_mask(byte, begin);
    const __mmask8 words = _mm_cmpge_epi16_mask(_mm_setr_epi16(0, 2, 4, 6, 8, 10, 12, 14),
                                                _mm_set1_epi16(int16_t(run)));
    twice = _mm512_broadcast_i32x4(_mm_mask_sub_epi8(byte, second, byte, begin));
    pairs = _mm512_broadcast_i32x4(_mm_maskz_set1_epi16(words, 3));
    tops = _mm512_broadcast_i32x4(_mm_mask_set1_epi16(_mm_set1_epi16(4), words, 5));
  }
};

// What is made ready once for many rows: the table of fixed levels, and how whole blocks and the last
// one of a row come apart.
template <class W>
struct Opened {
  __m512i table;
  const BlockShifts whole, last;

  explicit Opened(const Rows& rows)
      : table(table_of<W>(rows)),
        whole(W::blocks ? kBlockCodes / 8 : 0),
        last(W::blocks ? (rows.whole - 1) % kBlockCodes / 8 + 1 : 0) {}
};

// Pieces of 16 rows whose codes lie in one run.
template <class W>
struct PiecesOfRows {
  static constexpr int planes = W::planes;
  const uint8_t* at;
  int64_t stride;
  __m512i table, packed[4];

  PiecesOfRows(const uint8_t* row, const Rows& rows, const Section& section,
               const Opened<W>& opened)
      : at(row + section.start * W::bits / 8), stride(rows.stride), table(opened.table) {}

  void next() {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) packed[i] = load_quad(at + i * stride, 4 * stride);
    at += 16;
  }

  __m512i code(int i, int plane) const { return codes_of<W>(&packed[i], 4, plane, table); }
};

// Blocks of 3-bit codes of 16 rows: planes as store_block lays them out for x.
template <class W>
struct BlocksOfRows {
  static constexpr int planes = 4;
  const uint8_t *row, *after = nullptr;
  int64_t stride, begin, whole;
  const Opened<W>& opened;
  BlockShifts shifts;
  __m512i pair[4], third[4];

  BlocksOfRows(const uint8_t* row, const Rows& rows, const Section& section,
               const Opened<W>& opened)
      : row(row),
        stride(rows.stride),
        begin((rows.first + section.start) / kBlockCodes * kBlockCodes),
        whole(rows.whole),
        opened(opened),
        shifts(opened.whole) {}

  void next() {
    const Threes place = threes_at(begin, whole);
    if (8 * place.run != kBlockCodes) shifts = opened.last;
    const uint8_t* at = row + place.at;
    after = at + 2 * place.run;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) pair[i] = load_quad(at + i * stride, 4 * stride);
    begin += kBlockCodes;
  }

  // Plane by plane: the third run is loaded when its plane comes, while registers are free.
  __m512i code(int i, int plane) {
    const auto cut = [](__m512i x) { return _mm512_and_si512(x, _mm512_set1_epi8(7)); };
    __m512i code;
    if (plane == 0) code = cut(pair[i]);
    if (plane == 1) code = cut(_mm512_srli_epi16(pair[i], 3));
    if (plane == 2) {
      third[i] = _mm512_shuffle_epi8(load_quad(after + i * stride, 4 * stride), shifts.twice);
      code = cut(_mm512_srlv_epi16(third[i], shifts.pairs));
    }
    if (plane == 3) {
      const __m512i low = _mm512_and_si512(_mm512_srli_epi16(pair[i], 6), _mm512_set1_epi8(3));
      code = with_tops(low, _mm512_srlv_epi16(third[i], shifts.tops));
    }
    return W::levels ? _mm512_shuffle_epi8(opened.table, code) : code;
  }
};

// Products of 16 rows, from `at`, with a section of M rows of x.
template <class W, int M>
inline void sixteen(const uint8_t* at, const Rows& rows, const Section& section,
                    const Prepared* const* x, const Opened<W>& opened, __m512i* out) {
  using Pieces = std::conditional_t<W::blocks, BlocksOfRows<W>, PiecesOfRows<W>>;
  constexpr int planes = Pieces::planes;
  __m512i high[M][4], low[M][4];
  for (int m = 0; m < M; ++m) {
    for (int i = 0; i < 4; ++i) high[m][i] = low[m][i] = _mm512_setzero_si512();
  }
  Pieces pieces(at, rows, section, opened);
  for (int p = section.first; p < section.first + section.pieces; ++p) {
    pieces.next();
#pragma GCC unroll 4
    for (int plane = 0; plane < planes; ++plane) {
      __m512i upper[M], lower[M];
      for (int m = 0; m < M; ++m) {
        const int place = planes * p + plane;
        upper[m] = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)x[m]->high + place));
        lower[m] = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)x[m]->low + place));
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m512i code = pieces.code(i, plane);
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

// The magnitudes of one group of 16 rows of fixed levels, from the upper halves of 32 bits: so
// nothing behind the last one is read.
inline void load_magnitudes(const Rows& rows, int first, int group, __m512& scale,
                            __m512& minimum) {
  const uint16_t* at = rows.meta + first * rows.meta_stride + group;
  const __m512i count_up = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m256i halves;
  if (rows.meta_stride == 1) {
    halves = _mm256_loadu_si256((const __m256i*)at);
  } else if (rows.meta_stride == 2) {
    const __m512i pairs = _mm512_loadu_si512(at - group);
    halves = _mm512_cvtepi32_epi16(group ? _mm512_srli_epi32(pairs, 16) : pairs);
  } else {
    const __m512i places =
        _mm512_mullo_epi32(count_up, _mm512_set1_epi32(int32_t(rows.meta_stride)));
    const __m512i pairs = _mm512_i32gather_epi32(places, (const int32_t*)(at - 1), 2);
    halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16));
  }
  const __m512 magnitude = _mm512_cvtph_ps(halves);
  scale = _mm512_mul_ps(magnitude, _mm512_set1_ps(kTwo255ths));
  minimum = _mm512_sub_ps(_mm512_setzero_ps(), magnitude);
}

// (scale, minimum) of one group of 16 rows.
template <bool levels>
inline void load_pairs(const Rows& rows, int first, int group, __m512& scale, __m512& minimum) {
  if (levels) return load_magnitudes(rows, first, group, scale, minimum);
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

template <class W, int M>
void dots_of_codes(const Rows& rows, const Section* sections, int count, const Prepared* const* x,
                   float* out, int64_t ldo, bool add) {
  // Rows come in sixteens: pages hold multiples of 16 tokens and ranks are such, so those past the
  // last are readable. So are 16 bytes where a piece has fewer: metadata follows the codes.
  const Opened<W> opened(rows);
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
      sixteen<W, M>(at, rows, sections[k], x, opened, dots);
      load_pairs<W::levels>(rows, r, sections[k].group, scale, minimum);
      for (int m = 0; m < M; ++m) {
        total[m] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(x[m]->sums[k]), total[m]);
        total[m] = _mm512_fmadd_ps(_mm512_mul_ps(scale, _mm512_set1_ps(x[m]->unit)),
                                   _mm512_cvtepi32_ps(dots[m]), total[m]);
      }
    }
    for (int m = 0; m < M; ++m) _mm512_mask_storeu_ps(out + m * ldo + r, real, total[m]);
  }
}

}  // namespace
}  // namespace kvlathe
