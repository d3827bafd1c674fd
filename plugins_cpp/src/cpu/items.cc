// The work of a step, cut into items of about equal size. The cut changes who computes what, never
// the result of a tile or of one lane's span.
#include <algorithm>

#include "cpu/step.h"

namespace kvlathe {
namespace {

constexpr int64_t kSpanBlocks = 8;  // least blocks of a decoding span: 512 tokens
constexpr int64_t kMostSpans = 32;  // of one lane and sequence
constexpr int64_t kLeastItems =
    16;  // of decoding sequences, if there are lanes enough: all threads have work
constexpr int64_t kTileRows = 256;  // queries times heads of a tile, about

}  // namespace

int64_t AttendStep::spans(int32_t b, int32_t h) const {
  return std::clamp<int64_t>(blocks(b, h, decode_view(b, h)) / kSpanBlocks, 1, kMostSpans);
}

// Into how many the lanes of a span are cut. Results do not depend on it.
int64_t AttendStep::slices() const {
  int64_t total = 0;
  for (int32_t b = 0; b < a.batch; ++b) total += queries(b) == 1 ? spans(b, 0) : 0;
  return total ? std::clamp<int64_t>(kLeastItems / total, 1, layer.head.lanes) : 1;
}

std::vector<Item> AttendStep::list_items(int64_t& floats) const {
  std::vector<Item> items;
  const int64_t cut = slices();
  for (int32_t b = 0; b < a.batch; ++b) {
    if (queries(b) > 1) {
      list_tiles(items, b);
    } else if (queries(b) == 1) {
      list_spans(items, b, cut, floats);
    }
  }
  return items;
}

// A prompt: tiles of queries, each with one lane.
void AttendStep::list_tiles(std::vector<Item>& items, int32_t b) const {
  const int64_t tile_queries = std::max<int64_t>(kTileRows / layer.head.group_size, 1);
  for (int32_t h = 0; h < layer.head.lanes; ++h) {
    for (int64_t i = 0; i < queries(b); i += tile_queries) {
      items.push_back({b, h, h + 1, i, std::min<int64_t>(i + tile_queries, queries(b)), -1});
    }
  }
}

// A decoding sequence: spans of blocks, each with several lanes that have the same blocks. Several
// spans leave softmax states, `floats` in all.
void AttendStep::list_spans(std::vector<Item>& items, int32_t b, int64_t slices,
                            int64_t& floats) const {
  const int32_t lanes = layer.head.lanes, each = int32_t((lanes + slices - 1) / slices);
  for (int32_t h = 0, next; h < lanes; h = next) {
    next = std::min<int32_t>(layer.alike(h), h + each);
    const int32_t first = layer.order[h];
    const int64_t all = blocks(b, first, decode_view(b, first)), count = spans(b, first);
    for (int64_t i = 0; i < count; ++i) {
      items.push_back(
          {b, h, next, all * i / count, all * (i + 1) / count, count > 1 ? floats : -1});
      if (count > 1) floats += state_floats(items.back());
    }
  }
}

int64_t AttendStep::state_floats(const Item& item) const {
  int64_t total = 0;
  for (int32_t i = item.lane; i < item.lane_end; ++i)
    total += SoftmaxState::floats(layer.head.group_size, layer.lanes[layer.order[i]].rank_v);
  return total;
}

}  // namespace kvlathe
