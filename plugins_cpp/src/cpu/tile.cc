// Attention of a prompt's queries: a tile of m = queries * G rows against every block that the last
// of them sees. A block of K and V is unpacked once for the whole tile, so the products, not the
// memory, are the limit.
#include <algorithm>
#include <cmath>

#include "cpu/step.h"

namespace kvlathe {

// scores [rows, kBlock] | unpacked [ranks, kBlock] | turned [ranks, kBlock] | seen [rows] | the
// softmax state
void AttendStep::tile(const Item& item, const float* prepared) const {
  thread_local Buffer buffer;
  const int32_t h = layer.order[item.lane];
  const Lane& lane = layer.lanes[h];
  const int64_t heads = layer.head.group_size, rows = (item.end - item.begin) * heads;
  const int64_t ranks = std::max(lane.rank_k, lane.rank_v);
  const int64_t scratch = rows * kBlock + 2 * ranks * kBlock + (rows + 15) / 16 * 16;
  float* memory = buffer.floats(size_t(scratch + SoftmaxState::floats(rows, lane.rank_v)));
  SoftmaxState state(memory + scratch, rows, lane.rank_v);
  state.clear();
  const int64_t row = a.cu_seqlens_q[item.sequence] + item.begin;
  const float* q = queries_of(prepared, h) + row * heads * lane.rank_k;
  const View seen = view(item.sequence, h, item.begin, item.end - 1);
  for (const Block& at : list_blocks(item.sequence, h, seen, 0, INT64_MAX))
    attend_tile(item, at, q, state, memory);
  normalize(state, row, lane);
}

// How many of a block's first tokens each of the tile's m rows sees; scores of those among them that
// its window hides become -inf. False where every row sees all.
bool AttendStep::see(const Item& item, const Block& at, float* scores, int32_t* seen,
                     int64_t m) const {
  const int32_t h = layer.order[item.lane];
  const Lane& lane = layer.lanes[h];
  const int64_t heads = layer.head.group_size;
  const int64_t before =
      cached(item.sequence, lane.fresh) + item.begin;  // tokens in front of the tile's first query
  const bool causal = at.bucket == lane.fresh && at.first + at.count > before + 1;
  const int64_t last = view(item.sequence, h, item.end - 1, item.end - 1).first;
  const Hidden most = hidden(item.sequence, h, at, last);
  if (!causal && most.begin >= most.end) return false;
  for (int64_t i = 0; i < m; ++i) {
    const int64_t query = item.begin + i / heads;
    const View own = view(item.sequence, h, query, query);
    const Hidden gone = hidden(item.sequence, h, at, own.first);
    seen[i] = at.count;
    if (at.bucket == lane.fresh)
      seen[i] = int32_t(std::clamp<int64_t>(own.limit - at.first, 0, at.count));
    if (gone.begin == 0 && gone.end >= seen[i]) {
      seen[i] = 0;
    } else if (gone.begin < gone.end) {
      std::fill(scores + i * kBlock + gone.begin, scores + i * kBlock + gone.end, -INFINITY);
    }
  }
  return true;
}

// One block: scores = q k', their online softmax, o += weights v'.
void AttendStep::attend_tile(const Item& item, const Block& at, const float* q,
                             const SoftmaxState& state, float* memory) const {
  const int32_t h = layer.order[item.lane];
  const Lane& lane = layer.lanes[h];
  const int64_t ranks = std::max(lane.rank_k, lane.rank_v);
  const int rank = lane.rank_k, width = lane.rank_v, m = int(state.rows),
            padded = (at.count + 15) / 16 * 16;
  float *scores = memory, *packed = scores + m * kBlock, *turned = packed + ranks * kBlock;
  auto* seen = reinterpret_cast<int32_t*>(turned + ranks * kBlock);
  const Rows keys = rows(item.sequence, h, at, true), values = rows(item.sequence, h, at, false);
  int64_t ld;
  const float* k = kernels.unpack(keys, packed, &ld);
  if (!keys.by_channel) {
    kernels.transpose(k, ld, turned, kBlock, at.count, rank);
    k = turned;
    ld = kBlock;
  }
  kernels.multiply(q, rank, k, ld, scores, kBlock, m, padded, rank, false);
  bound(scores, kBlock, m, at.count);
  const bool partly = see(item, at, scores, seen, m);
  kernels.soften(scores, kBlock, m, at.count, partly ? seen : nullptr, state.m, state.l, state.o,
                 width);
  const float* v = kernels.unpack(values, packed, &ld);
  if (values.by_channel) {
    kernels.transpose(v, ld, turned, width, width, padded);
    v = turned;
    ld = width;
  }
  kernels.multiply(scores, kBlock, v, ld, state.o, width, m, width, at.count, true);
}

}  // namespace kvlathe
