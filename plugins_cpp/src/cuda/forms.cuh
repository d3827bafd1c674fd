// K and V of every form as 16-bit rows, for kernels that multiply those. A warp takes 16 tokens of
// one lane from shared memory to shared memory.
#pragma once

#include "common/float8.h"
#include "common/formats.h"
#include "cuda/device.cuh"

namespace kvlathe::cuda {

// A group's scale and minimum. take<i> gives codes 2 i and 2 i + 1 of four as 16-bit elements,
// scale * code + minimum.
template <class E>
struct Dequantizer;

// A byte under 0x64 is the half 1024 + byte, so no conversion is needed. It is rounded once.
template <>
struct Dequantizer<Half> {
  uint32_t scale, minimum;
  __device__ explicit Dequantizer(uint32_t meta)
      : scale(picked_bytes(meta, 0, 0x1010)), minimum(picked_bytes(meta, 0, 0x3232)) {}
  template <int i>
  __device__ uint32_t take(uint32_t codes) const {
    const uint32_t code = picked_bytes(codes, 0x64646464, i ? 0x4342 : 0x4140);
    return fma_halves(sub_halves(code, 0x64006400), scale, minimum);
  }
};

// A byte in the fraction of a float is 32768 + byte. The minimum takes 32768 * scale off again,
// which costs 2^-9 of a step.
template <>
struct Dequantizer<Bfloat> {
  float scale, minimum;
  __device__ explicit Dequantizer(uint32_t meta) {
    scale = Half::widen(uint16_t(meta)),
    minimum = fmaf(-32768.f, scale, Half::widen(uint16_t(meta >> 16)));
  }
  template <int i>
  __device__ uint32_t take(uint32_t codes) const {
    const float a = __uint_as_float(picked_bytes(codes, 0x47000000, 0x7404 | 2 * i << 4));
    const float b = __uint_as_float(picked_bytes(codes, 0x47000000, 0x7404 | (2 * i + 1) << 4));
    return Bfloat::pack(fmaf(a, scale, minimum), fmaf(b, scale, minimum));
  }
};

// Loads eight codes, and gives each a byte.
template <int kBits>
__device__ __forceinline__ void load_codes(uint32_t (&codes)[2], uint32_t from) {
  if constexpr (kBits == 8) {
    load_vector(codes, from);
  } else {
    uint32_t even, odd;
    if constexpr (kBits == 4) {
      const uint32_t x = load_word(from);
      even = x & 0x0f0f0f0f, odd = x >> 4 & 0x0f0f0f0f;
    } else {
      uint32_t x = __byte_perm(load_half(from), 0, 0x4140);
      x = (x | x << 4) & 0x0f0f0f0f;  // two codes a byte
      even = x & 0x03030303, odd = x >> 2 & 0x03030303;
    }
    codes[0] = __byte_perm(even, odd, 0x5140), codes[1] = __byte_perm(even, odd, 0x7362);
  }
}

// K or V of one lane, in shared memory.
struct FormRows {
  uint32_t codes, meta;  // of the first token
  FormSide side;
  int rank, groups;  // groups_of
  int row_tokens;    // along the tokens: of a channel's row of codes
};

// Where rows go: piece c (eight channels) of row r to base + r * row + (c ^ turn of r) * piece.
struct RowsPlace {
  uint32_t base;
  int row, piece;   // bytes
  int shift, mask;  // the turn: r >> shift & mask

