#include "common/layer_table.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

#include "common/limits.h"
#include "kvlathe/cpu.h"

namespace kvlathe {
Layer::Layer(std::vector<int32_t> numbers) : table(std::move(numbers)) {
  require(table.size() * sizeof(int32_t) >= sizeof head, KVLATHE_BAD_ARGUMENT,
          "the layer table is too short");
  std::memcpy(&head, table.data(), sizeof head);
  require(head.version == kTableVersion, KVLATHE_BAD_VERSION,
          "the layer table has version " + std::to_string(head.version) +
              " and this library reads " + std::to_string(kTableVersion) +
              (head.version > kTableVersion ? ": build the library again (kvlathe native)"
                                            : ": build the engine again"));
  require(head.lanes >= 1 && head.lanes <= 4096 && head.buckets >= 1 && head.buckets <= 4096,
          KVLATHE_BAD_ARGUMENT, "the layer table is damaged");
  require(head.page_tokens > 0 && head.page_tokens % kRankMultiple == 0, KVLATHE_BAD_ARGUMENT,
          "page_tokens is no positive multiple of 16");
  require(head.group_size >= 1 && head.planes >= 0, KVLATHE_BAD_ARGUMENT,
          "the layer table is damaged");
  require(is_half(head.hot_bits) || is_single(head.hot_bits), KVLATHE_BAD_ARGUMENT,
          "new tokens are neither 16 nor 32 bit");
  require(table.size() * sizeof(int32_t) >=
              sizeof head + head.lanes * sizeof(LaneForm) + head.buckets * sizeof(BucketForm),
          KVLATHE_BAD_ARGUMENT, "the layer table is too short");
  read_lanes();
  read_buckets();
  place_rows();
  order.resize(lanes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t x, int32_t y) { return buckets_of(x) < buckets_of(y); });
}

std::vector<bool> Layer::buckets_of(int32_t lane) const {
  std::vector<bool> found;
  for (const Bucket& bucket : buckets) found.push_back(bucket.rows[lane]);
  return found;
}

int32_t Layer::alike(int32_t place) const {
  const auto differs = [&](int32_t lane) { return buckets_of(lane) != buckets_of(order[place]); };
  return int32_t(std::find_if(order.begin() + place, order.end(), differs) - order.begin());
}

void Layer::read_lanes() {
  const auto* forms =
      reinterpret_cast<const LaneForm*>(table.data() + sizeof head / sizeof(int32_t));
  for (int32_t h = 0; h < head.lanes; ++h) {
    Lane lane{{forms[h]}, false, q_width, k_width, v_width, o_width, 0, 0, nullptr};
    const std::string where = "the lane of head " + std::to_string(lane.head);
    require(is_rank(lane.rank_k) && is_rank(lane.rank_v), KVLATHE_BAD_ARGUMENT,
            where + " has ranks that are no multiples of 16 up to " + std::to_string(kMostRank));
    require(lane.input_dim > 0 && lane.input_dim <= head.input_dim && lane.rank_k <= head.rank_k,
            KVLATHE_BAD_ARGUMENT, where + " is too wide");
    require(lane.projected ? head.projected : lane.rank_k >= lane.input_dim, KVLATHE_BAD_ARGUMENT,
            where + " has no projection and rank_k < input_dim");
    require(lane.fresh >= 0 && lane.fresh < head.buckets, KVLATHE_BAD_ARGUMENT,
            where + " names a bucket that is not there");
    require(lane.sink >= 0 && lane.recent >= 0 && lane.exact >= 0, KVLATHE_BAD_ARGUMENT,
            where + " has a window of negative length");
    windowed = windowed || lane.recent < kNoEnd;
    if (lane.planes_at) {
      require(lane.planes_at > 0 && size_t(lane.planes_at) + lane.input_dim / 2 <= table.size(),
              KVLATHE_BAD_ARGUMENT, where + " has planes past the table");
      lane.planes = table.data() + lane.planes_at;
    }
    for (int32_t i = 0; lane.rope && i < lane.input_dim / 2; ++i) {
      const int32_t plane = lane.planes ? lane.planes[i] : i;
      require(plane >= 0 && plane < head.planes, KVLATHE_BAD_ARGUMENT,
              where + " names a plane that is not there");
    }
    q_width += int64_t{head.group_size} * lane.input_dim;
    k_width += lane.input_dim;
    v_width += lane.rank_v;
    o_width += int64_t{head.group_size} * lane.rank_v;
    widest_v = std::max(widest_v, lane.rank_v);
    lanes.push_back(lane);
  }
}

