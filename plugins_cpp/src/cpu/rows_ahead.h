// Walking through Rows: their groups, and what is fetched while they are read. Included by
// kernels.cc only.
#pragma once

#include "cpu/kernels.h"

namespace kvlathe {
namespace {

// One past the last chunk of 16 elements in the group of `chunk`.
int group_end(const Rows& rows, int chunk) {
  int end = chunk + 1;
  while (end < rows.inner / 16 && rows.group_of[end] == rows.group_of[chunk]) ++end;
  return end;
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
