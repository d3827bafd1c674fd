// kvlathe::Attend on the CPU: one layer, one packed step of any mix of prefill and decode.
//
// 1. prepare: RoPE, projection and centring of the fresh tokens; k' and v' go to their places in the pool.
// 2. attend: now all of a sequence's tokens are in pages, so fresh and old ones are read alike, in blocks of at most 64
// tokens.
//    A prompt's queries go in tiles: a block of keys and values is unpacked once for the whole tile. A decoding
//    sequence's few query heads read the pages as they lie, cut into spans so that all threads have work.
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
constexpr int64_t kLeastItems = 16;   // of decoding sequences, if there are lanes enough: all threads have work
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

// Softmax state of m rows of `width`: o is not yet divided by sum.
struct State {
  int64_t m, width;
  float *o, *top, *sum;

  static int64_t floats(int64_t m, int64_t width) { return m * (width + 32); }
  State(float* memory, int64_t m, int64_t width)
      : m(m), width(width), o(memory), top(memory + m * width), sum(top + m) {}

  void clear() {
    std::fill(o, o + m * width, 0.f);
    std::fill(top, top + m, -INFINITY);
    std::fill(sum, sum + m, 0.f);
  }

  void add(const State& other) {
    for (int64_t i = 0; i < m; ++i) {
      const float both = std::max(top[i], other.top[i]);
      const float mine = std::exp2(top[i] - both), theirs = std::exp2(other.top[i] - both);
      top[i] = both;
      sum[i] = sum[i] * mine + other.sum[i] * theirs;
      for (int64_t c = i * width; c < (i + 1) * width; ++c) o[c] = o[c] * mine + other.o[c] * theirs;
    }
  }
};

struct Item {
  int32_t sequence;
  int32_t lane, lane_end;  // places in layer.order; a span's lanes have the same blocks
  int64_t begin, end;      // queries of a tile; blocks of a span
  int64_t state_at;        // where its lanes' softmax states lie among the states; -1: the item writes o itself
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
  int64_t spans(int32_t b, int32_t h) const {
    return std::clamp<int64_t>(blocks(b, h, held(b, layer.lanes[h].fresh)) / kSpanBlocks, 1, kMostSpans);
  }
  int64_t slices() const;
  int64_t state_floats(const Item& item) const;
  std::vector<Rows>& list_slabs(const Item& item, const std::vector<Block>& blocks) const;
  void tile(const Item& item, const float* prepared) const;
  void span(const Item& item, const float* prepared) const;
  void attend(const Rows& keys, const Rows& values, int count, const float* q, const State& state, bool again,
              float* of_keys, float* memory) const;
  void finish(const State& state, int64_t row, const Lane& lane) const;
  void merge(const Item* items, int64_t count) const;
  void observe(int32_t b, int32_t h, const float* prepared) const;
  void observe(int32_t b, int32_t h, const float* prepared, const int64_t* rows, int64_t count) const;
  void add_shares(int32_t b, int32_t h, const std::vector<Block>& blocks, float* scores, int64_t limit,
                  float weight) const;

  std::vector<int64_t> q_at_;      // where each lane's prepared queries start: tokens times this
  std::vector<int32_t> sequence_;  // of each row; -1: nobody's
  float* states_ = nullptr;        // of all spans
  std::vector<int64_t> place_at_;  // where each bucket's places start in the mass, and those of the step's own tokens
};

// While `rows` are read, `next` is fetched, its metadata too where it follows at once. Long slabs are left to the
// processor.
void then(Rows& rows, const Rows& next) {
  constexpr int64_t kLong = 16384;
  const auto* meta = reinterpret_cast<const uint8_t*>(next.meta);
  int64_t size = next.rows * next.stride;
  if (size > kLong) return;
  if (next.bits < 16 && meta - next.data >= size && meta - next.data < size + 128)
    size = meta - next.data + 2 * next.rows * next.meta_stride;
  rows.ahead = next.data;
  rows.ahead_step = (size + rows.rows - 1) / rows.rows;
}

void require(bool ok, kvlathe_code code, const std::string& message) {
  if (!ok) throw Refusal(code, message);
}

