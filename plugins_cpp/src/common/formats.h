// The number formats of cached tokens: the one place where C++ and CUDA ask what a format is.
//
// A format is (bits, axis, group). 32 and 16 bits are floats, [token][rank]. 8, 4, 3 and 2 bits are
// codes, in groups of elements that share metadata:
//
//   axis rank         x = scale * code + minimum        a row is a token: [token][rank], groups along the channels
//   axis token        x = scale * code + minimum        a row is a channel: [rank][token], groups along the page's tokens
//   axis rank_normal  x = m (2 level[code] / 255 - 1)   as axis rank; levels of a table, 4, 3 or 2 bits
//   axis rank_float8  x = scale * e4m3(code)            as axis rank; 8 bits (float8.h)
//
// Metadata are IEEE halves: (scale, minimum), or m, or scale. No other file compares bits: it asks
// one of the questions here. The same facts in Python: kvlathe/plan/formats.py. A new format starts
// in these two files.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kvlathe/abi.h"

// ANYWHERE: on a GPU, too. INLINED: always, and there as well.
#if defined(__CUDACC__)
#define KVLATHE_ANYWHERE __host__ __device__
#define KVLATHE_INLINED __host__ __device__ __forceinline__
#else
#define KVLATHE_ANYWHERE
#define KVLATHE_INLINED inline __attribute__((always_inline))
#endif

