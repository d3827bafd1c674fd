#include "layer.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>
#include <string>
#include <utility>

#include "kvlathe/cpu.h"

namespace kvlathe {
namespace {

void require(bool ok, const std::string& message, kvlathe_code code = KVLATHE_BAD_ARGUMENT) {
  if (!ok) throw Refusal(code, message);
}

bool rank_ok(int32_t rank) { return rank > 0 && rank % 16 == 0 && rank <= 1024; }

void check_format(int32_t bits, int32_t axis, int32_t group) {
  require(bits == 32 || bits == 16 || bits == 8 || bits == 4 || bits == 2,
          "a bucket has " + std::to_string(bits) + " bits");
  require(bits >= 16 || axis == KVLATHE_AXIS_RANK || axis == KVLATHE_AXIS_TOKEN,
          "a bucket's axis is neither rank nor token");
  require(bits >= 16 || (group > 0 && group % 16 == 0), "a quantization group is no multiple of 16",
          KVLATHE_UNSUPPORTED);
}

}  // namespace

void check_slab(const LaneRow& row, int32_t bits_k, int32_t bits_v, int64_t page_tokens, int64_t page_stride) {
  const std::string where = "the lane of layer " + std::to_string(row.layer) + " head " + std::to_string(row.head);
  require(rank_ok(row.rank_k) && rank_ok(row.rank_v), where + " has ranks that are no multiples of 16 up to 1024");
  for (int32_t offset : {row.k, row.k_meta, row.v, row.v_meta}) {
    require(offset >= 0 && offset % 128 == 0, where + " has an offset that is no multiple of 128 bytes",
            KVLATHE_MISALIGNED);
  }
  const int64_t ends[] = {row.k + slab_bytes(row.rank_k, page_tokens, bits_k),
                          row.v + slab_bytes(row.rank_v, page_tokens, bits_v), row.k_meta + 4 * int64_t{row.groups_k},
                          row.v_meta + 4 * int64_t{row.groups_v}};
  require(*std::max_element(std::begin(ends), std::end(ends)) <= page_stride, where + " ends past the page stride",
          KVLATHE_TOO_SMALL);
}

Layer::Layer(std::vector<int32_t> numbers) : table(std::move(numbers)) {
  require(table.size() * sizeof(int32_t) >= sizeof head, "the layer table is too short");
  std::memcpy(&head, table.data(), sizeof head);
  require(head.version == kTableVersion,
          "the layer table has version " + std::to_string(head.version) + " and this library reads " +
              std::to_string(kTableVersion) + ": build the engine again",
          KVLATHE_BAD_VERSION);
  require(head.lanes >= 1 && head.lanes <= 4096 && head.buckets >= 1 && head.buckets <= 4096,
          "the layer table is damaged");
  require(head.page_tokens > 0 && head.page_tokens % 16 == 0, "page_tokens is no positive multiple of 16");
  require(head.group_size >= 1 && head.planes >= 0, "the layer table is damaged");
  require(head.hot_bits == 16 || head.hot_bits == 32, "new tokens are neither 16 nor 32 bit");
  require(
      table.size() * sizeof(int32_t) >= sizeof head + head.lanes * sizeof(LaneForm) + head.buckets * sizeof(BucketForm),
      "the layer table is too short");
  read_lanes();
  read_buckets();
  for (const Lane& lane : lanes)
    require(buckets[lane.fresh].rows[&lane - lanes.data()], "a lane is not in its fresh bucket");
  order.resize(lanes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t x, int32_t y) { return buckets_of(x) < buckets_of(y); });
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
  const auto* forms = reinterpret_cast<const LaneForm*>(table.data() + sizeof head / sizeof(int32_t));
  for (int32_t h = 0; h < head.lanes; ++h) {
    Lane lane{{forms[h]}, q_width, k_width, v_width, o_width, 0, 0, nullptr};
    const std::string where = "the lane of head " + std::to_string(lane.head);
    require(rank_ok(lane.rank_k) && rank_ok(lane.rank_v), where + " has ranks that are no multiples of 16 up to 1024");
    require(lane.input_dim > 0 && lane.input_dim <= head.input_dim && lane.rank_k <= head.rank_k,
            where + " is too wide");
    require(lane.projected ? head.projected : lane.rank_k >= lane.input_dim,
            where + " has no projection and rank_k < input_dim");
    require(lane.fresh >= 0 && lane.fresh < head.buckets, where + " names a bucket that is not there");
    if (lane.planes_at) {
      require(lane.planes_at > 0 && size_t(lane.planes_at) + lane.input_dim / 2 <= table.size(),
              where + " has planes past the table");
      lane.planes = table.data() + lane.planes_at;
    }
    for (int32_t i = 0; lane.rope && i < lane.input_dim / 2; ++i) {
      const int32_t plane = lane.planes ? lane.planes[i] : i;
      require(plane >= 0 && plane < head.planes, where + " names a plane that is not there");
    }
    q_width += int64_t{head.group_size} * lane.input_dim;
    k_width += lane.input_dim;
    v_width += lane.rank_v;
    o_width += int64_t{head.group_size} * lane.rank_v;
    widest_v = std::max(widest_v, lane.rank_v);
    lanes.push_back(lane);
  }
  for (Lane& lane : lanes) lane.rows_k_at = rows_width, rows_width += lane.rank_k;
  for (Lane& lane : lanes) lane.rows_v_at = rows_width, rows_width += lane.rank_v;
}