// -- what is refused
// -----------------------------------------------------------------------------------------------------
void Step::check() const {
  const TableHeader& t = layer.head;
  require(a.abi_version == KVLATHE_ABI_VERSION, KVLATHE_BAD_VERSION,
          "the caller was built for kvlathe ABI " + std::to_string(a.abi_version) + " and this library has " +
              std::to_string(KVLATHE_ABI_VERSION) + ": rebuild one of them");
  require(a.tokens >= 0 && a.batch >= 0, KVLATHE_BAD_ARGUMENT, "tokens or batch is negative");
  if (a.tokens == 0 || a.batch == 0) return;
  require(a.q && a.k && a.v && a.o && a.query_starts && a.lengths && a.page_tables && a.page_table_widths && a.pool,
          KVLATHE_BAD_ARGUMENT, "q, k, v, o, query_starts, lengths, page_tables or pool is null");
  require(!t.rope || (a.cos && a.sin), KVLATHE_BAD_ARGUMENT, "the layer has RoPE and cos or sin is null");
  require(!t.projected || (a.proj_q && a.proj_k && a.centre_k), KVLATHE_BAD_ARGUMENT,
          "the layer projects and a projection is null");
  require(reinterpret_cast<uintptr_t>(a.pool) % 64 == 0, KVLATHE_MISALIGNED, "the pool is not aligned to 64 bytes");
  require(a.query_starts[0] >= 0 && a.query_starts[a.batch] <= a.tokens, KVLATHE_BAD_ARGUMENT,
          "query_starts leaves the step's tokens");
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
            "sequence " + std::to_string(b) + " needs " + std::to_string(used) + " pages of bucket " +
                std::to_string(s) + " and its page table has " + std::to_string(a.page_table_widths[s]));
    for (int64_t i = 0; i < used; ++i) {
      const int32_t id = a.page_tables[s][int64_t{b} * a.page_table_widths[s] + i];
      require(id >= 0 && id < pages, KVLATHE_TOO_SMALL,
              "page id " + std::to_string(id) + " lies outside the pool of " + std::to_string(pages) + " pages");
    }
  }
}

// -- fresh tokens
// -------------------------------------------------------------------------------------------------------- Tokens first
// .. first + kPrepareRows - 1 of lane h: q' [tokens * G, rank_k] in base-2 scores, k' and v' into the pool.
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
    kernels.multiply(turned, width, a.proj_q + matrix, t.rank_k, q, rank, int(count * heads), int(rank), lane.input_dim,
                     false);
  }
  for (int64_t i = 0; i < count; ++i) {
    float* to = lane.projected ? turned + i * width : keys + i * rank;
    turn(a.k + (first + i) * layer.k_width + lane.k_at, first + i, 1.f, to);
  }
  if (lane.projected) {
    kernels.multiply(turned, width, a.proj_k + matrix, t.rank_k, keys, rank, int(count), int(rank), lane.input_dim,
                     false);
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
  if (a.rows)
    std::fill_n(static_cast<uint8_t*>(a.rows) + row * layer.rows_width * layer.head.hot_bits / 8,
                layer.rows_width * layer.head.hot_bits / 8, 0);
}

