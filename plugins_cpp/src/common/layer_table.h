// One layer's form in C++: the packed table of kvlathe/plan/layer_table.py, checked once and then
// trusted.
#pragma once

#include <cstdint>
#include <vector>

#include "common/lanes.h"
#include "common/refusal.h"
#include "common/windows.h"

namespace kvlathe {

constexpr int32_t kTableVersion = 3;
constexpr int32_t kNoEnd = KVLATHE_NO_END;

struct TableHeader {
  int32_t version, layer, page_tokens, group_size, lanes, buckets, planes, projected, rope,
      hot_bits, input_dim, rank_k, pools;
};

struct LaneForm {
  int32_t head, input_dim, rope, planes_at, projected, rank_k, rank_v, fresh;
  int32_t sink, recent, exact;  // its window (Sight of kvlathe/plan/sight.py)
};

struct BucketForm {
  int32_t bits_k, bits_v, axis_k, axis_v, group_k, group_v, page_stride, fresh, lane_count,
      lanes_at;
};

// A lane, and where its columns start in the packed rows of q, k, v, o and rows.
struct Lane : LaneForm {
  bool values_in_keys;  // rows_v_at is then rows_k_at
  int64_t q_at, k_at, v_at, o_at, rows_k_at, rows_v_at;
  const int32_t* planes;  // null: plane i turns pair i

  // The first token after the sink that the query at `place` sees; 0 or less: every token. Places
  // are among the tokens that are held: only whole pages are gone.
  int64_t first_seen(int64_t place, int64_t page_tokens) const {
    return kvlathe::first_seen<int64_t>(place, place / page_tokens * page_tokens, recent, exact);
  }
};

struct Bucket : BucketForm {
  std::vector<const LaneRow*> rows;  // [lanes]: null where the bucket does not hold the lane
};

struct Layer {
  explicit Layer(std::vector<int32_t> table);
  Layer(const Layer&) = delete;

  const std::vector<int32_t> table;
  TableHeader head{};
  std::vector<Lane> lanes;
  std::vector<int32_t> order;  // lanes: those that the same buckets hold stand together
  std::vector<Bucket> buckets;
  int64_t q_width = 0, k_width = 0, v_width = 0, o_width = 0, rows_width = 0;
  int32_t widest_v = 0;
  bool windowed = false;  // some lane does not see every token

  // One past the last place in `order` whose lane has the same buckets as the lane at `place`.
  int32_t alike(int32_t place) const;

 private:
  std::vector<bool> buckets_of(int32_t lane) const;
  void read_lanes();
  void read_buckets();
  void place_rows();
};

}  // namespace kvlathe

struct kvlathe_layer : kvlathe::Layer {
  using Layer::Layer;
};
