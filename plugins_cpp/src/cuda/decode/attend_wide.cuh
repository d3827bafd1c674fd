// Decode attention of wide calls whose parts all have 16 bits. It is attend_general (attend_general.cuh)
// without the paths of codes, and made for large rows: a bulk copy brings two of them, the block keeps its
// queries once, and warps merge their sums a few channels at a time. So few instructions bring a tile, and
// shared memory holds those of more warps.
//
// A tile has K [token][rank_k], then V [token][rank_v], and kRowGap bytes after every second row. A matrix
// load takes every second token: its eight rows meet no bank twice. So of a fragment's 16 tokens the first
// half are the even ones.
#pragma once

#include "cuda/decode/attend_general.cuh"

namespace kvlathe::cuda {

// Chains of sums that a score is added up in.
constexpr int kWideChains = 4;

// Where queries lie as fragments of the second factor: those of two steps of 16 channels, 16 bytes a
// lane.
__device__ inline uint32_t queries_at(uint32_t queries, int step) {
  return queries + step / 2 * kTwoSteps + step % 2 * 8;
}

// Keeps the queries of columns `first`, first + 1, ... of a span, kMaxGroup at most. The whole crew.
template <class P, int kParts>
__device__ void keep_columns(const P& p, const Span<kParts>& span, uint32_t queries, int first,
                             Crew crew) {
  const auto& head = p.head[span.head];
  const int columns = span.pair.columns(p, span.head) - first;
#pragma unroll 1
  for (int i = crew.thread; i < wide_queries_bytes(head.rank_k) / 8; i += crew.threads) {
    const int lane = i % 32, column = lane / 4;
    uint2 x = {0, 0};
    if (column < columns && i / 2 < head.rank_k) {
      const int at = first_column(p, span.head) + first + column, row = at / p.group_size;
      const auto* q = reinterpret_cast<const uint32_t*>(
          p.q + (span.sequence + row) * p.q_stride + head.q_offset +
          (at - row * p.group_size) * head.rank_k + i / 32 * 16 + lane % 4 * 2);
      x = {__ldcg(q), __ldcg(q + 4)};
    }
    shared_at<uint2>(queries_at(queries, i / 32) + lane * 16) = x;
  }
}

// A tile as this lane's matrix loads see it.
struct WideRows {
  uint32_t k, v;       // this lane's row of the first unit
  int next_k, next_v;  // bytes of a unit
  int steps_k, steps_v;

