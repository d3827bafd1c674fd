// Phase 4: observed attention (docs/attend.md). Rows with an observation weight take a softmax of
// their own; their shares are summed by place, per lane, into `mass`.
#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/step.h"

namespace kvlathe {
namespace {

constexpr int64_t kObserved = 64;  // rows times heads that are observed together, about

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
  const int64_t width = int64_t(blocks.size()) * kBlock;
  float* q = buffer.floats(size_t(m * (rank + width) + 2 * rank * kBlock));
  float *scores = q + m * rank, *packed = scores + m * width, *turned = packed + rank * kBlock;
  for (int64_t i = 0; i < count; ++i) {
    std::copy_n(queries_of(prepared, h) + observed[i] * heads * rank, heads * rank,
                q + i * heads * rank);
  }
  for (size_t j = 0; j < blocks.size(); ++j) {
    const Rows keys = rows(b, h, blocks[j], true);
    const int padded = (blocks[j].count + 15) / 16 * 16;
    int64_t ld;
    const float* k = kernels.unpack(keys, packed, &ld);
    if (!keys.by_channel) {
      kernels.transpose(k, ld, turned, kBlock, blocks[j].count, int(rank));
      k = turned;
      ld = kBlock;
    }
    kernels.multiply(q, rank, k, ld, scores + j * kBlock, width, int(m), padded, int(rank), false);
  }
  for (int64_t i = 0; i < m; ++i) {
    const int64_t row = observed[i / heads];
    add_shares(b, h, blocks, scores + i * width, before + row, a.observation_weights[row]);
  }
}

// One row's scores of `blocks`, kBlock apart, of which it sees `limit` tokens of the fresh bucket:
// its shares by place.
void AttendStep::add_shares(int32_t b, int32_t h, const std::vector<Block>& blocks, float* scores,
                            int64_t limit, float weight) const {
  const int32_t fresh = layer.lanes[h].fresh;
  float m = -INFINITY;
  double l = 0;
  for (size_t j = 0; j < blocks.size(); ++j) {
    const float* first = scores + j * kBlock;
    m = std::max(
        m, *std::max_element(first, first + std::max<int64_t>(seen(blocks[j], fresh, limit), 1)));
  }
  for (size_t j = 0; j < blocks.size(); ++j) {
    const int64_t count = seen(blocks[j], fresh, limit);
    for (int64_t t = 0; t < count; ++t)
      l += scores[j * kBlock + t] = std::exp2(scores[j * kBlock + t] - m);
  }
  float* mass = a.mass + (int64_t{b} * layer.head.lanes + h) * a.mass_places;
  const float share = float(weight / l);
  for (size_t j = 0; j < blocks.size(); ++j) {
    const Block& at = blocks[j];
    const int64_t old = cached(b, at.bucket), count = seen(at, fresh, limit);
    for (int64_t t = 0; t < count; ++t) {
      const int64_t token = at.first + t;
      const int64_t place =
          token < old ? place_at_[at.bucket] + token : place_at_.back() + token - old;
      mass[place] += scores[j * kBlock + t] * share;
    }
  }
}

}  // namespace kvlathe
