// A sequence's cached tokens as blocks of at most 64, each in one page, and where their K and V
// lie.
//
//     bucket 0  | page 7          | page 2     |      blocks 0 1 2 3 4 5 6
//     bucket 1  | page 4   |                          blocks 7 8
//
// Blocks are numbered through the buckets that hold the lane; a bucket's last block may be short.
// Those that a window hides wholly have no number.
#include <algorithm>

#include "cpu/step.h"

namespace kvlathe {
namespace {

// While `rows` are read, `next` is fetched, its metadata too where it follows at once. Long slabs
// are left to the processor.
void fetch_next(Rows& rows, const Rows& next) {
  constexpr int64_t kLong = 16384;
  const auto* meta = reinterpret_cast<const uint8_t*>(next.meta);
  int64_t size = next.rows * next.stride;
  if (size > kLong) return;
  if (is_quantized(next.bits) && meta - next.data >= size && meta - next.data < size + 128) {
    size = meta - next.data + 2 * next.rows * next.meta_stride;
  }
  rows.ahead = next.data;
  const auto count = uint32_t(rows.rows);  // divided in 32 bits: twice as fast
  rows.ahead_step = (uint32_t(size) + count - 1) / count;
}

// The first slabs of an item, while nothing is read yet.
void fetch(const Rows& rows) {
  const int64_t size = rows.rows * rows.stride;
  for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(rows.data + i, 0, 2);
}

}  // namespace

Rows AttendStep::rows(int32_t b, int32_t h, const Block& at, bool keys) const {
  const Bucket& bucket = layer.buckets[at.bucket];
  const LaneRow& row = *bucket.rows[h];
  const int32_t page_tokens = layer.head.page_tokens;
  const int64_t within = at.first % page_tokens;
  const uint8_t* start = page(b, at.bucket, at.first);
  if (keys)
    return rows_of(start, row.k, row.k_meta, row.rank_k, format_k(bucket), page_tokens, within,
                   at.count);
  Rows values = rows_of(start, row.v, row.v_meta, row_of_values(row), format_v(bucket), page_tokens,
                        within, at.count);
  (values.by_channel ? values.rows : values.inner) = row.rank_v;  // of a part of K the beginning
  return values;
}

// What queries first_query .. last_query of a sequence's step see: the window of the first, and the
// last itself.
View AttendStep::view(int32_t b, int32_t h, int64_t first_query, int64_t last_query) const {
  const Lane& lane = layer.lanes[h];
  const int64_t old = cached(b, lane.fresh);
  return {old + last_query + 1,
          lane.first_seen(sealed(b, h) + old + first_query, layer.head.page_tokens)};
}

// Of the first `tokens` tokens of a bucket, in units of `size`: those between the sink and place
// `first` of the lane.
Hidden AttendStep::gap(int32_t b, int32_t h, int32_t s, int64_t tokens, int64_t first,
                       int64_t size) const {
  const Lane& lane = layer.lanes[h];
  const int64_t offset = s == lane.fresh ? sealed(b, h) : 0;
  const int64_t count = (tokens + size - 1) / size;
  const int64_t sink = std::max<int64_t>(lane.sink - offset, 0);
  const int64_t begin = std::min((sink + size - 1) / size, count);
  return {begin, std::clamp(std::max<int64_t>(first - offset, 0) / size, begin, count)};
}

// Tokens of a block that a query does not see which sees the lane's places from `first` on.
Hidden AttendStep::hidden(int32_t b, int32_t h, const Block& at, int64_t first) const {
  const Hidden gone = gap(b, h, at.bucket, at.first + at.count, first, 1);
  return {std::max(gone.begin - at.first, int64_t{0}), gone.end - at.first};
}

// Blocks of lane h in a view.
int64_t AttendStep::blocks(int32_t b, int32_t h, const View& view) const {
  int64_t total = 0;
  for (int32_t s = 0; s < layer.head.buckets; ++s) {
    if (!layer.buckets[s].rows[h]) continue;
    const int64_t tokens = seen_tokens(b, h, s, view);
    const Hidden gone = gap(b, h, s, tokens, view.first, block);
    total += (tokens + block - 1) / block - (gone.end - gone.begin);
  }
  return total;
}

// Those numbered begin .. end - 1.
std::vector<Block>& AttendStep::list_blocks(int32_t b, int32_t h, const View& view, int64_t begin,
                                            int64_t end) const {
  thread_local std::vector<Block> list;
  list.clear();
  int64_t at = 0;
  for (int32_t s = 0; s < layer.head.buckets; ++s) {
    if (!layer.buckets[s].rows[h]) continue;
    const int64_t tokens = seen_tokens(b, h, s, view);
    const Hidden gone = gap(b, h, s, tokens, view.first, block);
    const int64_t count = (tokens + block - 1) / block - (gone.end - gone.begin);
    for (int64_t i = std::max<int64_t>(begin - at, 0); i < std::min(end - at, count); ++i) {
      const int64_t place = i < gone.begin ? i : i + gone.end - gone.begin;
      list.push_back({s, place * block, int32_t(std::min<int64_t>(block, tokens - place * block))});
    }
    at += count;
  }
  return list;
}

// Whether slabs of two blocks differ by their pages alone.
bool AttendStep::alike(const Block& a, const Block& b) const {
  const int32_t page_tokens = layer.head.page_tokens;
  return a.bucket == b.bucket && a.count == b.count && (a.first - b.first) % page_tokens == 0;
}

// The slabs of block `at`, from those of the block before it, which is alike and listed last.
void AttendStep::list_again(std::vector<Rows>& list, const Item& item, const Block& at,
                            const Block& before) const {
  const int64_t bytes =
      page(item.sequence, at.bucket, at.first) - page(item.sequence, before.bucket, before.first);
  const size_t count = 2 * size_t(item.lane_end - item.lane);
  for (size_t i = 0; i < count; ++i) {
    Rows rows = list[list.size() - count];
    rows.data += bytes;
    rows.meta += bytes / 2;
    list.push_back(rows);
  }
}

// K and V of every block and lane, in the order in which they lie in the pages: (block, lane, K
// then V).
std::vector<Rows>& AttendStep::list_slabs(const Item& item,
                                          const std::vector<Block>& blocks) const {
  constexpr size_t kAhead = 2;  // slabs
  thread_local std::vector<Rows> list;
  list.clear();
  for (const Block& at : blocks) {
    if (&at != blocks.data() && alike(at, (&at)[-1])) {
      list_again(list, item, at, (&at)[-1]);
      continue;
    }
    for (int32_t i = item.lane; i < item.lane_end; ++i) {
      for (const bool keys : {true, false})
        list.push_back(rows(item.sequence, layer.order[i], at, keys));
    }
  }
  for (size_t i = 0; i < std::min(kAhead, list.size()); ++i) fetch(list[i]);
  for (size_t i = 0; i + kAhead < list.size(); ++i) fetch_next(list[i], list[i + kAhead]);
  return list;
}

}  // namespace kvlathe
