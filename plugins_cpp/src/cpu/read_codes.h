// Products with rows of K or V as they lie in a page, and those rows as floats. Included by
// kernels.cc only.
//
// Floats multiply as they are. Codes of one group share (scale, minimum), which leave the sum:
//     sum x (scale code + minimum) = scale sum x code + minimum sum x.
// AVX-512 VNNI multiplies codes as integers instead (integer.h, integer_mix.h).
#pragma once

#include <cstring>

#include "common/formats.h"
#include "cpu/products.h"
#include "cpu/rows_ahead.h"

#if defined(__AVX512VNNI__)
#include "cpu/integer_mix.h"
#endif

namespace kvlathe {
namespace {

struct Singles {
  static constexpr bool quantized = false;
  static Floats get(const uint8_t* row, int i) {
    return load(reinterpret_cast<const float*>(row) + i);
  }
};
struct Halves {
  static constexpr bool quantized = false;
  static Floats get(const uint8_t* row, int i) {
    return load_half(reinterpret_cast<const uint16_t*>(row) + i);
  }
};
struct Codes {
  static constexpr bool quantized = true;
  static Floats get(const uint8_t* row, int i) { return load_bytes(row + i); }
};

// Codes of 4 or 2 bits as bytes: each byte goes to a wider place, and its codes come apart by
// halves. `count`: of 16.
void spread(const uint8_t* packed, int bits, int count, uint8_t* out) {
#if defined(__AVX2__)
  for (int i = 0; i < count; i += 16, packed += 2 * bits) {
    __m128i x;
    if (bits == 4) {
      const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)packed));
      x = _mm_and_si128(_mm_or_si128(wide, _mm_slli_epi16(wide, 4)), _mm_set1_epi8(15));
    } else {
      const __m128i wide = _mm_cvtepu8_epi32(_mm_loadu_si32(packed)),
                    pairs = _mm_or_si128(wide, _mm_slli_epi32(wide, 6));
      x = _mm_and_si128(_mm_or_si128(pairs, _mm_slli_epi32(pairs, 12)), _mm_set1_epi8(3));
    }
    _mm_storeu_si128((__m128i*)(out + i), x);
  }
#else
  for (int i = 0; i < count; i += 8, packed += bits) {
    uint64_t x = 0;
    std::memcpy(&x, packed, size_t(bits));
    if (bits == 4) {
      x = (x | x << 16) & 0x0000ffff0000ffffu;
      x = (x | x << 8) & 0x00ff00ff00ff00ffu;
      x = (x | x << 4) & 0x0f0f0f0f0f0f0f0fu;
    } else {
      x = (x | x << 24) & 0x000000ff000000ffu;
      x = (x | x << 12) & 0x000f000f000f000fu;
      x = (x | x << 6) & 0x0303030303030303u;
    }
    std::memcpy(out + i, &x, 8);
  }
#endif
}