  __device__ WideRows(uint32_t tile, int units, int rank_k, int rank_v, bool in_keys) {
    const int lane = threadIdx.x % 32, of_v = in_keys ? rank_k : rank_v;
    next_k = kRowTokens / 2 * two_rows(rank_k), next_v = kRowTokens / 2 * two_rows(of_v);
    k = tile + lane % 8 * two_rows(rank_k) + lane / 8 % 2 * 2 * rank_k + lane / 16 * 16;
    v = tile + (in_keys ? 0 : units * next_k) + lane % 8 * two_rows(of_v) + lane / 16 * 2 * of_v +
        lane / 8 % 2 * 16;
    steps_k = rank_k / 16, steps_v = rank_v / 16;
  }
};

// Scores of 16 tokens, in base 2. queries: as kept, this lane's; zeros follow them. A batch of matrices
// takes the last one again past the end.
template <class E>
__device__ __forceinline__ void score_rows(float (&s)[4], uint32_t k, uint32_t queries, int steps,
                                           float scale_log2) {
  float sums[kWideChains][4] = {};
#pragma unroll 1
  for (int first = 0; first < steps; first += kWideBatch) {
    uint32_t a[kWideBatch][4], q[kWideBatch / 2][4];
#pragma unroll
    for (int i = 0; i < kWideBatch; ++i) load_matrices(a[i], k + 32 * min(first + i, steps - 1));
#pragma unroll
    for (int i = 0; i < kWideBatch / 2; ++i) load_vector(q[i], queries + kTwoSteps * i);
#pragma unroll
    for (int i = 0; i < kWideBatch; ++i)
      E::multiply(sums[i % kWideChains], a[i], q[i / 2][i % 2 * 2], q[i / 2][i % 2 * 2 + 1]);
    queries += kTwoSteps * kWideBatch / 2;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    s[i] = ((sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i])) * scale_log2;
}

// Adds V of 16 tokens, whose scores are s (-inf where masked). Sums past the end are of no use.
template <class E, int kSteps>
__device__ __forceinline__ void add_rows(SoftmaxState<kSteps>& state, uint32_t v, int steps,
                                         float (&s)[4]) {
  state.weigh(s);
  const uint32_t p0 = transposed(E::pack(s[0], s[1])), p1 = transposed(E::pack(s[2], s[3]));
#pragma unroll
  for (int first = 0; first < kSteps; first += kWideBatch) {
    if (first >= steps) break;
    uint32_t a[kWideBatch][4];
#pragma unroll
    for (int i = 0; i < kWideBatch; ++i)
      load_matrices_transposed(a[i], v + 32 * min(first + i, steps - 1));
#pragma unroll
    for (int i = 0; i < kWideBatch; ++i) E::multiply(state.o[first + i], a[i], p0, p1);
  }
}

// P: BundledPlain256 or BundledPlainWidest.
template <class E, class P>
__global__ void __launch_bounds__(general_warps<P>() * 32, P::kBlocks)
    attend_wide(const __grid_constant__ P p) {
  constexpr int kParts = P::kSlots, kSteps = P::kRankV / 16;
  // Rings of the warps | merge buffer | queries.
  KVLATHE_DYNAMIC_SHARED(shared);
  __shared__ Block<kParts, P::kColumns> block;
  __shared__ Runs<kParts> runs[general_warps<P>()];
  __shared__ __align__(8) uint64_t barriers[general_warps<P>()][kSlots];
  __shared__ Parked parked_of[general_warps<P>()];
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const Crew crew{int(threadIdx.x), int(blockDim.x)};
  if (threadIdx.x % 32 < kSlots) init_barrier(shared_address(&barriers[warp][threadIdx.x % 32]));
  auto* buffer = reinterpret_cast<float*>(shared + warps * p.ring_bytes);
  const uint32_t queries = shared_address(buffer + p.merge_floats);
  Parked& parked = parked_of[warp];
  Ring ring{{},
            shared_address(shared) + warp * p.ring_bytes,
            p.ring_bytes,
            shared_address(barriers[warp])};

  const Planned<kParts> plan(p);
  Producer<P, 16, true> producer(p, plan, runs[warp], ring, parked);
  if (threadIdx.x == 0) {
    block.walk = plan.walk, block.share = plan.share, block.begin_start = plan.begin_start,
    block.ending.there = false;
  }
  publish_barriers();
  __syncthreads();
  wait_for_previous_kernel();
  if (plan.some_empty) write_empty<E>(p, crew);
  if (!plan.any) return;
  SoftmaxState<kSteps> state;
  state.clear();
  BundleHides hidden;
  Turn turn;
  int part = -1;  // of the run being attended
  producer.park(turn);
  for (;;) {  // as in attend_general
    producer.take_up();
    producer.fill(false);
    producer.recall(turn);
    auto& [unit, last, head, length, units, bytes, bits] = turn;
    if (unit >= last) {  // the next run
      if (++part == kParts) {
        producer.park(turn);
        finish_sliced<E>(p, state, buffer, block, crew);
        state.clear();
        part = 0;
        producer.take_up();
      }
      if (!block.walk.valid) break;
      const auto& span = block.walk.span;
      if (part == 0) {
        keep_columns(p, span, queries, 0, crew);
        crew.meet();
      }
      head = span.head;
      const auto& at = p.head[head];
      const Run run(p, span, part);
      units = producer.units_of(at.lane[part]);
      unit = run.first + turn_of(part) * units, last = run.last;
      length = tokens_of<P>(run.length);
      if (unit < last) {
        bytes = producer.room_of(at.lane[part]);
        hidden.load(p.form[p.part_in(head, part)], span.sequence, run.length,
                    first_column(p, head) + threadIdx.x % 4 * 2, p.group_size);
      }
      producer.park(turn);
      continue;
    }
    const uint32_t tile = ring.wait_oldest<true>(bytes);
    const int first = unit * kRowTokens,
              rows = min(min(units, last - unit) * kRowTokens, length - first);
    unit += warps * units;
    ring.drop_oldest(bytes);
    producer.park(turn);
    const auto& at = p.head[head];
    WideRows at_rows(tile, units, at.rank_k, at.rank_v, at.lane[part].v == at.lane[part].k);
#pragma unroll 1
    for (int own = 0; own < rows; own += kRowTokens) {
      float s[4];
      score_rows<E>(s, at_rows.k, queries + threadIdx.x % 32 * 16, at_rows.steps_k, p.scale_log2);
      bound_scores(s, p);
      hide_unseen(s, first + own, min(kRowTokens, rows - own), threadIdx.x % 32 / 4 * 2, 1, hidden);
      add_rows<E>(state, at_rows.v, at_rows.steps_v, s);
      at_rows.k += at_rows.next_k, at_rows.v += at_rows.next_v;
    }
    fence_for_bulk_copies();  // which fill the room that was read by ordinary instructions
  }
  if (block.ending.there)
    finish_pair<E, true>(p, block.ending, reinterpret_cast<float*>(shared), crew);
}

}  // namespace kvlathe::cuda
