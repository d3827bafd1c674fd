// Walking through Rows: their groups, and what is fetched while they are read. Included by
// kernels.cc only.
#pragma once

#include "common/float8.h"
#include "common/formats.h"
#include "cpu/kernels.h"
#include "cpu/vector.h"

namespace kvlathe {
namespace {

// One past the last chunk of 16 elements in the group of `chunk`.
int group_end(const Rows& rows, int chunk) {
  int end = chunk + 1;
  while (end < rows.inner / 16 && rows.group_of[end] == rows.group_of[chunk]) ++end;
  return end;
}

// What turns the worth of a group's codes into elements: scale * worth + minimum.
struct Affine {
  float scale, minimum;
};

// `meta`: a row's metadata. A group of fixed levels has one half, the magnitude of the outermost. Of
// floats the scale is that of small halves (small_half_of).
inline Affine affine_of(const Rows& rows, const uint16_t* meta, int group) {
  if (has_minimum(rows.coding)) return {from_half(meta[2 * group]), from_half(meta[2 * group + 1])};
  if (has_floats(rows.coding)) return {from_half(meta[group]) * kFloat8Unit, 0.f};
  const float magnitude = from_half(meta[group]);
  return {magnitude * kTwo255ths, -magnitude};
}

// What codes of fixed levels are worth: 16 bytes.
inline const uint8_t* level_table(const Rows& rows) { return kNormal[rows.bits - 2]; }

// Of codes of 3 bits: where element i of a row begins.
inline Threes threes_of(const Rows& rows, int i) { return threes_at(rows.first + i, rows.whole); }
// One past the last element of its block.
inline int block_end(const Rows& rows, int i) {
  const int end = (rows.first + i) / kBlockCodes * kBlockCodes + kBlockCodes - rows.first;
  return end < rows.inner ? end : rows.inner;
}

// Slabs are a few memory pages long, too short for the processor's own prefetching. To the second
// level of caches: more fetches may wait there at once (measured: 1.5 to 2 times the bytes a
// second).
inline void fetch_ahead(const Rows& rows, int row, int count) {
  const uint8_t *at = rows.ahead + row * rows.ahead_step, *end = at + count * rows.ahead_step;
  for (; at < end; at += 64) __builtin_prefetch(at, 0, 2);
}

}  // namespace
}  // namespace kvlathe
