// kvlathe::Attend on the CPU: one layer, one packed step of any mix of prefill and decode.
//
// 1. prepare: RoPE, projection and centring of the fresh tokens; k' and v' go to their places in the pool.
// 2. attend: now all of a sequence's tokens are in pages, so fresh and old ones are read alike, in blocks of at most 64 tokens.
//    A prompt's queries go in tiles: a block of keys and values is unpacked once for the whole tile. A decoding sequence's
//    few query heads read the pages as they lie, cut into spans so that all threads have work.
// 3. merge: the spans' softmax states become one.
// 4. observe: rows with a probe weight take a softmax of their own, whose shares are summed by place.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "layer.h"
#include "rows.h"
#include "select.h"
#include "work.h"

namespace kvlathe {
namespace {

constexpr int64_t kSpanBlocks = 8;    // least blocks of a decoding span: 512 tokens
constexpr int64_t kMostSpans = 32;    // of one lane and sequence
constexpr int64_t kPrepareRows = 32;  // tokens that are projected together
constexpr int64_t kTileRows = 256;    // queries times heads of a tile, about
constexpr int64_t kObserved = 64;     // rows times heads that are observed together, about
constexpr float kLog2E = 1.44269504088896f;

// Tokens first .. first + count - 1 of one sequence's bucket, all in one page.
struct Block {
  int32_t bucket;
  int64_t first;
  int32_t count;
};

// Softmax state of m rows: o is not yet divided by sum.
struct State {
  float *top, *sum, *o;

  static size_t floats(int64_t m, int64_t width) { return size_t(m * (width + 32)); }
  State(float* memory, int64_t m, int64_t width) : top(memory + m * width), sum(top + m), o(memory) {
    std::fill(o, o + m * width, 0.f);
    std::fill(top, top + m, -INFINITY);
    std::fill(sum, sum + m, 0.f);
  }
};

struct Item {
  int32_t sequence, lane;
  int64_t begin, end;  // queries of a tile; blocks of a span
  int64_t state_at;    // where its softmax state lies among the states; -1: the item writes o itself
};

struct Step {
  const Layer& layer;
  const kvlathe_attend_args& a;
  const Kernels& kernels;
  const int block;  // tokens in a full block

  Step(const Layer& layer, const kvlathe_attend_args& a)
      : layer(layer), a(a), kernels(kernels_for(a.isa)), block(block_of(layer.head.page_tokens)) {}

  void run();

 private:
  static int block_of(int page) {
    int size = std::min(page, kBlock);
    while (page % size || size % 16) --size;
    return size;
  }

  int32_t queries(int32_t b) const { return a.query_starts[b + 1] - a.query_starts[b]; }
  int64_t cached(int32_t b, int32_t s) const { return a.lengths[int64_t{b} * layer.head.buckets + s]; }
  int64_t held(int32_t b, int32_t s) const { return cached(b, s) + (layer.buckets[s].fresh ? queries(b) : 0); }

  uint8_t* page(int32_t b, int32_t s, int64_t token) const {
    const int64_t id = a.page_tables[s][int64_t{b} * a.page_table_widths[s] + token / layer.head.page_tokens];
    return static_cast<uint8_t*>(a.pool) + id * layer.buckets[s].page_stride;
  }

  void check() const;
  void check_pages(int32_t s) const;
  void prepare(const float* prepared, int64_t first, int32_t h) const;
  void append(int64_t row, int32_t b, int32_t h, const float* keys) const;
  void clear(int64_t first) const;
  const float* queries_of(const float* prepared, int32_t h) const { return prepared + a.tokens * q_at_[h]; }

  Rows rows(int32_t b, int32_t h, const Block& at, bool keys) const;
  int64_t blocks(int32_t b, int32_t h, int64_t limit) const;
  std::vector<Block>& list_blocks(int32_t b, int32_t h, int64_t limit, int64_t begin, int64_t end) const;
  void plan_items(std::vector<Item>& items, int64_t& floats) const;
  void tile(const Item& item, const float* prepared) const;
  void span(const Item& item, const float* prepared) const;
  void finish(const State& state, int64_t m, int64_t row, const Lane& lane) const;
  void merge(const Item* items, int64_t count) const;
  void observe(int32_t b, int32_t h, const float* prepared) const;
  void observe(int32_t b, int32_t h, const float* prepared, const int64_t* rows, int64_t count) const;
  void add_shares(int32_t b, int32_t h, const std::vector<Block>& blocks, float* scores, int64_t limit, float weight) const;

