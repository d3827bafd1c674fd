// Rows of codes below 8 bits as bytes, on NEON. Included by read_codes.h only.
//
// 16 codes at a time: a table names the byte of each code, another its shift. The last two of eight
// 3-bit codes lie in two bytes each, so theirs are looked up twice.
#pragma once

#include <arm_neon.h>

#include "cpu/rows_ahead.h"

namespace kvlathe {
namespace {

// Of 16 codes: of which byte, how many bits up, which bits then count.
struct Cut {
  uint8_t byte[16];
  int8_t up[16];
  uint8_t bits[16];

  uint8x16_t of(uint8x16_t packed) const {
    const uint8x16_t own = vqtbl1q_u8(packed, vld1q_u8(byte));
    return vandq_u8(vshlq_u8(own, vld1q_s8(up)), vld1q_u8(bits));
  }
};

// Of codes in one run, from 2 `bits` bytes.
constexpr Cut cut_of(int bits) {
  Cut cut{};
  for (int i = 0; i < 16; ++i) {
    const int each = 8 / bits;
    cut.byte[i] = uint8_t(i / each), cut.up[i] = int8_t(-(i % each * bits));
    cut.bits[i] = uint8_t((1 << bits) - 1);
  }
  return cut;
}

// Of 3-bit codes, from two bytes of each run: what lies in one byte, and the top bits of the others.
constexpr Cut cut_of_threes(bool tops) {
  Cut cut{};
  for (int i = 0; i < 16; ++i) {
    const int code = i % 8, last = code - 6;
    const int run = tops ? 2 : code < 6 ? code / 2 : last;
    const int shift = tops ? 4 + last : code < 6 ? code % 2 * 3 : 6;
    cut.byte[i] = uint8_t(2 * run + i / 8), cut.up[i] = int8_t(-shift);
    cut.bits[i] = uint8_t(code < 6 ? (tops ? 0 : 7) : (tops ? 4 : 3));
  }
  return cut;
}

constexpr Cut kTwos = cut_of(2), kFours = cut_of(4), kThrees = cut_of_threes(false),
              kTops = cut_of_threes(true);

// 2 `bits` bytes, of each run two.
inline uint8x16_t bytes_of_sixteen(const uint8_t* packed, const Rows& rows, int i) {
  uint8_t bytes[16] = {};
  if (in_blocks(rows.bits)) {
    const Threes place = threes_of(rows, i);
    for (int run = 0; run < 3; ++run)
      std::memcpy(bytes + 2 * run, packed + place.at + run * place.run, 2);
  } else {
    std::memcpy(bytes, packed + i / 8 * rows.bits, 2 * rows.bits);
  }
  return vld1q_u8(bytes);
}

// What a row's codes are worth, as bytes.
void spread(const uint8_t* packed, const Rows& rows, uint8_t* out) {
  const uint8x16_t table = vld1q_u8(level_table(rows));
  const Cut& cut = is_nibble(rows.bits) ? kFours : is_crumb(rows.bits) ? kTwos : kThrees;
  for (int i = 0; i < rows.inner; i += 16) {
    const uint8x16_t bytes = bytes_of_sixteen(packed, rows, i);
    uint8x16_t codes = cut.of(bytes);
    if (in_blocks(rows.bits)) codes = vorrq_u8(codes, kTops.of(bytes));
    vst1q_u8(out + i, has_levels(rows.coding) ? vqtbl1q_u8(table, codes) : codes);
  }
}

}  // namespace
}  // namespace kvlathe
