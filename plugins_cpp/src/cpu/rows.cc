#include "cpu/rows.h"

namespace kvlathe {
namespace {

// Groups run along the page's tokens: a row is a channel.
void by_channel(Rows& rows, const Format& format, int32_t rank, int64_t page_tokens, int64_t within,
                int32_t count) {
  rows.by_channel = true;
  rows.rows = rank, rows.inner = (count + 15) / 16 * 16;
  rows.stride = page_tokens * format.bits / 8,
  rows.meta_stride = 2 * token_groups(int(page_tokens), format.group);
  rows.first = int16_t(within), rows.whole = int16_t(page_tokens);
  if (!in_blocks(format.bits)) rows.data += within * format.bits / 8;
  for (int j = 0; j < rows.inner / 16; ++j)
    rows.group_of[j] = uint8_t((within + 16 * j) / format.group);
}

// Groups run along the rank: near-equal multiples of 16 channels (groups_along_rank of
// kvlathe/plan/formats.py).
void along_rank(Rows& rows, const Format& format, int32_t rank, int64_t within) {
  const RankGroups groups(rank, format.group);
  rows.whole = int16_t(rank);
  rows.coding = format.coding();
  rows.meta_stride = format.halves() * groups.count;
  rows.meta += within * rows.meta_stride;
  for (int step = 0, group = 0; group < groups.count; ++group) {
    const int end = step + groups.steps + (group < groups.extra);
    while (step < end) rows.group_of[step++] = uint8_t(group);
  }
}

}  // namespace

Rows rows_of(const uint8_t* page, int64_t data, int64_t meta, int32_t rank, const Format& format,
             int64_t page_tokens, int64_t within, int32_t count) {
  Rows rows{};
  rows.bits = int16_t(format.bits);
  rows.data = page + data;
  rows.meta = reinterpret_cast<const uint16_t*>(page + meta);
  if (format.by_channel()) {
    by_channel(rows, format, rank, page_tokens, within, count);
    return rows;
  }
  rows.rows = count, rows.inner = rank;
  rows.stride = int64_t{rank} * format.bits / 8;
  rows.data += within * rows.stride;
  if (format.quantized()) along_rank(rows, format, rank, within);
  return rows;
}

}  // namespace kvlathe