// Four rows (those past the last repeat it) times M rows of x.
template <class Format, int M>
void dot4(const Rows& rows, const uint8_t* const* at, const uint16_t* const* meta, const float* x,
          int64_t ldx, const float* sums_of_x, float (*out)[4]) {
  Floats total[M][4] = {};
  float constant[M][4] = {};
  for (int chunk = 0, end; chunk < rows.inner / 16; chunk = end) {
    end = Format::quantized ? group_end(rows, chunk) : rows.inner / 16;
    Floats part[M][4] = {};
    for (int i = 16 * chunk; i < 16 * end; i += kLanes) {
      const Floats row[4] = {Format::get(at[0], i), Format::get(at[1], i), Format::get(at[2], i),
                             Format::get(at[3], i)};
      for (int m = 0; m < M; ++m) {
        const Floats factor = load(x + m * ldx + i);
        for (int j = 0; j < 4; ++j) part[m][j] += factor * row[j];
      }
    }
    for (int j = 0; j < 4; ++j) {
      const int group = rows.group_of[chunk];
      const float scale = Format::quantized ? from_half(meta[j][2 * group]) : 1.f;
      const float minimum = Format::quantized ? from_half(meta[j][2 * group + 1]) : 0.f;
      for (int m = 0; m < M; ++m) {
        total[m][j] += Format::quantized ? part[m][j] * scale : part[m][j];
        if (Format::quantized) constant[m][j] += minimum * sums_of_x[m * 64 + group];
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    sums(total[m][0], total[m][1], total[m][2], total[m][3], out[m]);
    for (int j = 0; j < 4; ++j) out[m][j] += constant[m][j];
  }
}

template <class Format>
void dots_as(const Rows& rows, const float* x, int64_t ldx, float* out, int64_t ldo, int m,
             bool add, const float* sums_of_x) {
  for (int r = 0; r < rows.rows; r += 4) {
    const int count = rows.rows - r < 4 ? rows.rows - r : 4;
    fetch_ahead(rows, r, 4);
    const uint8_t* at[4];
    const uint16_t* meta[4];
    uint8_t bytes[4][kMostRow];
    for (int j = 0; j < 4; ++j) {
      const int row = r + (j < count ? j : count - 1);
      at[j] = rows.data + row * rows.stride;
      meta[j] = rows.meta + row * rows.meta_stride;
      if (is_packed(rows.bits)) spread(at[j], rows.bits, rows.inner, bytes[j]), at[j] = bytes[j];
    }
    for (int i = 0; i < m; i += 2) {
      float result[2][4];
      const float *from = x + i * ldx, *known = sums_of_x + i * 64;
      if (i + 1 < m) {
        dot4<Format, 2>(rows, at, meta, from, ldx, known, result);
      } else {
        dot4<Format, 1>(rows, at, meta, from, ldx, known, result);
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
  if (rows.bits == 32) return dots_as<Singles>(rows, x, ldx, out, ldo, m, add, scratch);
  if (rows.bits == 16) return dots_as<Halves>(rows, x, ldx, out, ldo, m, add, scratch);
#if defined(__AVX512VNNI__)
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
  dots_as<Codes>(rows, x, ldx, out, ldo, m, add, scratch);
#endif
}

const float* unpack(const Rows& rows, float* out, int64_t* ld) {
  if (rows.bits == 32) {
    *ld = rows.stride / 4;
    return reinterpret_cast<const float*>(rows.data);
  }
  *ld = rows.inner;
  uint8_t bytes[kMostRow];
  for (int r = 0; r < rows.rows; ++r) {
    const uint8_t* row = rows.data + r * rows.stride;
    float* to = out + int64_t{r} * rows.inner;
    if (rows.bits == 16) {
      for (int i = 0; i < rows.inner; i += kLanes) store(to + i, Halves::get(row, i));
      continue;
    }
    if (is_packed(rows.bits)) spread(row, rows.bits, rows.inner, bytes), row = bytes;
    const uint16_t* meta = rows.meta + r * rows.meta_stride;
    for (int chunk = 0; chunk < rows.inner / 16; ++chunk) {
      const Floats scale = all(from_half(meta[2 * rows.group_of[chunk]])),
                   minimum = all(from_half(meta[2 * rows.group_of[chunk] + 1]));
      for (int i = 16 * chunk; i < 16 * (chunk + 1); i += kLanes)
        store(to + i, Codes::get(row, i) * scale + minimum);
    }
  }
  return out;
}

void mix(const float* x, int64_t ldx, const Rows& rows, float* out, int64_t ldo, int m, bool add,
         float* scratch) {
#if defined(__AVX512VNNI__)
  if (is_quantized(rows.bits)) return integer_mix(x, ldx, rows, out, ldo, m, add, scratch);
#endif
  int64_t ld;
  const float* unpacked = unpack(rows, scratch, &ld);
  multiply(x, ldx, unpacked, ld, out, ldo, m, rows.inner, rows.rows, add);
}

}  // namespace
}  // namespace kvlathe