// Where a token's new K and V lie: K of all lanes, then V of those whose V is no part of their K.
void Layer::place_rows() {
  for (Lane& lane : lanes) {
    const LaneRow* fresh = buckets[lane.fresh].rows[&lane - lanes.data()];
    require(fresh, KVLATHE_BAD_ARGUMENT, "a lane is not in its fresh bucket");
    lane.values_in_keys = values_in_keys(*fresh);
    lane.rows_k_at = rows_width, rows_width += lane.rank_k;
  }
  for (Lane& lane : lanes) {
    lane.rows_v_at = lane.values_in_keys ? lane.rows_k_at : rows_width;
    if (!lane.values_in_keys) rows_width += lane.rank_v;
  }
}

void Layer::read_buckets() {
  const size_t at = (sizeof head + head.lanes * sizeof(LaneForm)) / sizeof(int32_t);
  const auto* forms = reinterpret_cast<const BucketForm*>(table.data() + at);
  for (int32_t s = 0; s < head.buckets; ++s) {
    Bucket bucket{{forms[s]}, std::vector<const LaneRow*>(lanes.size())};
    check_format(format_k(bucket));
    check_format(format_v(bucket));
    require(!bucket.fresh || (bucket.bits_k == head.hot_bits && bucket.bits_v == head.hot_bits),
            KVLATHE_BAD_ARGUMENT, "a fresh bucket is not in the hot format");
    require(bucket.page_stride >= 0 && bucket.page_stride % kOffsetBytes == 0, KVLATHE_MISALIGNED,
            "a page stride is no multiple of 128 bytes");
    require(bucket.lanes_at >= 0 && bucket.lane_count >= 0 &&
                size_t(bucket.lanes_at) + size_t(bucket.lane_count) * KVLATHE_LANE_COLUMNS <=
                    table.size(),
            KVLATHE_BAD_ARGUMENT, "a bucket's lanes lie past the table");
    for (int32_t i = 0; i < bucket.lane_count; ++i) {
      const auto* row = reinterpret_cast<const LaneRow*>(table.data() + bucket.lanes_at) + i;
      const auto lane = std::find_if(lanes.begin(), lanes.end(),
                                     [&](const Lane& x) { return x.head == row->head; });
      require(lane != lanes.end() && lane->rank_k == row->rank_k && lane->rank_v == row->rank_v,
              KVLATHE_BAD_ARGUMENT, "a bucket's lane contradicts its layer");
      check_lane(*row, format_k(bucket), format_v(bucket), head.page_tokens, bucket.page_stride);
      bucket.rows[lane - lanes.begin()] = row;
    }
    buckets.push_back(std::move(bucket));
  }
}

}  // namespace kvlathe

extern "C" int32_t kvlathe_layer_create(const int32_t* table, int64_t count, kvlathe_layer** layer,
                                        kvlathe_status* status) {
  return kvlathe::run(status, [&] {
    if (!table || count < 1 || !layer)
      throw kvlathe::Refusal(KVLATHE_BAD_ARGUMENT, "table or layer is null");
    *layer = new kvlathe_layer(std::vector<int32_t>(table, table + count));
  });
}

extern "C" void kvlathe_layer_destroy(kvlathe_layer* layer) { delete layer; }
