// Phase 4: observed attention (docs/attend.md). Rows with an observation weight take a softmax of
// their own; their shares are summed by place, per lane, into `mass`. Of rows with a weight below 0
// it holds the largest share instead.
#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/step.h"

namespace kvlathe {
namespace {

constexpr int64_t kObserved = 64;  // rows times heads that are observed together, about

// What one row gives `count` places: added up or, where its share is below 0, the largest.
void take(const float* weights, int64_t count, float share, float* mass) {
  if (share < 0) {
    for (int64_t t = 0; t < count; ++t) mass[t] = std::max(mass[t], -share * weights[t]);
  } else {
    for (int64_t t = 0; t < count; ++t) mass[t] += share * weights[t];
  }
}

}  // namespace

// Rows of sequence b with a weight: what lane h's query heads give each place.
void AttendStep::observe(int32_t b, int32_t h, const float* prepared) const {
  std::vector<int64_t> observed;
  for (int64_t row = a.cu_seqlens_q[b]; row < a.cu_seqlens_q[b + 1]; ++row) {
    if (a.observation_weights[row] != 0) observed.push_back(row);
  }
  const int64_t step = std::max<int64_t>(kObserved / layer.head.group_size, 1),
                count = int64_t(observed.size());
  for (int64_t i = 0; i < count; i += step)
    observe(b, h, prepared, observed.data() + i, std::min(step, count - i));
}

void AttendStep::observe(int32_t b, int32_t h, const float* prepared, const int64_t* observed,
                         int64_t count) const {
  thread_local Buffer buffer;
  const Lane& lane = layer.lanes[h];
  const int64_t heads = layer.head.group_size, rank = lane.rank_k, m = count * heads;
  // A row sees this many tokens of the fresh bucket more than its number.
  const int64_t before = cached(b, lane.fresh) - a.cu_seqlens_q[b] + 1;
  const std::vector<Block> blocks =
      list_blocks(b, h, {before + observed[count - 1], 0}, 0, INT64_MAX);
  const int64_t number = int64_t(blocks.size()), width = number * kBlock;
  const int64_t scratch = m * (rank + width + number + 1) + 2 * rank * kBlock;
  float* q = buffer.floats(size_t(scratch + SoftmaxState::floats(m, 0)));
  float *scores = q + m * rank, *packed = scores + m * width, *turned = packed + rank * kBlock;
  float* maxima = turned + rank * kBlock;  // of each row, after each block
  auto* seen_by = reinterpret_cast<int32_t*>(maxima + m * number);
  SoftmaxState state(q + scratch, m, 0);
  state.clear();
  for (int64_t i = 0; i < count; ++i) {
    std::copy_n(queries_of(prepared, h) + observed[i] * heads * rank, heads * rank,
                q + i * heads * rank);
  }
  for (int64_t j = 0; j < number; ++j) {
    const Block& at = blocks[j];
    const Rows keys = rows(b, h, at, true);
    const int padded = (at.count + 15) / 16 * 16;
    int64_t ld;
    const float* k = kernels.unpack(keys, packed, &ld);
    if (!keys.by_channel) {
      kernels.transpose(k, ld, turned, kBlock, at.count, int(rank));
      k = turned;
      ld = kBlock;
    }
    float* own = scores + j * kBlock;
    kernels.multiply(q, rank, k, ld, own, width, int(m), padded, int(rank), false);
    bound(own, width, m, at.count);
    for (int64_t i = 0; i < m; ++i)
      seen_by[i] = int32_t(seen(at, lane.fresh, before + observed[i / heads]));
    kernels.soften(own, width, int(m), at.count, seen_by, state.m, state.l, state.o, 0);
    std::copy_n(state.m, m, maxima + j * m);
  }
  for (int64_t i = 0; i < m; ++i) {
    const int64_t row = observed[i / heads];
    const float total = sum_of(state, i, h);
    for (int64_t j = 0; j < number; ++j) {
      const float later = std::exp2(maxima[j * m + i] - state.m[i]);
      const float share = a.observation_weights[row] * later / total;
      add_shares(b, h, blocks[j], scores + i * width + j * kBlock, before + row, share);
    }
  }
}

// What one row that sees `limit` tokens of the fresh bucket gives a block: its weights times `share`.
void AttendStep::add_shares(int32_t b, int32_t h, const Block& at, const float* weights,
                            int64_t limit, float share) const {
  float* mass = a.mass + (int64_t{b} * layer.head.lanes + h) * a.mass_places;
  const int64_t old = cached(b, at.bucket), count = seen(at, layer.lanes[h].fresh, limit);
  const int64_t of_old = std::clamp<int64_t>(old - at.first, 0, count);
  take(weights, of_old, share, mass + place_at_[at.bucket] + at.first);
  take(weights + of_old, count - of_old, share, mass + place_at_.back() + at.first + of_old - old);
}

}  // namespace kvlathe