void Layer::read_buckets() {
  const size_t at = (sizeof head + head.lanes * sizeof(LaneForm)) / sizeof(int32_t);
  const auto* forms = reinterpret_cast<const BucketForm*>(table.data() + at);
  for (int32_t s = 0; s < head.buckets; ++s) {
    Bucket bucket{{forms[s]}, std::vector<const LaneRow*>(lanes.size())};
    check_format(bucket.bits_k, bucket.axis_k, bucket.group_k);
    check_format(bucket.bits_v, bucket.axis_v, bucket.group_v);
    require(!bucket.fresh || (bucket.bits_k == head.hot_bits && bucket.bits_v == head.hot_bits),
            "a fresh bucket is not in the hot format");
    require(bucket.page_stride >= 0 && bucket.page_stride % 128 == 0, "a page stride is no multiple of 128 bytes",
            KVLATHE_MISALIGNED);
    require(bucket.lanes_at >= 0 && bucket.lane_count >= 0 &&
                size_t(bucket.lanes_at) + size_t(bucket.lane_count) * KVLATHE_LANE_COLUMNS <= table.size(),
            "a bucket's lanes lie past the table");
    for (int32_t i = 0; i < bucket.lane_count; ++i) {
      const auto* row = reinterpret_cast<const LaneRow*>(table.data() + bucket.lanes_at) + i;
      const auto lane = std::find_if(lanes.begin(), lanes.end(), [&](const Lane& x) { return x.head == row->head; });
      require(lane != lanes.end() && lane->rank_k == row->rank_k && lane->rank_v == row->rank_v,
              "a bucket's lane contradicts its layer");
      check_slab(*row, bucket.bits_k, bucket.bits_v, head.page_tokens, bucket.page_stride);
      bucket.rows[lane - lanes.begin()] = row;
    }
    buckets.push_back(std::move(bucket));
  }
}

}  // namespace kvlathe

extern "C" int32_t kvlathe_layer_create(const int32_t* table, int64_t count, kvlathe_layer** layer,
                                        kvlathe_status* status) {
  return kvlathe::run(status, [&] {
    if (!table || count < 1 || !layer) throw kvlathe::Refusal(KVLATHE_BAD_ARGUMENT, "table or layer is null");
    *layer = new kvlathe_layer(std::vector<int32_t>(table, table + count));
  });
}

extern "C" void kvlathe_layer_destroy(kvlathe_layer* layer) { delete layer; }
