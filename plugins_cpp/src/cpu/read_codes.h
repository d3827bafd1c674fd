// Products with rows of K or V as they lie in a page, and those rows as floats. Included by
// kernels.cc only.
//
// Floats multiply as they are. Codes of one group share (scale, minimum), which leave the sum:
//     sum x (scale code + minimum) = scale sum x code + minimum sum x.
// Where there are vectors, codes are multiplied as integers instead (integer.h and integer_mix.h with
// AVX-512 VNNI, else dots256.h and mix256.h; dots_arm.h and mix_arm.h).
#pragma once

#include <cstring>

#include "common/float8.h"
#include "common/formats.h"
#include "cpu/products.h"
#include "cpu/rows_ahead.h"

#if defined(__AVX512VNNI__)
#include "cpu/integer_mix.h"
#elif defined(__AVX2__)
#include "cpu/dots256.h"
#include "cpu/mix256.h"
#elif defined(KVLATHE_NEON)
#include "cpu/dots_arm.h"
#include "cpu/mix_arm.h"
#include "cpu/spread_neon.h"
#endif
#if defined(__AVX2__) || defined(KVLATHE_NEON)
#include "cpu/code_products.h"
#endif

namespace kvlathe {
namespace {

// How elements of a row are loaded. bytes: of each, where it is spread; 0: it is read as it lies.
struct Singles {
  static Floats get(const uint8_t* row, int i) {
    return load(reinterpret_cast<const float*>(row) + i);
  }
};
struct Halves {
  static Floats get(const uint8_t* row, int i) {
    return load_half(reinterpret_cast<const uint16_t*>(row) + i);
  }
};
// Codes that are spread over a byte each.
struct ByteCodes {
  static constexpr bool minima = true;
  static constexpr int bytes = 1;
  static Floats get(const uint8_t* row, int i) { return load_bytes(row + i); }
};
// Floats of 8 bits that are spread over a half each, 2^8 times smaller (small_half_of).
struct SmallHalves {
  static constexpr bool minima = false;
  static constexpr int bytes = 2;
  static Floats get(const uint8_t* row, int i) { return Halves::get(row, i); }
};

#if defined(__AVX2__)
// 16 codes of 4 or 2 bits as bytes: each byte goes to a wider place, and its codes come apart by
// halves.
template <int bits>
inline __m128i spread_pairs(const uint8_t* packed) {
  if (is_nibble(bits)) {
    const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)packed));
    return _mm_and_si128(_mm_or_si128(wide, _mm_slli_epi16(wide, 4)), _mm_set1_epi8(15));
  }
  const __m128i wide = _mm_cvtepu8_epi32(_mm_loadu_si32(packed)),
                pairs = _mm_or_si128(wide, _mm_slli_epi32(wide, 6));
  return _mm_and_si128(_mm_or_si128(pairs, _mm_slli_epi32(pairs, 12)), _mm_set1_epi8(3));
}

// 64 codes of 3 bits as bytes, from 8 bytes of each run: two codes to a word, from the runs'
// bytes and, the last two, from the bits on top of all three.
inline void spread_threes(const uint8_t* packed, int64_t run, __m128i* out) {
  __m128i wide[4];
  for (int i = 0; i < 3; ++i)
    wide[i] = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)(packed + i * run)));
  const __m128i low = _mm_or_si128(_mm_srli_epi16(wide[0], 6), _mm_slli_epi16(wide[1], 2));
  const __m128i high =
      _mm_or_si128(_mm_and_si128(_mm_srli_epi16(wide[2], 4), _mm_set1_epi16(4)),
                   _mm_and_si128(_mm_slli_epi16(wide[2], 3), _mm_set1_epi16(1024)));
  for (int i = 0; i < 3; ++i)
    wide[i] = _mm_and_si128(_mm_or_si128(wide[i], _mm_slli_epi16(wide[i], 5)), _mm_set1_epi8(7));
  wide[3] = _mm_or_si128(_mm_and_si128(low, _mm_set1_epi8(3)), high);
  const __m128i a = _mm_unpacklo_epi16(wide[0], wide[1]), b = _mm_unpacklo_epi16(wide[2], wide[3]);
  const __m128i c = _mm_unpackhi_epi16(wide[0], wide[1]), d = _mm_unpackhi_epi16(wide[2], wide[3]);
  out[0] = _mm_unpacklo_epi32(a, b), out[1] = _mm_unpackhi_epi32(a, b);
  out[2] = _mm_unpacklo_epi32(c, d), out[3] = _mm_unpackhi_epi32(c, d);
}

