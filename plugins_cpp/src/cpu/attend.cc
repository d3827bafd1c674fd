// kvlathe::Attend on the CPU: one layer, one packed step of any mix of prefill and decode.
//
// 1. project (project.cc): RoPE, projection and centre of the fresh tokens; k' and v' go to their
//    places in the pool.
// 2. attend: now all of a sequence's tokens are in pages, so fresh and old ones are read alike, in
//    blocks of at most 64 tokens (blocks.cc). A prompt's queries go in tiles (tile.cc): a block of
//    keys and values is unpacked once for the whole tile. A decoding sequence's few query heads
//    read the pages as they lie, cut into spans so that all threads have work (span.cc). items.cc
//    lists both.
// 3. merge (span.cc): the spans' softmax states become one (softmax_state.h).
// 4. observe (observe.cc): rows with an observation weight take a softmax of their own, whose
//    shares are summed by place.
#include <algorithm>
#include <string>
#include <vector>

#include "cpu/step.h"

namespace kvlathe {
namespace {

int block_of(int page) {
  int size = std::min(page, kBlock);
  while (page % size || size % 16) --size;
  return size;
}

}  // namespace

AttendStep::AttendStep(const Layer& layer, const kvlathe_attend_args& a)
    : layer(layer), a(a), kernels(kernels_for(a.isa)), block(block_of(layer.head.page_tokens)) {}

void AttendStep::check() const {
  const TableHeader& t = layer.head;
  check_version(a.abi_version);
  require(a.tokens >= 0 && a.batch >= 0, KVLATHE_BAD_ARGUMENT, "tokens or batch is negative");
  if (a.tokens == 0 || a.batch == 0) return;
  require(a.q && a.k && a.v && a.o && a.cu_seqlens_q && a.lengths && a.page_tables &&
              a.page_table_widths && a.pool,
          KVLATHE_BAD_ARGUMENT, "q, k, v, o, cu_seqlens_q, lengths, page_tables or pool is null");
  require(!t.rope || (a.cos && a.sin), KVLATHE_BAD_ARGUMENT,
          "the layer has RoPE and cos or sin is null");
  require(!t.projected || (a.proj_q && a.proj_k && a.centre_k), KVLATHE_BAD_ARGUMENT,
          "the layer projects and a projection is null");
  check_aligned(a.pool, 64, "the pool");
  require(a.cu_seqlens_q[0] >= 0 && a.cu_seqlens_q[a.batch] <= a.tokens, KVLATHE_BAD_ARGUMENT,
          "cu_seqlens_q leaves the step's tokens");
  require(!a.observation_weights || a.mass, KVLATHE_BAD_ARGUMENT,
          "rows are observed and mass is null");
  for (int32_t b = 0; b < a.batch; ++b)
    require(queries(b) >= 0, KVLATHE_BAD_ARGUMENT, "cu_seqlens_q falls");
  for (int32_t s = 0; s < t.buckets; ++s) check_pages(s);
}

void AttendStep::check_pages(int32_t s) const {
  const Bucket& bucket = layer.buckets[s];
  const int64_t pages = bucket.page_stride ? a.pool_bytes / bucket.page_stride : 0;
  require(a.page_tables[s], KVLATHE_BAD_ARGUMENT, "a page table is null");
  for (int32_t b = 0; b < a.batch && bucket.lane_count; ++b) {
    require(cached(b, s) >= 0, KVLATHE_BAD_ARGUMENT, "a length is negative");
    const int64_t used = (held(b, s) + layer.head.page_tokens - 1) / layer.head.page_tokens;
    require(used <= a.page_table_widths[s], KVLATHE_TOO_SMALL,
            "sequence " + std::to_string(b) + " needs " + std::to_string(used) +
                " pages of bucket " + std::to_string(s) + " and its page table has " +
                std::to_string(a.page_table_widths[s]));
    for (int64_t i = 0; i < used; ++i) {
      const int32_t id = a.page_tables[s][int64_t{b} * a.page_table_widths[s] + i];
      require(id >= 0 && id < pages, KVLATHE_TOO_SMALL,
              "page id " + std::to_string(id) + " lies outside the pool of " +
                  std::to_string(pages) + " pages");
    }
  }
}

// Where each lane's queries lie, and whose each row is. Padding rows are cleared.
void AttendStep::find_sequences() {
  int64_t q_floats = 0;
  for (const Lane& lane : layer.lanes) {
    q_at_.push_back(q_floats);
    q_floats += int64_t{layer.head.group_size} * lane.rank_k;
  }
  q_at_.push_back(q_floats);
  sequence_.assign(size_t(a.tokens), -1);
  for (int32_t b = 0; b < a.batch; ++b) {
    std::fill(sequence_.begin() + a.cu_seqlens_q[b], sequence_.begin() + a.cu_seqlens_q[b + 1], b);
  }
  for (int64_t row = 0; row < a.tokens; ++row) {
    if (sequence_[row] < 0) clear_padding(row);
  }
}

void AttendStep::project_rows(const float* prepared) const {
  const int64_t lanes = layer.head.lanes, groups = (a.tokens + kPrepareRows - 1) / kPrepareRows;
  run_items(a.parallel, a.threads, groups * lanes,
            [&](int64_t i) { project(prepared, i / lanes * kPrepareRows, int32_t(i % lanes)); });
}

// `with_rows`: each item projects the step's one row for its own lanes first, so that threads meet
// once in place of twice.
void AttendStep::attend_items(const std::vector<Item>& items, const float* prepared,
                              bool with_rows) const {
  run_items(a.parallel, a.threads, int64_t(items.size()), [&](int64_t i) {
    for (int32_t at = items[i].lane; with_rows && at < items[i].lane_end; ++at)
      project(prepared, 0, layer.order[at]);
    if (queries(items[i].sequence) > 1) {
      tile(items[i], prepared);
    } else {
      span(items[i], prepared);
    }
  });
}

// Items of the same sequence and lanes stand together.
void AttendStep::merge_items(const std::vector<Item>& items) const {
  for (size_t i = 0; i < items.size();) {
    size_t end = i + 1;
    while (end < items.size() && items[end].lane == items[i].lane &&
           items[end].sequence == items[i].sequence)
      ++end;
    if (items[i].state_at >= 0) merge(&items[i], int64_t(end - i));
    i = end;
  }
}

void AttendStep::observe_rows(const float* prepared) {
  const int64_t lanes = layer.head.lanes;
  std::fill_n(a.mass, int64_t{a.batch} * lanes * a.mass_places, 0.f);
  place_at_.assign(1, 0);
  for (int32_t s = 0; s < layer.head.buckets; ++s) {
    place_at_.push_back(place_at_.back() +
                        int64_t{a.page_table_widths[s]} * layer.head.page_tokens);
  }
  run_items(a.parallel, a.threads, a.batch * lanes,
            [&](int64_t i) { observe(int32_t(i / lanes), int32_t(i % lanes), prepared); });
}

void AttendStep::run() {
  thread_local Buffer prepared_buffer, state_buffer;
  check();
  if (a.tokens == 0 || a.batch == 0) return;
  find_sequences();
  const float* prepared = prepared_buffer.floats(size_t(a.tokens * q_at_.back()));
  int64_t floats = 0;
  const std::vector<Item> items = list_items(floats);
  const bool with_rows = a.tokens == 1 && floats == 0;  // every lane is one item's
  if (!with_rows) project_rows(prepared);
  states_ = state_buffer.floats(size_t(floats));
  attend_items(items, prepared, with_rows);
  merge_items(items);
  if (a.observation_weights) observe_rows(prepared);
}

}  // namespace kvlathe

extern "C" int32_t kvlathe_cpu_attend(const kvlathe_layer* layer, const kvlathe_attend_args* args,
                                      kvlathe_status* status) {
  return kvlathe::run(status, [&] {
    if (!layer || !args) throw kvlathe::Refusal(KVLATHE_BAD_ARGUMENT, "layer or args is null");
    kvlathe::AttendStep(*layer, *args).run();
  });
}
