// Phase 1: the step's own tokens. RoPE, projection and centre; k' and v' go to their places in the
// pool, q' to memory that the attention reads.
#include <algorithm>

#include "cpu/step.h"

namespace kvlathe {

// One row of lane h, turned by RoPE and times `scale`; zeros up to rank_k where the lane has no
// projection.
void AttendStep::turn(const float* x, int64_t row, int32_t h, float scale, float* out) const {
  const Lane& lane = layer.lanes[h];
  const float* cos = lane.rope ? a.cos + row * layer.head.planes : nullptr;
  const float* sin = lane.rope ? a.sin + row * layer.head.planes : nullptr;
  kernels.rotate(x, cos, sin, lane.planes, lane.input_dim, scale, out);
  if (!lane.projected) std::fill(out + lane.input_dim, out + lane.rank_k, 0.f);
}

// q [count * G, rank_k]: the scaled queries of tokens first .. first + count - 1. `turned` is room
// for them.
void AttendStep::project_queries(float* q, float* turned, int64_t first, int64_t count,
                                 int32_t h) const {
  const Lane& lane = layer.lanes[h];
  const int64_t heads = layer.head.group_size, rank = lane.rank_k;
  const int64_t width = std::max<int64_t>(lane.input_dim, rank);
  for (int64_t i = 0; i < count * heads; ++i) {
    const int64_t row = first + i / heads;
    const float* x = a.q + row * layer.q_width + lane.q_at + i % heads * lane.input_dim;
    turn(x, row, h, a.scale * kLog2E, lane.projected ? turned + i * width : q + i * rank);
  }
  if (!lane.projected) return;
  const float* matrix = a.proj_q + int64_t{h} * layer.head.input_dim * layer.head.rank_k;
  kernels.multiply(turned, width, matrix, layer.head.rank_k, q, rank, int(count * heads), int(rank),
                   lane.input_dim, false);
}

// keys [count, rank_k], before the centre is subtracted.
void AttendStep::project_keys(float* keys, float* turned, int64_t first, int64_t count,
                              int32_t h) const {
  const Lane& lane = layer.lanes[h];
  const int64_t rank = lane.rank_k, width = std::max<int64_t>(lane.input_dim, rank);
  for (int64_t i = 0; i < count; ++i) {
    const float* x = a.k + (first + i) * layer.k_width + lane.k_at;
    turn(x, first + i, h, 1.f, lane.projected ? turned + i * width : keys + i * rank);
  }
  if (!lane.projected) return;
  const float* matrix = a.proj_k + int64_t{h} * layer.head.input_dim * layer.head.rank_k;
  kernels.multiply(turned, width, matrix, layer.head.rank_k, keys, rank, int(count), int(rank),
                   lane.input_dim, false);
}

// Lane h of tokens first .. first + kPrepareRows - 1.
void AttendStep::project(const float* prepared, int64_t first, int32_t h) const {
  thread_local Buffer buffer;
  const Lane& lane = layer.lanes[h];
  const int64_t heads = layer.head.group_size, rank = lane.rank_k;
  const int64_t width = std::max<int64_t>(lane.input_dim, rank);
  const int64_t count = std::min<int64_t>(first + kPrepareRows, a.tokens) - first;
  float* turned = buffer.floats(size_t(kPrepareRows * heads * width + kPrepareRows * rank));
  float* keys = turned + kPrepareRows * heads * width;
  project_queries(const_cast<float*>(queries_of(prepared, h)) + first * heads * rank, turned, first,
                  count, h);
  project_keys(keys, turned, first, count, h);
  for (int64_t i = 0; i < count; ++i) {
    if (sequence_[first + i] >= 0) append(first + i, sequence_[first + i], h, keys + i * rank);
  }
}

void AttendStep::append(int64_t row, int32_t b, int32_t h, const float* keys) const {
  const Lane& lane = layer.lanes[h];
  const LaneRow& slab = *layer.buckets[lane.fresh].rows[h];
  const int64_t place = cached(b, lane.fresh) + row - a.cu_seqlens_q[b],
                within = place % layer.head.page_tokens;
  const int bits = layer.head.hot_bits;
  const int64_t bytes = bits / 8;
  const float* centre =
      layer.head.projected ? a.centre_k + int64_t{h} * layer.head.rank_k : nullptr;
  const float* values = a.v + row * layer.v_width + lane.v_at;
  uint8_t* page_start = page(b, lane.fresh, place);
  kernels.store(keys, centre, lane.rank_k, bits,
                page_start + slab.k + within * lane.rank_k * bytes);
  if (!lane.values_in_keys)
    kernels.store(values, nullptr, lane.rank_v, bits,
                  page_start + slab.v + within * lane.rank_v * bytes);
  if (!a.rows) return;
  uint8_t* out = static_cast<uint8_t*>(a.rows) + row * layer.rows_width * bytes;
  kernels.store(keys, centre, lane.rank_k, bits, out + lane.rows_k_at * bytes);
  if (!lane.values_in_keys)
    kernels.store(values, nullptr, lane.rank_v, bits, out + lane.rows_v_at * bytes);
}

// Padding rows stay zero: whoever multiplies them on should meet no denormals.
void AttendStep::clear_padding(int64_t row) const {
  std::fill_n(a.o + row * layer.o_width, layer.o_width, 0.f);
  if (!a.rows) return;
  const int64_t bytes = layer.rows_width * layer.head.hot_bits / 8;
  std::fill_n(static_cast<uint8_t*>(a.rows) + row * bytes, bytes, 0);
}

}  // namespace kvlathe