// What codes are worth: themselves, or what a table says.
inline __m128i worth_of(__m128i codes, bool fixed, __m128i table) {
  return fixed ? _mm_shuffle_epi8(table, codes) : codes;
}

// `out` has room for 48 more than the row's elements: what is read past a block's end is written,
// and then overwritten by the next block.
inline void spread_blocks(const uint8_t* packed, const Rows& rows, __m128i table, uint8_t* out) {
  for (int i = 0; i < rows.inner; i = block_end(rows, i)) {
    const Threes place = threes_of(rows, i);
    __m128i codes[4];
    spread_threes(packed + place.at, place.run, codes);
    for (int j = 0; j < 4; ++j)
      _mm_storeu_si128((__m128i*)(out + i + 16 * j),
                       worth_of(codes[j], has_levels(rows.coding), table));
  }
}

// What a row's codes are worth, as bytes.
void spread(const uint8_t* packed, const Rows& rows, uint8_t* out) {
  __m128i table = _mm_setzero_si128();
  if (has_levels(rows.coding)) table = _mm_loadu_si128((const __m128i*)level_table(rows));
  if (in_blocks(rows.bits)) return spread_blocks(packed, rows, table, out);
  for (int i = 0; i < rows.inner; i += 16, packed += 2 * rows.bits) {
    const __m128i codes = is_nibble(rows.bits) ? spread_pairs<4>(packed) : spread_pairs<2>(packed);
    _mm_storeu_si128((__m128i*)(out + i), worth_of(codes, has_levels(rows.coding), table));
  }
}
#elif !defined(KVLATHE_NEON)
// Eight codes of 4 or 2 bits, from `bits` bytes.
inline uint64_t spread_eight(const uint8_t* packed, int bits) {
  uint64_t x = 0;
  std::memcpy(&x, packed, size_t(bits));
  if (is_nibble(bits)) {
    x = (x | x << 16) & 0x0000ffff0000ffffu;
    x = (x | x << 8) & 0x00ff00ff00ff00ffu;
    return (x | x << 4) & 0x0f0f0f0f0f0f0f0fu;
  }
  x = (x | x << 24) & 0x000000ff000000ffu;
  x = (x | x << 12) & 0x000f000f000f000fu;
  return (x | x << 6) & 0x0303030303030303u;
}

// Eight codes of 3 bits, from a byte of each run.
inline uint64_t spread_threes(const uint8_t* packed, int64_t run) {
  const uint64_t a = packed[0], b = packed[run], c = packed[2 * run];
  const uint64_t last = (a >> 6) | (c >> 4 & 4) | (b >> 6) << 8 | (c >> 5 & 4) << 8;
  uint64_t x = a | b << 16 | c << 32;
  x = (x | x << 5) & 0x070707070707u;
  return x | last << 48;
}

// What a row's codes are worth, as bytes.
void spread(const uint8_t* packed, const Rows& rows, uint8_t* out) {
  for (int i = 0; i < rows.inner; i += 8, out += 8) {
    const Threes place = threes_of(rows, i);
    const uint64_t x = in_blocks(rows.bits) ? spread_threes(packed + place.at, place.run)
                                            : spread_eight(packed + i / 8 * rows.bits, rows.bits);
    std::memcpy(out, &x, 8);
    for (int j = 0; has_levels(rows.coding) && j < 8; ++j) out[j] = level_table(rows)[out[j]];
  }
}
#endif

// A row of floats of 8 bits as halves, 2^8 times smaller.
inline void spread_floats(const uint8_t* codes, int count, uint8_t* out) {
  for (int i = 0; i < count; ++i) {
    const uint16_t half = small_half_of(codes[i]);
    std::memcpy(out + 2 * i, &half, sizeof half);
  }
}

// Four rows of floats times M rows of x, all sums in registers.
template <class Element, int M>
void dot4_floats(const uint8_t* const* at, int inner, const float* x, int64_t ldx, float* out,
                 int64_t ldo) {
  Floats total[M][4];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) total[m][j] = Floats{};
  }
  for (int i = 0; i < inner; i += kLanes) {
    const Floats row[4] = {Element::get(at[0], i), Element::get(at[1], i), Element::get(at[2], i),
                           Element::get(at[3], i)};
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const Floats factor = load(x + m * ldx + i);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) total[m][j] += factor * row[j];
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m)
    sums(total[m][0], total[m][1], total[m][2], total[m][3], out + m * ldo);
}