  std::vector<int64_t> q_at_;       // where each lane's prepared queries start: tokens times this
  std::vector<int32_t> sequence_;   // of each row; -1: nobody's
  float* states_ = nullptr;         // of all spans
  std::vector<int64_t> place_at_;   // where each bucket's places start in the mass, and those of the step's own tokens
};

// While `rows` are read, `next` is fetched. Long slabs are left to the processor: it does them better.
void then(Rows& rows, const Rows& next) {
  constexpr int64_t kLong = 16384;
  if (next.rows * next.stride > kLong) return;
  rows.ahead = next.data;
  rows.ahead_step = next.rows * next.stride / rows.rows;
}

void require(bool ok, kvlathe_code code, const std::string& message) {
  if (!ok) throw Refusal(code, message);
}

// -- what is refused -----------------------------------------------------------------------------------------------------
void Step::check() const {
  const TableHeader& t = layer.head;
  require(a.abi_version == KVLATHE_ABI_VERSION, KVLATHE_BAD_VERSION,
          "the caller was built for kvlathe ABI " + std::to_string(a.abi_version) + " and this library has " +
              std::to_string(KVLATHE_ABI_VERSION) + ": rebuild one of them");
  require(a.tokens >= 0 && a.batch >= 0, KVLATHE_BAD_ARGUMENT, "tokens or batch is negative");
  if (a.tokens == 0 || a.batch == 0) return;
  require(a.q && a.k && a.v && a.o && a.query_starts && a.lengths && a.page_tables && a.page_table_widths && a.pool, KVLATHE_BAD_ARGUMENT,
          "q, k, v, o, query_starts, lengths, page_tables or pool is null");
  require(!t.rope || (a.cos && a.sin), KVLATHE_BAD_ARGUMENT, "the layer has RoPE and cos or sin is null");
  require(!t.projected || (a.proj_q && a.proj_k && a.centre_k), KVLATHE_BAD_ARGUMENT, "the layer projects and a projection is null");
  require(reinterpret_cast<uintptr_t>(a.pool) % 64 == 0, KVLATHE_MISALIGNED, "the pool is not aligned to 64 bytes");
  require(a.query_starts[0] >= 0 && a.query_starts[a.batch] <= a.tokens, KVLATHE_BAD_ARGUMENT, "query_starts leaves the step's tokens");
  require(!a.probe_weights || a.mass, KVLATHE_BAD_ARGUMENT, "rows are observed and mass is null");
  for (int32_t b = 0; b < a.batch; ++b) require(queries(b) >= 0, KVLATHE_BAD_ARGUMENT, "query_starts falls");
  for (int32_t s = 0; s < t.buckets; ++s) check_pages(s);
}

void Step::check_pages(int32_t s) const {
  const Bucket& bucket = layer.buckets[s];
  const int64_t pages = bucket.page_stride ? a.pool_bytes / bucket.page_stride : 0;
  require(a.page_tables[s], KVLATHE_BAD_ARGUMENT, "a page table is null");
  for (int32_t b = 0; b < a.batch && bucket.lane_count; ++b) {
    require(cached(b, s) >= 0, KVLATHE_BAD_ARGUMENT, "a length is negative");
    const int64_t used = (held(b, s) + layer.head.page_tokens - 1) / layer.head.page_tokens;
    require(used <= a.page_table_widths[s], KVLATHE_TOO_SMALL,
            "sequence " + std::to_string(b) + " needs " + std::to_string(used) + " pages of bucket " + std::to_string(s) +
                " and its page table has " + std::to_string(a.page_table_widths[s]));
    for (int64_t i = 0; i < used; ++i) {
      const int32_t id = a.page_tables[s][int64_t{b} * a.page_table_widths[s] + i];
      require(id >= 0 && id < pages, KVLATHE_TOO_SMALL,
              "page id " + std::to_string(id) + " lies outside the pool of " + std::to_string(pages) + " pages");
    }
  }
}

// -- fresh tokens --------------------------------------------------------------------------------------------------------
// Tokens first .. first + kPrepareRows - 1 of lane h: q' [tokens * G, rank_k] in base-2 scores, k' and v' into the pool.
void Step::prepare(const float* prepared, int64_t first, int32_t h) const {
  thread_local Buffer buffer;
  const Lane& lane = layer.lanes[h];
  const TableHeader& t = layer.head;
  const int64_t last = std::min<int64_t>(first + kPrepareRows, a.tokens), count = last - first, heads = t.group_size;
  const int64_t rank = lane.rank_k, width = std::max<int64_t>(lane.input_dim, rank);
  float* turned = buffer.floats(size_t(kPrepareRows * heads * width + kPrepareRows * rank));
  float* keys = turned + kPrepareRows * heads * width;
  const auto turn = [&](const float* x, int64_t row, float scale, float* out) {
    const float* cos = lane.rope ? a.cos + row * t.planes : nullptr;
    const float* sin = lane.rope ? a.sin + row * t.planes : nullptr;
    kernels.rotate(x, cos, sin, lane.planes, lane.input_dim, scale, out);
    if (!lane.projected) std::fill(out + lane.input_dim, out + rank, 0.f);
  };
  const int64_t matrix = int64_t{h} * t.input_dim * t.rank_k;
  float* q = const_cast<float*>(queries_of(prepared, h)) + first * heads * rank;
  for (int64_t i = 0; i < count * heads; ++i) {
    const int64_t row = first + i / heads;
    float* to = lane.projected ? turned + i * width : q + i * rank;
    turn(a.q + row * layer.q_width + lane.q_at + i % heads * lane.input_dim, row, a.scale * kLog2E, to);
  }
  if (lane.projected) {
    kernels.multiply(turned, width, a.proj_q + matrix, t.rank_k, q, rank, int(count * heads), int(rank), lane.input_dim, false);
  }
  for (int64_t i = 0; i < count; ++i) {
    float* to = lane.projected ? turned + i * width : keys + i * rank;
    turn(a.k + (first + i) * layer.k_width + lane.k_at, first + i, 1.f, to);
  }
  if (lane.projected) {
    kernels.multiply(turned, width, a.proj_k + matrix, t.rank_k, keys, rank, int(count), int(rank), lane.input_dim, false);
  }
  for (int64_t i = 0; i < count; ++i) {
    if (sequence_[first + i] >= 0) append(first + i, sequence_[first + i], h, keys + i * rank);
  }
}

void Step::append(int64_t row, int32_t b, int32_t h, const float* keys) const {
  const Lane& lane = layer.lanes[h];
  const LaneRow& slab = *layer.buckets[lane.fresh].rows[h];
  const int64_t place = cached(b, lane.fresh) + row - a.query_starts[b], within = place % layer.head.page_tokens;
  const int bits = layer.head.hot_bits;
  const int64_t bytes = bits / 8;
  const float* centre = layer.head.projected ? a.centre_k + int64_t{h} * layer.head.rank_k : nullptr;
  const float* values = a.v + row * layer.v_width + lane.v_at;
  uint8_t* page_start = page(b, lane.fresh, place);
  kernels.store(keys, centre, lane.rank_k, bits, page_start + slab.k + within * lane.rank_k * bytes);
  kernels.store(values, nullptr, lane.rank_v, bits, page_start + slab.v + within * lane.rank_v * bytes);
  if (!a.rows) return;
  uint8_t* out = static_cast<uint8_t*>(a.rows) + row * layer.rows_width * bytes;
  kernels.store(keys, centre, lane.rank_k, bits, out + lane.rows_k_at * bytes);
  kernels.store(values, nullptr, lane.rank_v, bits, out + lane.rows_v_at * bytes);
}

// Rows of nobody: whoever multiplies them on should meet no denormals.
void Step::clear(int64_t row) const {
  std::fill_n(a.o + row * layer.o_width, layer.o_width, 0.f);
  if (a.rows) std::fill_n(static_cast<uint8_t*>(a.rows) + row * layer.rows_width * layer.head.hot_bits / 8, layer.rows_width * layer.head.hot_bits / 8, 0);
}

// -- blocks of cached tokens ---------------------------------------------------------------------------------------------
Rows Step::rows(int32_t b, int32_t h, const Block& at, bool keys) const {
  const Bucket& bucket = layer.buckets[at.bucket];
  const LaneRow& row = *bucket.rows[h];
  const int32_t page_tokens = layer.head.page_tokens;
  const uint8_t* start = page(b, at.bucket, at.first);
  if (keys) return rows_of(start, row.k, row.k_meta, row.rank_k, {bucket.bits_k, bucket.axis_k, bucket.group_k}, page_tokens, at.first % page_tokens, at.count);
  return rows_of(start, row.v, row.v_meta, row.rank_v, {bucket.bits_v, bucket.axis_v, bucket.group_v}, page_tokens, at.first % page_tokens, at.count);
}

// Blocks of lane h that a query sees which may look at the first `limit` tokens of its fresh bucket.
int64_t Step::blocks(int32_t b, int32_t h, int64_t limit) const {
  int64_t total = 0;
  for (int32_t s = 0; s < layer.head.buckets; ++s) {
    const int64_t tokens = s == layer.lanes[h].fresh ? limit : cached(b, s);
    if (layer.buckets[s].rows[h]) total += (tokens + block - 1) / block;
  }
  return total;
}

// Those numbered begin .. end - 1.
std::vector<Block>& Step::list_blocks(int32_t b, int32_t h, int64_t limit, int64_t begin, int64_t end) const {
  thread_local std::vector<Block> list;
  list.clear();
  int64_t at = 0;
  for (int32_t s = 0; s < layer.head.buckets; ++s) {
    if (!layer.buckets[s].rows[h]) continue;
    const int64_t tokens = s == layer.lanes[h].fresh ? limit : cached(b, s), count = (tokens + block - 1) / block;
    for (int64_t i = std::max<int64_t>(begin - at, 0); i < std::min(end - at, count); ++i) {
      list.push_back({s, i * block, int32_t(std::min<int64_t>(block, tokens - i * block))});
    }
    at += count;
  }
  return list;
}

// -- attention -----------------------------------------------------------------------------------------------------------
void Step::plan_items(std::vector<Item>& items, int64_t& floats) const {
  const int64_t heads = layer.head.group_size, tile_queries = std::max<int64_t>(kTileRows / heads, 1);
  for (int32_t b = 0; b < a.batch; ++b) {
    for (int32_t h = 0; h < layer.head.lanes && queries(b); ++h) {
      if (queries(b) > 1) {
        for (int64_t i = 0; i < queries(b); i += tile_queries) {
          items.push_back({b, h, i, std::min<int64_t>(i + tile_queries, queries(b)), -1});
        }
        continue;
      }
      const int64_t all = blocks(b, h, held(b, layer.lanes[h].fresh));
      const int64_t spans = std::clamp<int64_t>(all / kSpanBlocks, 1, kMostSpans);
      for (int64_t i = 0; i < spans; ++i) {
        items.push_back({b, h, all * i / spans, all * (i + 1) / spans, spans > 1 ? floats : -1});
        if (spans > 1) floats += int64_t(State::floats(heads, layer.lanes[h].rank_v));
      }
    }
  }
}

void Step::finish(const State& state, int64_t m, int64_t row, const Lane& lane) const {
  const int64_t heads = layer.head.group_size, width = lane.rank_v;
  for (int64_t i = 0; i < m; ++i) {
    float* out = a.o + (row + i / heads) * layer.o_width + lane.o_at + i % heads * width;
    const float share = 1.f / state.sum[i];
    for (int64_t c = 0; c < width; ++c) out[c] = state.o[i * width + c] * share;
  }
}

// Queries begin .. end - 1 of a prompt: m = queries * G rows against every block that the last of them sees.
void Step::tile(const Item& item, const float* prepared) const {
  thread_local Buffer buffer;
  const Lane& lane = layer.lanes[item.lane];
  const int64_t heads = layer.head.group_size, m = (item.end - item.begin) * heads, width = lane.rank_v, rank = lane.rank_k;
  const int64_t ranks = std::max(rank, width);
  float* memory = buffer.floats(size_t(m * (kBlock + 16)) + State::floats(m, width) + size_t(2 * ranks * kBlock));
  float *scores = memory, *packed = scores + m * kBlock, *turned = packed + ranks * kBlock;
  auto* seen = reinterpret_cast<int32_t*>(turned + ranks * kBlock);
  const State state(turned + ranks * kBlock + (m + 15) / 16 * 16, m, width);
  const int64_t row = a.query_starts[item.sequence] + item.begin;
  const float* q = queries_of(prepared, item.lane) + row * heads * rank;
  const int64_t before = cached(item.sequence, lane.fresh) + item.begin;  // tokens of the fresh bucket before the first query
  const int64_t limit = before + item.end - item.begin;
  for (const Block& at : list_blocks(item.sequence, item.lane, limit, 0, INT64_MAX)) {
    const Rows keys = rows(item.sequence, item.lane, at, true), values = rows(item.sequence, item.lane, at, false);
    const bool causal = at.bucket == lane.fresh && at.first + at.count > before + 1;
    const int padded = (at.count + 15) / 16 * 16;
    int64_t ld;
    const float* k = kernels.unpack(keys, packed, &ld);
    if (!keys.by_channel) kernels.transpose(k, ld, turned, kBlock, at.count, int(rank)), k = turned, ld = kBlock;
    kernels.multiply(q, rank, k, ld, scores, kBlock, int(m), padded, int(rank), false);
    for (int64_t i = 0; causal && i < m; ++i) seen[i] = int32_t(std::clamp<int64_t>(before + i / heads + 1 - at.first, 0, at.count));
    kernels.soften(scores, kBlock, int(m), at.count, causal ? seen : nullptr, state.top, state.sum, state.o, int(width));
    const float* v = kernels.unpack(values, packed, &ld);
    if (values.by_channel) kernels.transpose(v, ld, turned, width, int(width), padded), v = turned, ld = width;
    kernels.multiply(scores, kBlock, v, ld, state.o, width, int(m), int(width), at.count, true);
  }
  finish(state, m, row, lane);
}

// Blocks begin .. end - 1 for the only query of a sequence: G rows that read the pages as they lie.
void Step::span(const Item& item, const float* prepared) const {
  thread_local Buffer buffer;
  const Lane& lane = layer.lanes[item.lane];
  const int64_t m = layer.head.group_size, width = lane.rank_v, rank = lane.rank_k, ranks = std::max(rank, width);
  float* memory = buffer.floats(size_t(m * (kBlock + 2 * kDotScratch)) + State::floats(m, width) + size_t(ranks * kBlock));
  float *scores = memory, *of_keys = scores + m * kBlock, *of_values = of_keys + m * kDotScratch, *packed = of_values + m * kDotScratch;
  int32_t last_bucket = -1;
  const State state(item.state_at < 0 ? packed + ranks * kBlock : states_ + item.state_at, m, width);
  const int64_t row = a.query_starts[item.sequence];
  const float* q = queries_of(prepared, item.lane) + row * m * rank;
  const std::vector<Block>& list = list_blocks(item.sequence, item.lane, held(item.sequence, lane.fresh), item.begin, item.end);
  for (const Block& at : list) {
    Rows keys = rows(item.sequence, item.lane, at, true), values = rows(item.sequence, item.lane, at, false);
    then(keys, values);
    if (&at != &list.back()) then(values, rows(item.sequence, item.lane, *(&at + 1), true));
    int64_t ld;
    if (keys.by_channel) {
      const float* k = kernels.unpack(keys, packed, &ld);
      kernels.multiply(q, rank, k, ld, scores, kBlock, int(m), keys.inner, int(rank), false);
    } else {
      kernels.dots(q, rank, keys, scores, kBlock, int(m), false, at.bucket == last_bucket, of_keys);
      last_bucket = at.bucket;
    }
    kernels.soften(scores, kBlock, int(m), at.count, nullptr, state.top, state.sum, state.o, int(width));
    if (values.by_channel) {
      kernels.dots(scores, kBlock, values, state.o, width, int(m), true, false, of_values);
    } else {
      const float* v = kernels.unpack(values, packed, &ld);
      kernels.multiply(scores, kBlock, v, ld, state.o, width, int(m), int(width), at.count, true);
    }
  }
  if (item.state_at < 0) finish(state, m, row, lane);
}

// The spans of one sequence and lane: their states become the first one's, which is written out.
void Step::merge(const Item* items, int64_t count) const {
  const Lane& lane = layer.lanes[items->lane];
  const int64_t m = layer.head.group_size, width = lane.rank_v;
  float *o = states_ + items->state_at, *top = o + m * width, *sum = top + m;
  for (const Item* item = items + 1; item < items + count; ++item) {
    const float *other_o = states_ + item->state_at, *other_top = other_o + m * width, *other_sum = other_top + m;
    for (int64_t i = 0; i < m; ++i) {
      const float both = std::max(top[i], other_top[i]);
      const float mine = std::exp2(top[i] - both), other = std::exp2(other_top[i] - both);
      top[i] = both;
      sum[i] = sum[i] * mine + other_sum[i] * other;
      for (int64_t c = i * width; c < (i + 1) * width; ++c) o[c] = o[c] * mine + other_o[c] * other;
    }
  }
  for (int64_t i = 0; i < m; ++i) {
    float* out = a.o + a.query_starts[items->sequence] * layer.o_width + lane.o_at + i * width;
    for (int64_t c = 0; c < width; ++c) out[c] = o[i * width + c] / sum[i];
  }
}

// -- probe mass ----------------------------------------------------------------------------------------------------------
// Rows of sequence b with a weight: what lane h's query heads give each place.
void Step::observe(int32_t b, int32_t h, const float* prepared) const {
  std::vector<int64_t> observed;
  for (int64_t row = a.query_starts[b]; row < a.query_starts[b + 1]; ++row) {
    if (a.probe_weights[row] != 0) observed.push_back(row);
  }
  const int64_t step = std::max<int64_t>(kObserved / layer.head.group_size, 1), count = int64_t(observed.size());
  for (int64_t i = 0; i < count; i += step) observe(b, h, prepared, observed.data() + i, std::min(step, count - i));
}

void Step::observe(int32_t b, int32_t h, const float* prepared, const int64_t* rows_of_step, int64_t count) const {
  thread_local Buffer buffer;
  const Lane& lane = layer.lanes[h];
  const int64_t heads = layer.head.group_size, rank = lane.rank_k, m = count * heads;
  const int64_t before = cached(b, lane.fresh) - a.query_starts[b] + 1;  // a row sees this many tokens more than its number
  const std::vector<Block> blocks = list_blocks(b, h, before + rows_of_step[count - 1], 0, INT64_MAX);
  const int64_t width = int64_t(blocks.size()) * kBlock;
  float* q = buffer.floats(size_t(m * (rank + width) + 2 * rank * kBlock));
  float *scores = q + m * rank, *packed = scores + m * width, *turned = packed + rank * kBlock;
  for (int64_t i = 0; i < count; ++i) std::copy_n(queries_of(prepared, h) + rows_of_step[i] * heads * rank, heads * rank, q + i * heads * rank);
  for (size_t j = 0; j < blocks.size(); ++j) {
    const Rows keys = rows(b, h, blocks[j], true);
    int64_t ld;
    const float* k = kernels.unpack(keys, packed, &ld);
    if (!keys.by_channel) kernels.transpose(k, ld, turned, kBlock, blocks[j].count, int(rank)), k = turned, ld = kBlock;
    kernels.multiply(q, rank, k, ld, scores + j * kBlock, width, int(m), (blocks[j].count + 15) / 16 * 16, int(rank), false);
  }
  for (int64_t i = 0; i < m; ++i) {
    const int64_t row = rows_of_step[i / heads];
    add_shares(b, h, blocks, scores + i * width, before + row, a.probe_weights[row]);
  }
}

// One row's scores of `blocks`, kBlock apart, of which it sees `limit` tokens of the fresh bucket: its shares by place.
void Step::add_shares(int32_t b, int32_t h, const std::vector<Block>& blocks, float* scores, int64_t limit, float weight) const {
  const int32_t fresh = layer.lanes[h].fresh;
  const auto seen = [&](const Block& at) {
    return at.bucket == fresh ? std::clamp<int64_t>(limit - at.first, 0, at.count) : int64_t{at.count};
  };
  float top = -INFINITY;
  double sum = 0;
  for (size_t j = 0; j < blocks.size(); ++j) top = std::max(top, *std::max_element(scores + j * kBlock, scores + j * kBlock + std::max<int64_t>(seen(blocks[j]), 1)));
  for (size_t j = 0; j < blocks.size(); ++j) {
    for (int64_t t = 0; t < seen(blocks[j]); ++t) sum += scores[j * kBlock + t] = std::exp2(scores[j * kBlock + t] - top);
  }
  float* mass = a.mass + (int64_t{b} * layer.head.lanes + h) * a.mass_places;
  const float share = float(weight / sum);
  for (size_t j = 0; j < blocks.size(); ++j) {
    const Block& at = blocks[j];
    const int64_t old = cached(b, at.bucket);
    for (int64_t t = 0; t < seen(at); ++t) {
      const int64_t token = at.first + t, place = token < old ? place_at_[at.bucket] + token : place_at_.back() + token - old;
      mass[place] += scores[j * kBlock + t] * share;
    }
  }
}

void Step::run() {
  thread_local Buffer prepared_buffer, state_buffer;
  check();
  if (a.tokens == 0 || a.batch == 0) return;
  int64_t q_floats = 0;
  for (const Lane& lane : layer.lanes) q_at_.push_back(q_floats), q_floats += int64_t{layer.head.group_size} * lane.rank_k;
  sequence_.assign(size_t(a.tokens), -1);
  for (int32_t b = 0; b < a.batch; ++b) std::fill(sequence_.begin() + a.query_starts[b], sequence_.begin() + a.query_starts[b + 1], b);
  for (int64_t row = 0; row < a.tokens; ++row) {
    if (sequence_[row] < 0) clear(row);
  }
  const float* prepared = prepared_buffer.floats(size_t(a.tokens * q_floats));
  const int64_t lanes = layer.head.lanes, groups = (a.tokens + kPrepareRows - 1) / kPrepareRows;
  run_items(a.parallel, a.threads, groups * lanes, [&](int64_t i) { prepare(prepared, i / lanes * kPrepareRows, int32_t(i % lanes)); });

  std::vector<Item> items;
  int64_t floats = 0;
  plan_items(items, floats);
  states_ = state_buffer.floats(size_t(floats));
  run_items(a.parallel, a.threads, int64_t(items.size()), [&](int64_t i) {
    if (queries(items[i].sequence) > 1) {
      tile(items[i], prepared);
    } else {
      span(items[i], prepared);
    }
  });
  for (size_t i = 0; i < items.size();) {
    size_t end = i + 1;
    while (end < items.size() && items[end].lane == items[i].lane && items[end].sequence == items[i].sequence) ++end;
    if (items[i].state_at >= 0) merge(&items[i], int64_t(end - i));
    i = end;
  }
  if (!a.probe_weights) return;
  std::fill_n(a.mass, int64_t{a.batch} * lanes * a.mass_places, 0.f);
  place_at_.assign(1, 0);
  for (int32_t s = 0; s < layer.head.buckets; ++s) place_at_.push_back(place_at_.back() + int64_t{a.page_table_widths[s]} * layer.head.page_tokens);
  run_items(a.parallel, a.threads, a.batch * lanes, [&](int64_t i) { observe(int32_t(i / lanes), int32_t(i % lanes), prepared); });
}

}  // namespace
}  // namespace kvlathe

extern "C" int32_t kvlathe_cpu_attend(const kvlathe_layer* layer, const kvlathe_attend_args* args, kvlathe_status* status) {
  return kvlathe::run(status, [&] {
    if (!layer || !args) throw kvlathe::Refusal(KVLATHE_BAD_ARGUMENT, "layer or args is null");
    kvlathe::Step(*layer, *args).run();
  });
}
