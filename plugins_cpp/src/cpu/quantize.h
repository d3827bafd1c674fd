// Writing rows into a page: floats, and codes with their (scale, minimum) to the bit of
// kvlathe/plan/codec.py. Included by kernels.cc only.
#pragma once

#include "common/float8.h"
#include "common/formats.h"
#include "common/hash.h"
#include "cpu/rows_ahead.h"
#include "cpu/vector.h"

namespace kvlathe {
namespace {

void store_row(const float* src, const float* centre, int n, int bits, void* dst) {
  for (int i = 0; i < n; i += kLanes) {
    const Floats x = centre ? load(src + i) - load(centre + i) : load(src + i);
    if (is_single(bits)) {
      store(static_cast<float*>(dst) + i, x);
    } else {
      store_half(static_cast<uint16_t*>(dst) + i, x);
    }
  }
}

// A byte of each run from eight codes of 3 bits (kvlathe/plan/packing.py).
inline void pack_threes(const uint8_t* codes, int64_t run, uint8_t* out) {
  for (int i = 0; i < 3; ++i) out[i * run] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 3);
  out[0] |= uint8_t(codes[6] << 6);
  out[run] |= uint8_t(codes[7] << 6);
  out[2 * run] |= uint8_t(codes[6] >> 2 << 6 | codes[7] >> 2 << 7);
}

void pack(const uint8_t* codes, const Rows& rows, uint8_t* out) {
  const int each = codes_together(rows.bits);
  for (int i = 0; i < rows.inner; i += each, codes += each) {
    if (in_blocks(rows.bits)) {
      const Threes place = threes_of(rows, i);
      pack_threes(codes, place.run, out + place.at);
      continue;
    }
    int byte = 0;
    for (int j = 0; j < each; ++j) byte |= codes[j] << (rows.bits * j);
    out[i / each] = uint8_t(byte);
  }
}

// Noise in [0, 1) of kLanes elements from the hashes of their tokens and their channels.
inline Floats noise_of(UnsignedInts token, UnsignedInts channel) {
  const Ints bits = (Ints)(hashed(token, channel) >> 8);
  return __builtin_convertvector(bits, Floats) * 5.9604644775390625e-8f;
}

// floor(x + noise), exactly: the part behind the point and 1 - noise have no rounding error.
inline Floats drawn(Floats x, Floats noise) {
  const Floats whole = __builtin_convertvector(__builtin_convertvector(x, Ints), Floats);
  return x - whole >= 1.f - noise ? whole + 1.f : whole;
}

// (scale, minimum) of elements begin .. end - 1 as halves, without contraction: they are
// kvlathe/plan/codec.py's to the bit.
void choose_pair(const float* x, int begin, int end, float levels, const QuantizeOptions& options,
                 uint16_t* pair) {
  Floats low = load(x + begin), high = low;
  for (int i = begin; i < end; i += kLanes)
    low = -larger(-low, -load(x + i)), high = larger(high, load(x + i));
  const float least = -largest(-low), width = largest(high) - least;
  volatile float below = width * options.edge;
  pair[0] = to_half(width * options.span / levels);
  pair[1] = to_half(least + below);
}

typedef double Doubles __attribute__((vector_size(8 * kLanes)));

inline double sum(const Doubles& x) {
  double total = 0;
  for (int i = 0; i < kLanes; ++i) total += x[i];
  return total;
}

// Codes of fixed levels for the magnitude of one group of n elements, and the magnitude that fits
// them best. Sums are double, so that the order of adding decides nothing.
double fit_codes(const float* x, int n, const Rows& rows, float magnitude, uint8_t* codes) {
  constexpr float round = 12582912.f;  // adding it rounds to an integer
  const int most = levels_of(rows.bits);
  const uint8_t* table = level_table(rows);
  const float scale = magnitude * kTwo255ths;
  Doubles along{}, squares{};
  for (int i = 0; i < n; i += kLanes) {
    const Floats own = load(x + i);
    Floats exact{}, code{}, worth{};
    if (scale > 0) exact = (own + magnitude) / scale;
    exact = -larger(-larger(exact, Floats{}), all(-255.f)) + round - round;
    for (int level = 0; level < most; ++level) {
      const float low = table[level], high = table[level + 1];
      const auto above = 2 * exact > all(low + high);
      code = above ? all(float(level + 1)) : code;
      worth = above ? all(high) : worth;
    }
    store_bytes(codes + i, code);
    const Doubles level = __builtin_convertvector(worth, Doubles) - 127.5;
    along += __builtin_convertvector(own, Doubles) * level;
    squares += level * level;
  }
  const double best = 127.5 * sum(along) / sum(squares);
  return best < 0 ? -best : best;
}

// Fixed levels: one magnitude a group, of least squared error (Part._fitted of
// kvlathe/plan/codec.py).
void quantize_fixed(const float* x, int64_t ldx, const Rows& rows) {
  uint8_t codes[kMostRow];
  for (int r = 0; r < rows.rows; ++r, x += ldx) {
    auto* meta = const_cast<uint16_t*>(rows.meta + r * rows.meta_stride);
    for (int chunk = 0, end; chunk < rows.inner / 16; chunk = end) {
      end = group_end(rows, chunk);
      const float* from = x + 16 * chunk;
      const int n = 16 * (end - chunk);
      Doubles energy{};
      for (int i = 0; i < n; i += kLanes) {
        const Doubles wide = __builtin_convertvector(load(from + i), Doubles);
        energy += wide * wide;
      }
      double magnitude = kNormalTop[rows.bits - 2] * __builtin_sqrt(sum(energy) / n);
      for (int fit = 0; fit < kFits; ++fit) {
        uint16_t& half = meta[rows.group_of[chunk]];
        half = to_half(float(magnitude));
        magnitude = fit_codes(from, n, rows, from_half(half), codes + 16 * chunk);
      }
    }
    pack(codes, rows, const_cast<uint8_t*>(rows.data) + r * rows.stride);
  }
}

// Floats of 8 bits: the least scale with which no element of a group is beyond the largest code.
void quantize_floats(const float* x, int64_t ldx, const Rows& rows) {
  for (int r = 0; r < rows.rows; ++r, x += ldx) {
    auto* meta = const_cast<uint16_t*>(rows.meta + r * rows.meta_stride);
    auto* codes = const_cast<uint8_t*>(rows.data) + r * rows.stride;
    for (int chunk = 0, end; chunk < rows.inner / 16; chunk = end) {
      end = group_end(rows, chunk);
      Floats most{};
      for (int i = 16 * chunk; i < 16 * end; i += kLanes)
        most = larger(most, larger(load(x + i), -load(x + i)));
      const float wanted = largest(most) / kFloat8Top;
      uint16_t& half = meta[rows.group_of[chunk]];
      half = to_half(wanted);
      half = least_half(wanted, half, from_half(half));
      const float scale = from_half(half);
      for (int i = 16 * chunk; i < 16 * end; ++i)
        codes[i] = scale > 0 ? float8_of(x[i] / scale) : 0;
    }
  }
}

// The codes are chosen for the scale and minimum as halves, as kvlathe/plan/codec.py does.
void quantize(const float* x, int64_t ldx, const Rows& rows, const QuantizeOptions& options) {
  if (has_levels(rows.coding)) return quantize_fixed(x, ldx, rows);
  if (has_floats(rows.coding)) return quantize_floats(x, ldx, rows);
  const float levels = float(levels_of(rows.bits)), round = 12582912.f;
  UnsignedInts count_up;
  for (int i = 0; i < kLanes; ++i) count_up[i] = uint32_t(i);
  uint8_t* next_sum = options.sums;
  uint8_t codes[kMostRow];
  for (int r = 0; r < rows.rows; ++r, x += ldx) {
    auto* meta = const_cast<uint16_t*>(rows.meta + r * rows.meta_stride);
    for (int chunk = 0, end; chunk < rows.inner / 16; chunk = end) {
      end = group_end(rows, chunk);
      uint16_t* pair = meta + 2 * rows.group_of[chunk];
      choose_pair(x, 16 * chunk, 16 * end, levels, options, pair);
      const float scale = from_half(pair[0]), minimum = from_half(pair[1]);
      for (int i = 16 * chunk; i < 16 * end; i += kLanes) {
        Floats code{};
        if (scale > 0) code = (load(x + i) - minimum) / scale;
        code = -larger(-larger(code, Floats{}), all(-levels));
        if (!options.noise) {
          code = code + round - round;
        } else if (rows.by_channel) {
          code = drawn(code, noise_of(load(options.noise + i), UnsignedInts{} + uint32_t(r)));
        } else {
          code = drawn(code, noise_of(UnsignedInts{} + options.noise[r], count_up + uint32_t(i)));
        }
        store_bytes(codes + i, code);
      }
      if (!options.sums) continue;
      uint32_t sum = 0;
      for (int i = 16 * chunk; i < 16 * end; ++i) sum += codes[i];
      for (int byte = 0; byte < options.sum_bytes; ++byte) *next_sum++ = uint8_t(sum >> (8 * byte));
    }
    pack(codes, rows, const_cast<uint8_t*>(rows.data) + r * rows.stride);
  }
}

}  // namespace
}  // namespace kvlathe