  __device__ uint32_t at(int r, int c) const {
    return base + r * row + (c ^ (r >> shift & mask)) * piece;
  }
};

// Eight codes of 3 bits, a byte of each run (kvlathe/plan/packing.py), as a byte each.
__device__ inline void load_threes(uint32_t (&codes)[2], uint32_t from, int run) {
  const uint32_t x = shared_at<const uint8_t>(from) | shared_at<const uint8_t>(from + run) << 8 |
                     shared_at<const uint8_t>(from + 2 * run) << 16;
  const uint32_t even = x & 0x070707, odd = x >> 3 & 0x070707;    // codes 0 2 4 and 1 3 5
  const uint32_t low = x >> 6 & 0x0303, high = x >> 22 & 0x3;     // of codes 6 and 7
  const uint32_t last = low | (high & 1) << 2 | (high & 2) << 9;  // codes 6 and 7
  codes[0] = __byte_perm(even, odd, 0x5140);
  codes[1] = __byte_perm(even, odd, 0x7762) | last << 16;
}

// Eight codes of a row of `count`, from code `code` on, each as a byte.
template <int kBits>
__device__ __forceinline__ void load_row_codes(uint32_t (&codes)[2], uint32_t row, int code,
                                               int count) {
  if constexpr (kBits == 3) {
    const Threes place = threes_at(code, count);
    load_threes(codes, row + int(place.at), int(place.run));
  } else {
    load_codes<kBits>(codes, row + code * kBits / 8);
  }
}

// Turns four codes into the levels that they stand for.
template <int kBits>
__device__ __forceinline__ uint32_t levels_of_codes(uint32_t codes) {
  constexpr uint32_t a = normal_levels(kBits, 0), b = normal_levels(kBits, 1),
                     c = normal_levels(kBits, 2), d = normal_levels(kBits, 3);
  uint32_t x = (codes | codes >> 4) & 0x00ff00ff;
  x = (x | x >> 8) & 0xffff;  // half a byte each: which byte of two words
  const uint32_t low = __byte_perm(a, b, x & 0x7777);
  if constexpr (kBits < 4) return low;
  return __byte_perm(low, __byte_perm(c, d, x & 0x7777), 0x3210 | (x & 0x8888) >> 1);
}

__device__ inline float value_of(const uint32_t (&codes)[2], int i, float scale, float minimum) {
  return fmaf(float(codes[i / 4] >> i % 4 * 8 & 255), scale, minimum);
}

// A row is a token: lane t takes half t / 16 of each 16 channels of token t % 16. Tokens from
// `valid` on become zeros.
template <class E, int kBits, class Place>
__device__ __forceinline__ void convert_tokens(const FormRows& from, int token, int valid,
                                               const Place& to) {
  const int row = threadIdx.x % 16, half = threadIdx.x % 32 / 16, steps = from.rank / 16;
  const int least = steps / from.groups, longer = steps - least * from.groups;
  const uint32_t codes = from.codes + (token + row) * (from.rank * kBits / 8);
  const bool fixed = kBits < 8 && from.side.fixed_levels();
  const int meta_bytes = from.side.meta_bytes<false>();
  uint32_t meta = from.meta + (token + row) * from.groups * meta_bytes;
  int step = 0;
#pragma unroll 1
  for (int group = 0; group < from.groups; ++group, meta += meta_bytes) {
    float scale = row < valid ? Half::widen(load_half(meta)) : 0.f, minimum = 0.f;
    if (fixed)
      minimum = -scale, scale *= kTwo255ths;
    else if (row < valid)
      minimum = Half::widen(load_half(meta + 2));
#pragma unroll 1
    for (const int end = step + least + (group < longer); step < end; ++step) {
      uint32_t x[2], y[4];
      load_row_codes<kBits>(x, codes, 16 * step + 8 * half, from.rank);
      if constexpr (kBits < 8) {
        if (fixed) x[0] = levels_of_codes<kBits>(x[0]), x[1] = levels_of_codes<kBits>(x[1]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        y[i] = E::pack(value_of(x, 2 * i, scale, minimum), value_of(x, 2 * i + 1, scale, minimum));
      shared_at<uint4>(to.at(row, 2 * step + half)) = {y[0], y[1], y[2], y[3]};
    }
  }
}

// The same of floats of 8 bits.
template <class E, class Place>
__device__ __forceinline__ void convert_floats(const FormRows& from, int token, int valid,
                                               const Place& to) {
  const int row = threadIdx.x % 16, half = threadIdx.x % 32 / 16, steps = from.rank / 16;
  const int least = steps / from.groups, longer = steps - least * from.groups;
  const uint32_t codes = from.codes + (token + row) * from.rank;
  uint32_t meta = from.meta + (token + row) * from.groups * 2;
  int step = 0;
#pragma unroll 1
  for (int group = 0; group < from.groups; ++group, meta += 2) {
    const float scale = row < valid ? Half::widen(load_half(meta)) * kFloat8Unit : 0.f;
#pragma unroll 1
    for (const int end = step + least + (group < longer); step < end; ++step) {
      uint32_t x[2], y[4];
      load_codes<8>(x, codes + 16 * step + 8 * half);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t pair = x[i / 2] >> i % 2 * 16;
        y[i] = E::pack(Half::widen(small_half_of(uint8_t(pair))) * scale,
                       Half::widen(small_half_of(uint8_t(pair >> 8))) * scale);
      }
      shared_at<uint4>(to.at(row, 2 * step + half)) = {y[0], y[1], y[2], y[3]};
    }
  }
}

// A row is a channel: a lane takes eight tokens of two channels. `group`: that of all 16 tokens.
// Eights that begin at `valid` or after it become zeros: 0 x NaN is NaN, whatever weighs it.
template <class E, int kBits, class Place>
__device__ __forceinline__ void convert_channels(const FormRows& from, int token, int group,
                                                 int valid, const Place& to) {
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < from.rank; i += 32) {
    const int channel = i & ~1, first = i % 2 * 8;
    uint32_t x[2][2];
    float scale[2], minimum[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      load_row_codes<kBits>(x[c], from.codes + (channel + c) * (from.row_tokens * kBits / 8),
                            token + first, from.row_tokens);
      uint32_t pair = 0;
      if (first < valid)
        pair = load_word(from.meta + ((channel + c) * from.groups + group) * kPairBytes);
      scale[c] = Half::widen(uint16_t(pair)), minimum[c] = Half::widen(uint16_t(pair >> 16));
    }
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      store_word(to.at(first + t, channel / 8) + channel % 8 * 2,
                 E::pack(value_of(x[0], t, scale[0], minimum[0]),
                         value_of(x[1], t, scale[1], minimum[1])));
    }
  }
}