// M of them at a time; what is left, fewer.
template <class Element, int M>
void dot4_all(const uint8_t* const* at, int inner, const float* x, int64_t ldx, float* out,
              int64_t ldo, int m) {
  for (; m >= M; m -= M, x += M * ldx, out += M * ldo)
    dot4_floats<Element, M>(at, inner, x, ldx, out, ldo);
  if constexpr (M > 1) dot4_all<Element, M - 1>(at, inner, x, ldx, out, ldo, m);
}

// Rows that are floats as they lie.
template <class Element>
void dots_of_floats(const Rows& rows, const float* x, int64_t ldx, float* out, int64_t ldo, int m,
                    bool add) {
  constexpr int kMost = 4;  // results of x's rows that are copied at once
  for (int r = 0; r < rows.rows; r += 4) {
    const int count = rows.rows - r < 4 ? rows.rows - r : 4;
    fetch_ahead(rows, r, 4);
    const uint8_t* at[4];
    for (int j = 0; j < 4; ++j) at[j] = rows.data + (r + (j < count ? j : count - 1)) * rows.stride;
    if (count == 4 && !add) {
      dot4_all<Element, kDotRows>(at, rows.inner, x, ldx, out + r, ldo, m);
      continue;
    }
    for (int i = 0; i < m; i += kMost) {
      float result[kMost][4];
      const int together = m - i < kMost ? m - i : kMost;
      dot4_all<Element, kDotRows>(at, rows.inner, x + i * ldx, ldx, result[0], 4, together);
      for (int k = 0; k < together; ++k) {
        float* to = out + (i + k) * ldo + r;
        for (int j = 0; j < count; ++j) to[j] = add ? to[j] + result[k][j] : result[k][j];
      }
    }
  }
}