namespace kvlathe {

// -- widths -----------------------------------------------------------------------------------

// Codes with metadata, or else floats.
KVLATHE_ANYWHERE constexpr bool is_quantized(int bits) { return bits < 16; }
KVLATHE_ANYWHERE constexpr bool is_single(int bits) { return bits == 32; }
KVLATHE_ANYWHERE constexpr bool is_half(int bits) { return bits == 16; }  // or bfloat16

// Of codes: below a byte one byte holds several, the first in its low bits.
KVLATHE_ANYWHERE constexpr bool is_packed(int bits) { return bits < 8; }
KVLATHE_ANYWHERE constexpr bool is_byte(int bits) { return bits == 8; }
KVLATHE_ANYWHERE constexpr bool is_nibble(int bits) { return bits == 4; }
KVLATHE_ANYWHERE constexpr bool is_crumb(int bits) { return bits == 2; }
// Codes of 3 bits lie in blocks: three runs of bytes, one byte of each holding eight codes
// (kvlathe/plan/packing.py).
KVLATHE_ANYWHERE constexpr bool in_blocks(int bits) { return bits == 3; }

KVLATHE_ANYWHERE constexpr bool is_width(int bits) {
  return is_single(bits) || is_half(bits) || is_byte(bits) || is_nibble(bits) || in_blocks(bits) ||
         is_crumb(bits);
}

// Runs body(bits) with the bits of codes as a constant.
template <class Body>
KVLATHE_INLINED void for_bits(int bits, Body body) {
  switch (bits) {
    case 8: body(std::integral_constant<int, 8>{}); break;
    case 4: body(std::integral_constant<int, 4>{}); break;
    case 3: body(std::integral_constant<int, 3>{}); break;
    case 2: body(std::integral_constant<int, 2>{}); break;
  }
}

// A block has 64 codes, a row's last one what is left.
constexpr int kBlockCodes = 64;
KVLATHE_ANYWHERE constexpr int runs_of(int bits) { return in_blocks(bits) ? 3 : 1; }
KVLATHE_ANYWHERE constexpr int codes_together(int bits) { return 8 * runs_of(bits) / bits; }

// Where code 8 t of a row of `count` begins: byte `at` of the row, `run` bytes before its second run.
struct Threes {
  int64_t at, run;
};
KVLATHE_ANYWHERE constexpr Threes threes_at(int64_t code, int64_t count) {
  const int64_t block = code / kBlockCodes, left = count - kBlockCodes * block;
  return {3 * kBlockCodes / 8 * block + code % kBlockCodes / 8,
          (left < kBlockCodes ? left : int64_t{kBlockCodes}) / 8};
}

// The largest code of even levels: the steps between a group's minimum and its maximum.
KVLATHE_ANYWHERE constexpr int levels_of(int bits) { return (1 << bits) - 1; }

// Bytes of one lane's codes (or elements) of K or V in a page.
KVLATHE_ANYWHERE constexpr int64_t slab_bytes(int64_t rank, int64_t page_tokens, int64_t bits) {
  return rank * page_tokens * bits / 8;
}

// The typed views of the cache that a graph gives the op: bits of `pools` in a layer's table.
enum PoolView { kPoolF32 = 1, kPoolF16 = 2, kPoolU8 = 4 };
constexpr PoolView kPoolViews[] = {kPoolF32, kPoolF16, kPoolU8};  // in the order of the inputs

// The views in which a format is read: the metadata of codes is halves.
constexpr int pool_views(int bits) {
  return is_single(bits) ? kPoolF32 : is_half(bits) ? kPoolF16 : kPoolU8 | kPoolF16;
}

// -- codings ----------------------------------------------------------------------------------

// How codes become numbers (DECODINGS of kvlathe/plan/formats.py).
enum class Coding : uint8_t { kAffine, kNormal, kFloat8 };

// Of codes whose groups run along such an axis (kvlathe_axis).
KVLATHE_ANYWHERE constexpr Coding coding_of(int axis) {
  return axis == KVLATHE_AXIS_RANK_NORMAL   ? Coding::kNormal
         : axis == KVLATHE_AXIS_RANK_FLOAT8 ? Coding::kFloat8
                                            : Coding::kAffine;
}
// Whether a group has a minimum beside its scale.
KVLATHE_ANYWHERE constexpr bool has_minimum(Coding coding) { return coding == Coding::kAffine; }
// Whether codes stand for the levels of a table (kNormal).
KVLATHE_ANYWHERE constexpr bool has_levels(Coding coding) { return coding == Coding::kNormal; }
// Whether codes are floats themselves (float8.h).
KVLATHE_ANYWHERE constexpr bool has_floats(Coding coding) { return coding == Coding::kFloat8; }
// Whether codes are worth whole numbers, 0 to 255: products of integers take them.
KVLATHE_ANYWHERE constexpr bool is_whole(Coding coding) { return !has_floats(coding); }
// Whether codes of so many bits are coded so.
KVLATHE_ANYWHERE constexpr bool has_width(Coding coding, int bits) {
  return has_levels(coding) ? is_packed(bits) : !has_floats(coding) || is_byte(bits);
}
// IEEE halves of a group's metadata.
KVLATHE_ANYWHERE constexpr int metadata_halves(Coding coding) {
  return has_minimum(coding) ? 2 : 1;
}

// Codes whose form is known when code for them is compiled.
template <int bits_, Coding coding_ = Coding::kAffine>
struct CodeForm {
  static constexpr int bits = bits_, runs = runs_of(bits);
  static constexpr int planes = codes_together(bits);  // codes in one byte of each run
  static constexpr bool packed = is_packed(bits), blocks = in_blocks(bits);
  static constexpr Coding coding = coding_;
  static constexpr bool levels = has_levels(coding), floats = has_floats(coding);
};

// Levels of a normal number (NORMAL and NORMAL_TOP of kvlathe/plan/formats.py), for 2, 3 and 4 bits.
constexpr uint8_t kNormal[3][16] = {
    {0, 89, 166, 255},
    {0, 48, 83, 113, 142, 172, 207, 255},
    {0, 31, 52, 69, 84, 97, 109, 122, 133, 146, 158, 171, 186, 203, 224, 255},
};
// Four levels of the normal (kNormal), from 4 i on.
KVLATHE_ANYWHERE constexpr uint32_t normal_levels(int bits, int i) {
  uint32_t word = 0;
  for (int k = 0; k < 4; ++k) word |= uint32_t(kNormal[bits - 2][4 * i + k]) << 8 * k;
  return word;
}

constexpr int kFits = 5;  // FITS of kvlathe/plan/codec.py
constexpr float kTwo255ths = 2.f / 255.f;
constexpr double kNormalTop[3] = {1.5104176, 2.1519457, 2.7325896};

// Metadata of a group with a minimum.
constexpr int kPairBytes = 4;

// The sum of a group's codes, where a format stores it: in as many bytes as the largest sum takes.
inline int sum_bytes(int bits, int group) {
  int log = 0;
  while ((1 << log) < group) ++log;
  return (bits + log + 7) / 8;
}

// Sums lie behind the metadata of `groups` groups, at the next multiple of 128 bytes.
inline int64_t sums_at(int64_t meta, int64_t groups) {
  return meta + (kPairBytes * groups + 127) / 128 * 128;
}

// Groups along the rank: near-equal multiples of 16 channels (groups_along_rank of
// kvlathe/plan/formats.py). The first `extra` have steps + 1 times 16 channels, the others steps
// times 16.
struct RankGroups {
  int count, steps, extra;