// -- blocks of cached tokens
// ---------------------------------------------------------------------------------------------
Rows Step::rows(int32_t b, int32_t h, const Block& at, bool keys) const {
  const Bucket& bucket = layer.buckets[at.bucket];
  const LaneRow& row = *bucket.rows[h];
  const int32_t page_tokens = layer.head.page_tokens;
  const uint8_t* start = page(b, at.bucket, at.first);
  if (keys)
    return rows_of(start, row.k, row.k_meta, row.rank_k, {bucket.bits_k, bucket.axis_k, bucket.group_k}, page_tokens,
                   at.first % page_tokens, at.count);
  return rows_of(start, row.v, row.v_meta, row.rank_v, {bucket.bits_v, bucket.axis_v, bucket.group_v}, page_tokens,
                 at.first % page_tokens, at.count);
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

// -- attention
// ----------------------------------------------------------------------------------------------------------- Into how
// many the lanes of a span are cut. Results do not depend on it.
int64_t Step::slices() const {
  int64_t total = 0;
  for (int32_t b = 0; b < a.batch; ++b) total += queries(b) == 1 ? spans(b, 0) : 0;
  return total ? std::clamp<int64_t>(kLeastItems / total, 1, layer.head.lanes) : 1;
}

void Step::plan_items(std::vector<Item>& items, int64_t& floats) const {
  const int64_t heads = layer.head.group_size, tile_queries = std::max<int64_t>(kTileRows / heads, 1), parts = slices();
  const int32_t lanes = layer.head.lanes;
  for (int32_t b = 0; b < a.batch; ++b) {
    for (int32_t h = 0, next; h < lanes && queries(b); h = next) {
      next = queries(b) > 1 ? h + 1 : std::min<int32_t>(layer.alike(h), h + int32_t((lanes + parts - 1) / parts));
      if (queries(b) > 1) {
        for (int64_t i = 0; i < queries(b); i += tile_queries) {
          items.push_back({b, h, next, i, std::min<int64_t>(i + tile_queries, queries(b)), -1});
        }
        continue;
      }
      const int32_t first = layer.order[h];
      const int64_t all = blocks(b, first, held(b, layer.lanes[first].fresh)), count = spans(b, first);
      for (int64_t i = 0; i < count; ++i) {
        items.push_back({b, h, next, all * i / count, all * (i + 1) / count, count > 1 ? floats : -1});
        if (count > 1) floats += state_floats(items.back());
      }
    }
  }
}

int64_t Step::state_floats(const Item& item) const {
  int64_t total = 0;
  for (int32_t i = item.lane; i < item.lane_end; ++i)
    total += State::floats(layer.head.group_size, layer.lanes[layer.order[i]].rank_v);
  return total;
}

void Step::finish(const State& state, int64_t row, const Lane& lane) const {
  const int64_t heads = layer.head.group_size, width = lane.rank_v;
  for (int64_t i = 0; i < state.m; ++i) {
    float* out = a.o + (row + i / heads) * layer.o_width + lane.o_at + i % heads * width;
    const float share = 1.f / state.sum[i];
    for (int64_t c = 0; c < width; ++c) out[c] = state.o[i * width + c] * share;
  }
}

// Queries begin .. end - 1 of a prompt: m = queries * G rows against every block that the last of them sees.
void Step::tile(const Item& item, const float* prepared) const {
  thread_local Buffer buffer;
  const int32_t h = layer.order[item.lane];
  const Lane& lane = layer.lanes[h];
  const int64_t heads = layer.head.group_size, m = (item.end - item.begin) * heads, width = lane.rank_v,
                rank = lane.rank_k;
  const int64_t ranks = std::max(rank, width);
  float* memory = buffer.floats(size_t(m * (kBlock + 16) + State::floats(m, width) + 2 * ranks * kBlock));
  float *scores = memory, *packed = scores + m * kBlock, *turned = packed + ranks * kBlock;
  auto* seen = reinterpret_cast<int32_t*>(turned + ranks * kBlock);
  State state(turned + ranks * kBlock + (m + 15) / 16 * 16, m, width);
  state.clear();
  const int64_t row = a.query_starts[item.sequence] + item.begin;
  const float* q = queries_of(prepared, h) + row * heads * rank;
  const int64_t before =
      cached(item.sequence, lane.fresh) + item.begin;  // tokens of the fresh bucket before the first query
  const int64_t limit = before + item.end - item.begin;
  for (const Block& at : list_blocks(item.sequence, h, limit, 0, INT64_MAX)) {
    const Rows keys = rows(item.sequence, h, at, true), values = rows(item.sequence, h, at, false);
    const bool causal = at.bucket == lane.fresh && at.first + at.count > before + 1;
    const int padded = (at.count + 15) / 16 * 16;
    int64_t ld;
    const float* k = kernels.unpack(keys, packed, &ld);
    if (!keys.by_channel) kernels.transpose(k, ld, turned, kBlock, at.count, int(rank)), k = turned, ld = kBlock;
    kernels.multiply(q, rank, k, ld, scores, kBlock, int(m), padded, int(rank), false);
    for (int64_t i = 0; causal && i < m; ++i)
      seen[i] = int32_t(std::clamp<int64_t>(before + i / heads + 1 - at.first, 0, at.count));
    kernels.soften(scores, kBlock, int(m), at.count, causal ? seen : nullptr, state.top, state.sum, state.o,
                   int(width));
    const float* v = kernels.unpack(values, packed, &ld);
    if (values.by_channel) kernels.transpose(v, ld, turned, width, int(width), padded), v = turned, ld = width;
    kernels.multiply(scores, kBlock, v, ld, state.o, width, int(m), int(width), at.count, true);
  }
  finish(state, row, lane);
}

// K and V of every block and lane, in the order in which they lie in the pages: (block, lane, K then V).
std::vector<Rows>& Step::list_slabs(const Item& item, const std::vector<Block>& blocks) const {
  constexpr size_t kAhead = 2;  // slabs
  thread_local std::vector<Rows> list;
  list.clear();
  for (const Block& at : blocks) {
    for (int32_t i = item.lane; i < item.lane_end; ++i) {
      for (const bool keys : {true, false}) list.push_back(rows(item.sequence, layer.order[i], at, keys));
    }
  }
  for (size_t i = 0; i + kAhead < list.size(); ++i) then(list[i], list[i + kAhead]);
  return list;
}

// Blocks begin .. end - 1 for the only query of a sequence: G rows a lane that read the pages as they lie.
void Step::span(const Item& item, const float* prepared) const {
  thread_local Buffer buffer;
  const int64_t m = layer.head.group_size, row = a.query_starts[item.sequence], states = state_floats(item);
  const int64_t lanes = item.lane_end - item.lane,
                scratch = m * (kBlock + kDotScratch) + kBlock * int64_t{std::max(layer.head.rank_k, layer.widest_v)};
  float* memory = buffer.floats(size_t(states + scratch + lanes * m * kDotScratch));
  float *of_keys = memory + scratch,
        *next = item.state_at < 0 ? of_keys + lanes * m * kDotScratch : states_ + item.state_at;
  std::vector<State> state;
  for (int32_t i = item.lane; i < item.lane_end; ++i) {
    const int32_t width = layer.lanes[layer.order[i]].rank_v;
    state.emplace_back(next, m, width).clear();
    next += State::floats(m, width);
  }
  const int32_t first = layer.order[item.lane];
  const std::vector<Block>& list =
      list_blocks(item.sequence, first, held(item.sequence, layer.lanes[first].fresh), item.begin, item.end);
  const Rows* slab = list_slabs(item, list).data();
  for (const Block& at : list) {
    const bool again = &at != list.data() && at.bucket == (&at - 1)->bucket;
    for (int32_t i = 0; i < lanes; ++i, slab += 2) {
      const int32_t h = layer.order[item.lane + i];
      attend(slab[0], slab[1], at.count, queries_of(prepared, h) + row * m * layer.lanes[h].rank_k, state[size_t(i)],
             again, of_keys + i * m * kDotScratch, memory);
    }
  }
  for (int32_t i = 0; i < lanes && item.state_at < 0; ++i)
    finish(state[size_t(i)], row, layer.lanes[layer.order[item.lane + i]]);
}

// One block of one lane. `of_keys`: the integer form of q, there already with `again`.
void Step::attend(const Rows& keys, const Rows& values, int count, const float* q, const State& state, bool again,
                  float* of_keys, float* memory) const {
  const int m = layer.head.group_size, rank = keys.by_channel ? keys.rows : keys.inner,
            width = values.by_channel ? values.rows : values.inner;
  float *scores = memory, *of_block = scores + m * kBlock;
  if (keys.by_channel) {
    kernels.mix(q, rank, keys, scores, kBlock, m, false, of_block);
  } else {
    kernels.dots(q, rank, keys, scores, kBlock, m, false, again, of_keys);
  }
  kernels.soften(scores, kBlock, m, count, nullptr, state.top, state.sum, state.o, width);
  if (values.by_channel) {
    kernels.dots(scores, kBlock, values, state.o, width, m, true, false, of_block);
  } else {
    kernels.mix(scores, kBlock, values, state.o, width, m, true, of_block);
  }
}

// The spans of one sequence and its lanes: their states become the first one's, which is written out.
void Step::merge(const Item* items, int64_t count) const {
  for (int64_t i = items->lane, at = 0; i < items->lane_end; ++i) {
    const Lane& lane = layer.lanes[layer.order[i]];
    State state(states_ + items->state_at + at, layer.head.group_size, lane.rank_v);
    for (const Item* item = items + 1; item < items + count; ++item)
      state.add(State(states_ + item->state_at + at, state.m, state.width));
    finish(state, a.query_starts[items->sequence], lane);
    at += State::floats(state.m, state.width);
  }
}

// -- probe mass
// ---------------------------------------------------------------------------------------------------------- Rows of
// sequence b with a weight: what lane h's query heads give each place.
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
  const int64_t before =
      cached(b, lane.fresh) - a.query_starts[b] + 1;  // a row sees this many tokens more than its number
  const std::vector<Block> blocks = list_blocks(b, h, before + rows_of_step[count - 1], 0, INT64_MAX);
  const int64_t width = int64_t(blocks.size()) * kBlock;
  float* q = buffer.floats(size_t(m * (rank + width) + 2 * rank * kBlock));
  float *scores = q + m * rank, *packed = scores + m * width, *turned = packed + rank * kBlock;
  for (int64_t i = 0; i < count; ++i)
    std::copy_n(queries_of(prepared, h) + rows_of_step[i] * heads * rank, heads * rank, q + i * heads * rank);
  for (size_t j = 0; j < blocks.size(); ++j) {
    const Rows keys = rows(b, h, blocks[j], true);
    int64_t ld;
    const float* k = kernels.unpack(keys, packed, &ld);
    if (!keys.by_channel) kernels.transpose(k, ld, turned, kBlock, blocks[j].count, int(rank)), k = turned, ld = kBlock;
    kernels.multiply(q, rank, k, ld, scores + j * kBlock, width, int(m), (blocks[j].count + 15) / 16 * 16, int(rank),
                     false);
  }
  for (int64_t i = 0; i < m; ++i) {
    const int64_t row = rows_of_step[i / heads];
    add_shares(b, h, blocks, scores + i * width, before + row, a.probe_weights[row]);
  }
}