// Elements as they are; tokens from `valid` on become zeros.
template <class Place>
__device__ inline void copy_tokens(const FormRows& from, int token, int valid, const Place& to) {
  const int row = threadIdx.x % 16, half = threadIdx.x % 32 / 16;
  const uint32_t elements = from.codes + (token + row) * from.rank * 2 + half * 16;
#pragma unroll 1
  for (int step = 0; step < from.rank / 16; ++step) {
    shared_at<uint4>(to.at(row, 2 * step + half)) =
        row < valid ? load_words(elements + 32 * step) : uint4{0, 0, 0, 0};
  }
}

// Tokens token .. token + 15 of `from`, of which the first `valid` exist. `group`: along the
// tokens, that of all 16. Whole warp. Place: RowsPlace, or what has its at(). kFloat8: it may be
// floats of 8 bits.
template <class E, bool kFloat8, class Place>
__device__ __forceinline__ void convert_form(const FormRows& from, int token, int group, int valid,
                                             const Place& to) {
  if (is_half(from.side.bits)) return copy_tokens(from, token, valid, to);
  if constexpr (kFloat8) {
    if (from.side.float8()) return convert_floats<E>(from, token, valid, to);
  }
  const auto convert = [&](auto bits) {
    constexpr int kBits = decltype(bits)::value;
    if (from.side.by_channel())
      convert_channels<E, kBits>(from, token, group, valid, to);
    else
      convert_tokens<E, kBits>(from, token, valid, to);
  };
  using std::integral_constant;
  switch (from.side.bits) {
    case 8: convert(integral_constant<int, 8>{}); break;
    case 4: convert(integral_constant<int, 4>{}); break;
    case 3: convert(integral_constant<int, 3>{}); break;
    case 2: convert(integral_constant<int, 2>{}); break;
  }
}

}  // namespace kvlathe::cuda