  RankGroups(int rank, int group)
      : count((rank + group - 1) / group), steps(rank / 16 / count), extra(rank / 16 % count) {}

  // Of channels 16 step .. 16 step + 15.
  int of_step(int step) const {
    const int in_wide = extra * (steps + 1);
    return step < in_wide ? step / (steps + 1) : extra + (step - in_wide) / steps;
  }
};

// Groups along the tokens: the last one has what is left of the page.
inline int token_groups(int page_tokens, int group) { return (page_tokens + group - 1) / group; }

// How one bucket writes K, or V.
struct Format {
  int32_t bits, axis, group;

  bool quantized() const { return is_quantized(bits); }
  bool by_channel() const { return quantized() && axis == KVLATHE_AXIS_TOKEN; }
  // Of codes.
  Coding coding() const { return coding_of(axis); }
  bool fixed_levels() const { return quantized() && has_levels(coding()); }
  bool float8() const { return quantized() && has_floats(coding()); }
  int halves() const { return metadata_halves(coding()); }
  // What each code is worth; null: the code itself, or the float that it is.
  const uint8_t* table() const { return fixed_levels() ? kNormal[bits - 2] : nullptr; }
};

// The same for kernels that read every form on a GPU (cuda/forms.cuh), in few bytes. Compilers make
// the best code of comparisons that stand in its own functions.
struct FormSide {
  uint8_t bits, axis;
  uint16_t group;  // along the tokens: tokens of a group

  KVLATHE_ANYWHERE bool by_channel() const { return bits < 16 && axis == KVLATHE_AXIS_TOKEN; }
  KVLATHE_ANYWHERE bool fixed_levels() const {
    return bits < 16 && axis == KVLATHE_AXIS_RANK_NORMAL;
  }
  KVLATHE_ANYWHERE bool float8() const { return bits < 16 && axis == KVLATHE_AXIS_RANK_FLOAT8; }
  KVLATHE_ANYWHERE bool in_blocks() const { return bits == 3; }
  // Codes that become numbers as a byte each: they are bytes, or levels, or lie in blocks.
  KVLATHE_ANYWHERE bool in_bytes() const { return bits == 8 || bits == 3 || fixed_levels(); }
  // Bytes of a group's metadata. kFloat8: the kernel reads floats of 8 bits, too.
  template <bool kFloat8 = true>
  KVLATHE_ANYWHERE int meta_bytes() const {
    return bits == 16 ? 0 : fixed_levels() || (kFloat8 && float8()) ? 2 : kPairBytes;
  }
  // Bytes of the metadata of `tokens` tokens, a whole page of `page` along the tokens.
  template <bool kFloat8 = true>
  KVLATHE_ANYWHERE int meta_size(int groups, int rank, int tokens) const {
    return meta_bytes<kFloat8>() * groups * (by_channel() ? rank : tokens);
  }
};

inline FormSide side_of(const Format& format) {
  return {uint8_t(format.bits), uint8_t(format.axis), uint16_t(format.group)};
}

// Groups of a token along the rank, or of a channel along the tokens of a page; 1 where there are
// none.
inline int groups_of(const Format& format, int rank, int page_tokens) {
  if (!format.quantized()) return 1;
  if (format.by_channel()) return token_groups(page_tokens, format.group);
  return RankGroups(rank, format.group).count;
}

// Of a kvlathe_part, or of a bucket in a layer's table.
template <class Bucket>
Format format_k(const Bucket& bucket) {
  return {bucket.bits_k, bucket.axis_k, bucket.group_k};
}
template <class Bucket>
Format format_v(const Bucket& bucket) {
  return {bucket.bits_v, bucket.axis_v, bucket.group_v};
}
template <class Bucket>
bool any_quantized(const Bucket& bucket) {
  return is_quantized(bucket.bits_k) || is_quantized(bucket.bits_v);
}

}  // namespace kvlathe