// One row's scores of `blocks`, kBlock apart, of which it sees `limit` tokens of the fresh bucket: its shares by place.
void Step::add_shares(int32_t b, int32_t h, const std::vector<Block>& blocks, float* scores, int64_t limit,
                      float weight) const {
  const int32_t fresh = layer.lanes[h].fresh;
  const auto seen = [&](const Block& at) {
    return at.bucket == fresh ? std::clamp<int64_t>(limit - at.first, 0, at.count) : int64_t{at.count};
  };
  float top = -INFINITY;
  double sum = 0;
  for (size_t j = 0; j < blocks.size(); ++j)
    top = std::max(top,
                   *std::max_element(scores + j * kBlock, scores + j * kBlock + std::max<int64_t>(seen(blocks[j]), 1)));
  for (size_t j = 0; j < blocks.size(); ++j) {
    for (int64_t t = 0; t < seen(blocks[j]); ++t)
      sum += scores[j * kBlock + t] = std::exp2(scores[j * kBlock + t] - top);
  }
  float* mass = a.mass + (int64_t{b} * layer.head.lanes + h) * a.mass_places;
  const float share = float(weight / sum);
  for (size_t j = 0; j < blocks.size(); ++j) {
    const Block& at = blocks[j];
    const int64_t old = cached(b, at.bucket);
    for (int64_t t = 0; t < seen(at); ++t) {
      const int64_t token = at.first + t,
                    place = token < old ? place_at_[at.bucket] + token : place_at_.back() + token - old;
      mass[place] += scores[j * kBlock + t] * share;
    }
  }
}

