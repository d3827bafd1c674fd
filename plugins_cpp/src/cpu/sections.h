// What integer products with codes share on every instruction set: how the elements of a row are cut
// into sections and pieces, and the integer form of x. Included by kernels.cc only.
//
// x becomes a 15-bit integer, 128 * high + low with both in a signed byte: x ~ unit * (128 high +
// low). Per group of a row
//     sum x (scale code + minimum) = scale unit (128 sum high code + sum low code) + minimum sum x,
// so its error is that of x alone, at most max |x| / 32512 an element.
//
// Codes are taken in pieces of 16 bytes, those of 3 bits in blocks. Codes below 8 bits are not
// unpacked: the first ones of all bytes are a mask away, the next ones a shift and a mask, and x
// lies in that order. Then levels are looked up in their table.
#pragma once

#include "common/formats.h"
#include "cpu/rows_ahead.h"

namespace kvlathe {
namespace {

constexpr int kSections = 64;  // of a row, at most: ranks are at most 1024, groups multiples of 16
constexpr int kMostTogether = 128;  // elements of a section, at most: what 16 bits hold (Narrow)

// What is added up as integers: one group, or a part of a very long one.
struct Section {
  int start, end;  // elements
  int group;
  int first, pieces;  // of x, counted over all sections
};

// One row of x: for each piece its elements in the order of planes (those that are first in a byte,
// those that are second ...), zeros past the section. Sized by kDotScratch.
struct Prepared {
  alignas(64) int8_t high[64 * kSections + 64], low[64 * kSections + 64];
  float sums[kSections];  // of x in each section
  float unit;
};
static_assert(sizeof(Prepared) <= kDotScratch * sizeof(float), "kDotScratch is too small");

// Pieces that hold the elements start .. stop - 1.
inline int pieces_of(const Rows& rows, int start, int stop) {
  if (in_blocks(rows.bits))
    return (rows.first + stop + kBlockCodes - 1) / kBlockCodes - (rows.first + start) / kBlockCodes;
  return ((stop - start) * rows.bits + 127) / 128;
}

int sections_of(const Rows& rows, Section* out) {
  int count = 0, pieces = 0;
  for (int chunk = 0, end; chunk < rows.inner / 16; chunk = end) {
    end = group_end(rows, chunk);
    for (int start = 16 * chunk; start < 16 * end; start += kMostTogether) {
      const int stop = 16 * end < start + kMostTogether ? 16 * end : start + kMostTogether,
                size = pieces_of(rows, start, stop);
      out[count++] = {start, stop, rows.group_of[chunk], pieces, size};
      pieces += size;
    }
  }
  return count;
}

// Calls `body` with the CodeForm of `rows`: those that are worth whole numbers.
template <class Body>
inline void with_codes(const Rows& rows, Body body) {
  for_bits(rows.bits, [&](auto bits) {
    if constexpr (has_width(Coding::kNormal, bits)) {
      if (has_levels(rows.coding)) return body(CodeForm<bits, Coding::kNormal>{});
    }
    body(CodeForm<bits>{});
  });
}

}  // namespace
}  // namespace kvlathe
