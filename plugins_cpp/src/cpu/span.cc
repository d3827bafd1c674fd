// Attention of a decoding sequence's one query: G rows a lane read a span of the pages as they lie.
// Every byte of K and V is read once and used G times, so memory is the limit: codes are not
// unpacked, and the next slabs are fetched while one is read. Then the spans of a sequence become
// one.
#include <algorithm>
#include <cmath>

#include "cpu/step.h"

namespace kvlathe {

// Blocks begin .. end - 1 for the only query of a sequence. Memory:
// scores [G, kBlock] | one block's integer form or floats | each lane's integer form of q | softmax
// states
void AttendStep::span(const Item& item, const float* prepared) const {
  thread_local Buffer buffer;
  const int64_t m = layer.head.group_size, row = a.cu_seqlens_q[item.sequence];
  const int64_t lanes = item.lane_end - item.lane, own = state_floats(item);
  const int64_t widest = std::max(layer.head.rank_k, layer.widest_v);
  const int64_t scratch = m * (kBlock + kDotScratch) + kBlock * widest,
                of_lanes = lanes * m * kDotScratch;
  float* memory = buffer.floats(size_t(own + scratch + of_lanes));
  float* of_keys = memory + scratch;
  float* next = item.state_at < 0 ? of_keys + of_lanes : states_ + item.state_at;
  std::vector<SoftmaxState> states;
  for (int32_t i = item.lane; i < item.lane_end; ++i) {
    const int32_t width = layer.lanes[layer.order[i]].rank_v;
    states.emplace_back(next, m, width).clear();
    next += SoftmaxState::floats(m, width);
  }
  const int32_t first = layer.order[item.lane];
  const View view = decode_view(item.sequence, first);
  const std::vector<Block>& list = list_blocks(item.sequence, first, view, item.begin, item.end);
  const Rows* slab = list_slabs(item, list).data();
  for (const Block& at : list) {
    const Hidden unseen = hidden(item.sequence, first, at, view.first);
    const bool again = &at != list.data() && at.bucket == (&at - 1)->bucket;
    for (int32_t i = 0; i < lanes; ++i, slab += 2) {
      const int32_t h = layer.order[item.lane + i];
      const float* q = queries_of(prepared, h) + row * m * layer.lanes[h].rank_k;
      attend_span(slab[0], slab[1], unseen, at.count, q, states[size_t(i)], again,
                  of_keys + i * m * kDotScratch, memory);
    }
  }
  if (item.state_at >= 0) return;
  for (int32_t i = 0; i < lanes; ++i)
    normalize(states[size_t(i)], row, layer.lanes[layer.order[item.lane + i]]);
}

// One block of one lane: scores = q k', their online softmax, o += weights v'. `of_keys`: the
// integer form of q, which is there already with `again`.
void AttendStep::attend_span(const Rows& keys, const Rows& values, const Hidden& unseen, int count,
                             const float* q, const SoftmaxState& state, bool again, float* of_keys,
                             float* memory) const {
  const int m = layer.head.group_size;
  const int rank = keys.by_channel ? keys.rows : keys.inner;
  const int width = values.by_channel ? values.rows : values.inner;
  float *scores = memory, *of_block = scores + m * kBlock;
  if (keys.by_channel) {
    kernels.mix(q, rank, keys, scores, kBlock, m, false, of_block);
  } else {
    kernels.dots(q, rank, keys, scores, kBlock, m, false, again, of_keys);
  }
  bound(scores, kBlock, m, count);
  for (int64_t i = 0; unseen.begin < unseen.end && i < m; ++i)
    std::fill(scores + i * kBlock + unseen.begin, scores + i * kBlock + unseen.end, -INFINITY);
  kernels.soften(scores, kBlock, m, count, nullptr, state.m, state.l, state.o, width);
  if (values.by_channel) {
    kernels.dots(scores, kBlock, values, state.o, width, m, true, false, of_block);
  } else {
    kernels.mix(scores, kBlock, values, state.o, width, m, true, of_block);
  }
}

// The spans of one sequence and its lanes: their states become the first one's, which is written
// out.
void AttendStep::merge(const Item* items, int64_t count) const {
  int64_t at = 0;
  for (int64_t i = items->lane; i < items->lane_end; ++i) {
    const Lane& lane = layer.lanes[layer.order[i]];
    SoftmaxState state(states_ + items->state_at + at, layer.head.group_size, lane.rank_v);
    for (const Item* item = items + 1; item < items + count; ++item) {
      state.merge(SoftmaxState(states_ + item->state_at + at, state.rows, state.width));
    }
    normalize(state, a.cu_seqlens_q[items->sequence], lane);
    at += SoftmaxState::floats(state.rows, state.width);
  }
}

// o over the sum of exponentials into the rows of o from `row` on.
void AttendStep::normalize(const SoftmaxState& state, int64_t row, const Lane& lane) const {
  const int64_t heads = layer.head.group_size, width = lane.rank_v;
  for (int64_t i = 0; i < state.rows; ++i) {
    float* out = a.o + (row + i / heads) * layer.o_width + lane.o_at + i % heads * width;
    const float share = 1.f / sum_of(state, i, &lane - layer.lanes.data());
    for (int64_t c = 0; c < width; ++c) out[c] = state.o[i * width + c] * share;
  }
}

}  // namespace kvlathe