// Four rows of codes (those past the last repeat it) times M rows of x.
template <class Element, int M>
void dot4(const Rows& rows, const uint8_t* const* at, const uint16_t* const* meta, const float* x,
          int64_t ldx, const float* sums_of_x, float (*out)[4]) {
  Floats total[M][4] = {};
  float constant[M][4] = {};
  for (int chunk = 0, end; chunk < rows.inner / 16; chunk = end) {
    end = group_end(rows, chunk);
    Floats part[M][4] = {};
    for (int i = 16 * chunk; i < 16 * end; i += kLanes) {
      const Floats row[4] = {Element::get(at[0], i), Element::get(at[1], i), Element::get(at[2], i),
                             Element::get(at[3], i)};
      for (int m = 0; m < M; ++m) {
        const Floats factor = load(x + m * ldx + i);
        for (int j = 0; j < 4; ++j) part[m][j] += factor * row[j];
      }
    }
    for (int j = 0; j < 4; ++j) {
      const int group = rows.group_of[chunk];
      const Affine own = affine_of(rows, meta[j], group);
      for (int m = 0; m < M; ++m) {
        total[m][j] += part[m][j] * own.scale;
        if (Element::minima) constant[m][j] += own.minimum * sums_of_x[m * 64 + group];
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    sums(total[m][0], total[m][1], total[m][2], total[m][3], out[m]);
    for (int j = 0; j < 4; ++j) out[m][j] += constant[m][j];
  }
}

template <class Element>
void dots_as(const Rows& rows, const float* x, int64_t ldx, float* out, int64_t ldo, int m,
             bool add, const float* sums_of_x) {
  for (int r = 0; r < rows.rows; r += 4) {
    const int count = rows.rows - r < 4 ? rows.rows - r : 4;
    fetch_ahead(rows, r, 4);
    const uint8_t* at[4];
    const uint16_t* meta[4];
    alignas(64) uint8_t bytes[4][Element::bytes * kMostRow + 64];
    for (int j = 0; j < 4; ++j) {
      const int row = r + (j < count ? j : count - 1);
      at[j] = rows.data + row * rows.stride;
      meta[j] = rows.meta + row * rows.meta_stride;
      if (Element::bytes == 1 && is_packed(rows.bits))
        spread(at[j], rows, bytes[j]), at[j] = bytes[j];
      if (Element::bytes == 2) spread_floats(at[j], rows.inner, bytes[j]), at[j] = bytes[j];
    }
    for (int i = 0; i < m; i += 2) {
      float result[2][4];
      const float *from = x + i * ldx, *known = sums_of_x + i * 64;
      if (i + 1 < m) {
        dot4<Element, 2>(rows, at, meta, from, ldx, known, result);
      } else {
        dot4<Element, 1>(rows, at, meta, from, ldx, known, result);
      }
      for (int k = i; k < m && k < i + 2; ++k) {
        float* to = out + k * ldo + r;
        for (int j = 0; j < count; ++j) to[j] = add ? to[j] + result[k - i][j] : result[k - i][j];
      }
    }
  }
}

void dots(const float* x, int64_t ldx, const Rows& rows, float* out, int64_t ldo, int m, bool add,
          bool again, float* scratch) {
  if (is_single(rows.bits)) return dots_of_floats<Singles>(rows, x, ldx, out, ldo, m, add);
  if (is_half(rows.bits)) return dots_of_floats<Halves>(rows, x, ldx, out, ldo, m, add);
  if (has_floats(rows.coding)) return dots_as<SmallHalves>(rows, x, ldx, out, ldo, m, add, scratch);
#if defined(__AVX2__) || defined(KVLATHE_NEON)
  integer_dots(x, ldx, rows, out, ldo, m, add, again, scratch);
#else
  for (int i = 0; i < m && !again; ++i) {
    for (int chunk = 0, end; chunk < rows.inner / 16; chunk = end) {
      end = group_end(rows, chunk);
      Floats total{};
      for (int j = 16 * chunk; j < 16 * end; j += kLanes) total += load(x + i * ldx + j);
      scratch[i * 64 + rows.group_of[chunk]] = sum(total);
    }
  }
  dots_as<ByteCodes>(rows, x, ldx, out, ldo, m, add, scratch);
#endif
}

// One row of codes, spread as Element loads them, as floats.
template <class Element>
inline void unpack_row(const Rows& rows, const uint8_t* row, const uint16_t* meta, float* to) {
  for (int chunk = 0; chunk < rows.inner / 16; ++chunk) {
    const Affine own = affine_of(rows, meta, rows.group_of[chunk]);
    const Floats scale = all(own.scale), minimum = all(own.minimum);
    for (int i = 16 * chunk; i < 16 * (chunk + 1); i += kLanes) {
      const Floats scaled = Element::get(row, i) * scale;
      store(to + i, Element::minima ? scaled + minimum : scaled);
    }
  }
}

const float* unpack(const Rows& rows, float* out, int64_t* ld) {
  if (is_single(rows.bits)) {
    *ld = rows.stride / 4;
    return reinterpret_cast<const float*>(rows.data);
  }
  *ld = rows.inner;
  alignas(64) uint8_t bytes[SmallHalves::bytes * kMostRow + 64];
  for (int r = 0; r < rows.rows; ++r) {
    const uint8_t* row = rows.data + r * rows.stride;
    const uint16_t* meta = rows.meta + r * rows.meta_stride;
    float* to = out + int64_t{r} * rows.inner;
    if (is_half(rows.bits)) {
      for (int i = 0; i < rows.inner; i += kLanes) store(to + i, Halves::get(row, i));
    } else if (has_floats(rows.coding)) {
      spread_floats(row, rows.inner, bytes);
      unpack_row<SmallHalves>(rows, bytes, meta, to);
    } else {
      if (is_packed(rows.bits)) spread(row, rows, bytes), row = bytes;
      unpack_row<ByteCodes>(rows, row, meta, to);
    }
  }
  return out;
}

// A few rows at a time: between them the next slab is fetched.
void mix_of_halves(const float* x, int64_t ldx, const Rows& rows, float* out, int64_t ldo, int m,
                   bool add) {
  constexpr int kTogether = 16;
  const auto* halves = reinterpret_cast<const uint16_t*>(rows.data);
  for (int r = 0; r < rows.rows; r += kTogether) {
    const int count = rows.rows - r < kTogether ? rows.rows - r : kTogether;
    const int64_t ldb = rows.stride / 2;
    fetch_ahead(rows, r, count);
    const Product<uint16_t> product{x + r, halves + r * ldb, out, ldx, ldb, ldo, count, add || r};
    multiply_as(product, m, rows.inner);
  }
}

void mix(const float* x, int64_t ldx, const Rows& rows, float* out, int64_t ldo, int m, bool add,
         float* scratch) {
#if defined(__AVX2__) || defined(KVLATHE_NEON)
  if (is_quantized(rows.bits) && is_whole(rows.coding))
    return integer_mix(x, ldx, rows, out, ldo, m, add, scratch);
#endif
  if (is_half(rows.bits)) return mix_of_halves(x, ldx, rows, out, ldo, m, add);
  int64_t ld;
  const float* unpacked = unpack(rows, scratch, &ld);
  multiply(x, ldx, unpacked, ld, out, ldo, m, rows.inner, rows.rows, add);
}

}  // namespace
}  // namespace kvlathe
