// One packed step of kvlathe::Attend on the CPU: what its phases share. attend.cc says what they
// are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/layer_table.h"
#include "cpu/rows.h"
#include "cpu/select.h"
#include "cpu/softmax_state.h"
#include "cpu/work.h"

namespace kvlathe {

constexpr int64_t kPrepareRows = 32;  // tokens that are projected together

// Tokens first .. first + count - 1 of one sequence's bucket, all in one page.
struct Block {
  int32_t bucket;
  int64_t first;
  int32_t count;
};

// Tokens begin .. end - 1 of a block, which a query does not see.
struct Hidden {
  int64_t begin, end;
};

// What some queries of one lane see: the first `limit` tokens of its fresh bucket, and of all its
// tokens those in the sink and those from place `first` on. Places count the sealed tokens first.
struct View {
  int64_t limit, first;
};

// What one thread attends at a time: a tile of a prompt's queries, or a span of a decoding
// sequence's blocks.
struct Item {
  int32_t sequence;
  int32_t lane, lane_end;  // places in layer.order; a span's lanes have the same blocks
  int64_t begin, end;      // queries of a tile; blocks of a span
  int64_t state_at;  // where its lanes' softmax states lie among the states; -1: the item writes o
                     // itself
};

struct AttendStep {
  const Layer& layer;
  const kvlathe_attend_args& a;
  const Kernels& kernels;
  const int block;  // tokens in a full block

  AttendStep(const Layer& layer, const kvlathe_attend_args& a);
  void run();

 private:
  // attend.cc: the phases in their order, and what is refused.
  void check() const;
  void check_pages(int32_t s) const;
  void find_sequences();
  void project_rows(const float* prepared) const;
  void attend_items(const std::vector<Item>& items, const float* prepared, bool with_rows) const;
  void merge_items(const std::vector<Item>& items) const;
  void observe_rows(const float* prepared);

  // project.cc: the step's own tokens.
  void project(const float* prepared, int64_t first, int32_t h) const;
  void project_queries(float* q, float* turned, int64_t first, int64_t count, int32_t h) const;
  void project_keys(float* keys, float* turned, int64_t first, int64_t count, int32_t h) const;
  void turn(const float* x, int64_t row, int32_t h, float scale, float* out) const;
  void append(int64_t row, int32_t b, int32_t h, const float* keys) const;
  void clear_padding(int64_t row) const;
  const float* queries_of(const float* prepared, int32_t h) const {
    return prepared + a.tokens * q_at_[h];
  }

  // blocks.cc: where a sequence's cached tokens lie.
  Rows rows(int32_t b, int32_t h, const Block& at, bool keys) const;
  View view(int32_t b, int32_t h, int64_t first_query, int64_t last_query) const;
  View decode_view(int32_t b, int32_t h) const {
    const int64_t query = queries(b) - 1;
    return view(b, h, query, query);
  }
  Hidden gap(int32_t b, int32_t h, int32_t s, int64_t tokens, int64_t first, int64_t size) const;
  Hidden hidden(int32_t b, int32_t h, const Block& at, int64_t first) const;
  int64_t seen_tokens(int32_t b, int32_t h, int32_t s, const View& view) const {
    return s == layer.lanes[h].fresh ? view.limit : cached(b, s);
  }
  int64_t blocks(int32_t b, int32_t h, const View& view) const;
  std::vector<Block>& list_blocks(int32_t b, int32_t h, const View& view, int64_t begin,
                                  int64_t end) const;
  bool alike(const Block& a, const Block& b) const;
  void list_again(std::vector<Rows>& list, const Item& item, const Block& at,
                  const Block& before) const;
  std::vector<Rows>& list_slabs(const Item& item, const std::vector<Block>& blocks) const;
  int32_t queries(int32_t b) const { return a.cu_seqlens_q[b + 1] - a.cu_seqlens_q[b]; }
  int64_t cached(int32_t b, int32_t s) const {
    return a.lengths[int64_t{b} * layer.head.buckets + s];
  }
  // Tokens of a lane in front of its fresh bucket.
  int64_t sealed(int32_t b, int32_t h) const {
    int64_t total = 0;
    for (int32_t s = 0; s < layer.head.buckets; ++s)
      if (layer.buckets[s].rows[h] && s != layer.lanes[h].fresh) total += cached(b, s);
    return total;
  }
  int64_t held(int32_t b, int32_t s) const {
    return cached(b, s) + (layer.buckets[s].fresh ? queries(b) : 0);
  }
  uint8_t* page(int32_t b, int32_t s, int64_t token) const {
    const int64_t id =
        a.page_tables[s][int64_t{b} * a.page_table_widths[s] + token / layer.head.page_tokens];
    return static_cast<uint8_t*>(a.pool) + id * layer.buckets[s].page_stride;
  }

  // items.cc: the work of a step, cut for the threads.
  std::vector<Item> list_items(int64_t& floats) const;
  void list_tiles(std::vector<Item>& items, int32_t b) const;
  void list_spans(std::vector<Item>& items, int32_t b, int64_t slices, int64_t& floats) const;
  int64_t spans(int32_t b, int32_t h) const;
  int64_t slices() const;
  int64_t state_floats(const Item& item) const;

  // tile.cc and span.cc: attention.
  void tile(const Item& item, const float* prepared) const;
  void attend_tile(const Item& item, const Block& at, const float* q, const SoftmaxState& state,
                   float* memory) const;
  bool see(const Item& item, const Block& at, float* scores, int32_t* seen, int64_t m) const;
  void span(const Item& item, const float* prepared) const;
  void attend_span(const Rows& keys, const Rows& values, const Hidden& unseen, int count,
                   const float* q, const SoftmaxState& state, bool again, float* of_keys,
                   float* memory) const;
  void merge(const Item* items, int64_t count) const;
  void normalize(const SoftmaxState& state, int64_t row, const Lane& lane) const;
  void bound(float* scores, int64_t ld, int64_t rows, int64_t count) const {
    if (a.softcap != 0) kernels.bound(scores, ld, int(rows), int(count), a.softcap * kLog2E);
  }
  // The sum of exponentials of row i of a state of lane h, with its query head's sink.
  float sum_of(const SoftmaxState& state, int64_t i, int64_t h) const {
    if (!a.sinks) return state.l[i];
    const int64_t heads = layer.head.group_size;
    return state.l[i] + std::exp2(a.sinks[h * heads + i % heads] * kLog2E - state.m[i]);
  }

  // observe.cc: the attention that the rows of an observation window give.
  void observe(int32_t b, int32_t h, const float* prepared) const;
  void observe(int32_t b, int32_t h, const float* prepared, const int64_t* rows,
               int64_t count) const;
  void add_shares(int32_t b, int32_t h, const Block& at, const float* weights, int64_t limit,
                  float share) const;
  int64_t seen(const Block& at, int32_t fresh, int64_t limit) const {
    return at.bucket == fresh ? std::clamp<int64_t>(limit - at.first, 0, at.count)
                              : int64_t{at.count};
  }

  std::vector<int64_t> q_at_;      // where each lane's prepared queries start: tokens times this
  std::vector<int32_t> sequence_;  // of each row; -1: a padding row
  float* states_ = nullptr;        // of all spans
  std::vector<int64_t> place_at_;  // where each bucket's places start in the mass, and those of the
                                   // step's own tokens
};

}  // namespace kvlathe