void Step::run() {
  thread_local Buffer prepared_buffer, state_buffer;
  check();
  if (a.tokens == 0 || a.batch == 0) return;
  int64_t q_floats = 0;
  for (const Lane& lane : layer.lanes)
    q_at_.push_back(q_floats), q_floats += int64_t{layer.head.group_size} * lane.rank_k;
  sequence_.assign(size_t(a.tokens), -1);
  for (int32_t b = 0; b < a.batch; ++b)
    std::fill(sequence_.begin() + a.query_starts[b], sequence_.begin() + a.query_starts[b + 1], b);
  for (int64_t row = 0; row < a.tokens; ++row) {
    if (sequence_[row] < 0) clear(row);
  }
  const float* prepared = prepared_buffer.floats(size_t(a.tokens * q_floats));
  const int64_t lanes = layer.head.lanes, groups = (a.tokens + kPrepareRows - 1) / kPrepareRows;
  run_items(a.parallel, a.threads, groups * lanes,
            [&](int64_t i) { prepare(prepared, i / lanes * kPrepareRows, int32_t(i % lanes)); });

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
  for (int32_t s = 0; s < layer.head.buckets; ++s)
    place_at_.push_back(place_at_.back() + int64_t{a.page_table_widths[s]} * layer.head.page_tokens);
  run_items(a.parallel, a.threads, a.batch * lanes,
            [&](int64_t i) { observe(int32_t(i / lanes), int32_t(i % lanes), prepared); });
}

}  // namespace
}  // namespace kvlathe

extern "C" int32_t kvlathe_cpu_attend(const kvlathe_layer* layer, const kvlathe_attend_args* args,
                                      kvlathe_status* status) {
  return kvlathe::run(status, [&] {
    if (!layer || !args) throw kvlathe::Refusal(KVLATHE_BAD_ARGUMENT, "layer or args is null");
    kvlathe::Step(*layer, *args).run();
  });
}
