// Decode attention of wide calls with many query heads, whose parts all have 16 bits (MLA; rows of a
// prompt together). It is attend_wide (attend_wide.cuh), but the warps of a block attend the same tiles,
// kMaxGroup query heads each: a tile is fetched once for all. One more warp brings the tiles, and gives
// its warpgroup's registers to the others. Each warp sees all tokens of a span, so nothing is merged
// within a block.
#pragma once

#include "cuda/decode/attend_wide.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KVLATHE_TEAMS
#endif

namespace kvlathe::cuda {

// Registers that a warpgroup gives to others, or takes from them.
template <int kCount>
__device__ inline void give_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
template <int kCount>
__device__ inline void take_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

// The warps that attend, and the one that brings tiles.
__device__ inline void meet_team() { meet_apart((kTeamWarps + 1) * 32); }

// score_rows (attend_wide.cuh), and half a batch is on its way while another is multiplied.
template <class E>
__device__ __forceinline__ void score_ahead(float (&s)[4], uint32_t k, uint32_t queries, int steps,
                                            float scale_log2) {
  constexpr int kHalf = kWideBatch / 2;
  float sums[kHalf][4] = {};
  uint32_t a[2][kHalf][4], q[2][kHalf / 2][4];
  const auto fetch = [&](uint32_t (&to)[kHalf][4], uint32_t (&of)[kHalf / 2][4], int first) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) load_matrices(to[i], k + 32 * min(first + i, steps - 1));
#pragma unroll
    for (int i = 0; i < kHalf / 2; ++i) load_vector(of[i], queries + kTwoSteps * (first / 2 + i));
  };
  const auto multiply = [&](const uint32_t (&x)[kHalf][4], const uint32_t (&of)[kHalf / 2][4]) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i)
      E::multiply(sums[i], x[i], of[i / 2][i % 2 * 2], of[i / 2][i % 2 * 2 + 1]);
  };
  fetch(a[0], q[0], 0);
#pragma unroll 1
  for (int first = 0; first < steps; first += kWideBatch) {
    fetch(a[1], q[1], first + kHalf);
    multiply(a[0], q[0]);
    if (first + kWideBatch < steps) fetch(a[0], q[0], first + kWideBatch);
    multiply(a[1], q[1]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    s[i] = ((sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i])) * scale_log2;
}

// add_rows likewise.
template <class E, int kSteps>
__device__ __forceinline__ void add_ahead(SoftmaxState<kSteps>& state, uint32_t v, int steps,
                                          float (&s)[4]) {
  uint32_t a[2][kWideBatch][4];
  const auto fetch = [&](uint32_t (&to)[kWideBatch][4], int first) {
#pragma unroll
    for (int i = 0; i < kWideBatch; ++i)
      load_matrices_transposed(to[i], v + 32 * min(first + i, steps - 1));
  };
  fetch(a[0], 0);
  state.weigh(s);
  const uint32_t p0 = transposed(E::pack(s[0], s[1])), p1 = transposed(E::pack(s[2], s[3]));
#pragma unroll
  for (int first = 0; first < kSteps; first += kWideBatch) {
    if (first >= steps) break;
    if (first + kWideBatch < kSteps) fetch(a[first / kWideBatch % 2 ^ 1], first + kWideBatch);
#pragma unroll
    for (int i = 0; i < kWideBatch; ++i)
      E::multiply(state.o[first + i], a[first / kWideBatch % 2][i], p0, p1);
  }
}

// Brings the tiles of the block's spans into its ring. All warps meet before each tile: then they are
// done with the tile before it, whose room is filled. A whole warp.
template <class P, int kParts>
__device__ void bring_tiles(const P& p, const Planned<kParts>& plan, Runs<kParts>& runs,
                            Parked& parked, Ring ring) {
  Producer<P, 16, false> producer(p, plan, runs, ring, parked);
  producer.take_up();
  producer.fill(false);
  for (bool first = true;; first = false) {
    meet_team();
    if (!first) ring.drop_oldest(int(load_word(ring.barriers + ring.slot * 8 + kPlaces + 4)));
    producer.take_up();
    producer.fill(false);
    if (producer.unit >= producer.last && ring.tiles == 1) return;
  }
}

// Writes o / l of one warp's columns, `first` the first one in the item; or leaves them as a partial
// result where the pair goes on in another block. Whole warp.
template <class E, class P, int kSteps, int kParts>
__device__ __forceinline__ void put_columns(const P& p, SoftmaxState<kSteps>& state,
                                            const Span<kParts>& span, int first, int columns) {
  const auto& head = p.head[span.head];
  const bool from_start = span.first == 0, whole = from_start && span.last == span.total;
  const int lane = threadIdx.x % 32, rank_v = head.rank_v;
  state.complete();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int column = lane % 4 * 2 + i, own = first + column;
    if (column >= columns) continue;
    if (whole) {
      const int at = first_column(p, span.head) + own, row = at / p.group_size;
      uint16_t* o = p.o + (span.sequence + row) * p.o_stride + head.o_offset +
                    (at - row * p.group_size) * rank_v + lane / 4;
      const float l = state.l[i] + sink_of(p, span.head, own, state.m[i]);
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        if (16 * j >= rank_v) break;
        o[16 * j] = E::round(state.o[j][i] / l), o[16 * j + 8] = E::round(state.o[j][i + 2] / l);
      }
    } else {
      auto* partial = partial_of(p, blockIdx.x, from_start);
      float* o = partial->o + own * rank_v + lane / 4;
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        if (16 * j >= rank_v) break;
        store_relaxed(o + 16 * j, nonzero(state.o[j][i]));
        store_relaxed(o + 16 * j + 8, nonzero(state.o[j][i + 2]));
      }
      if (lane < 4)
        store_relaxed(partial->m_l + own, float2{nonzero(state.m[i]), nonzero(state.l[i])});
    }
  }
}

// Attends the tiles that come: the warps of a team.
template <class E, class P, int kParts>
__device__ __forceinline__ void attend_tiles(const P& p, char* shared, Block<kParts, 1>& block) {
  constexpr int kSteps = P::kRankV / 16;
  const int warp = threadIdx.x / 32;
  const uint32_t barriers = shared_address(shared), ring = barriers + kTeamHead;
  const Crew crew{int(threadIdx.x), kTeamWarps * 32};
  const int own = warp * kMaxGroup;  // the first of this warp's columns
  const uint32_t queries = ring + p.ring_bytes + warp * p.codes_bytes;
  const bool fine = block.share < kFineShare;
  SoftmaxState<kSteps> state;
  int tile = 0;
  while (block.walk.valid) {
    const auto& span = block.walk.span;
    const int head = span.head, columns = span.pair.columns(p, head) - own;
    const auto& at = p.head[head];
    state.clear();
    keep_columns(p, span, queries, own, Crew{int(threadIdx.x % 32), 32});
    __syncwarp();
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      const Run run(p, span, part);
      if (run.first >= run.last) continue;
      const LaneParams& lane = at.lane[part];
      const int units = fine ? 1 : lane.tile_units, length = tokens_of<P>(run.length);
      const bool in_keys = lane.v == lane.k;
      BundleHides hidden;
      hidden.load(p.form[p.part_in(head, part)], span.sequence, run.length,
                  first_column(p, head) + own + threadIdx.x % 4 * 2, p.group_size);
#pragma unroll 1
      for (int unit = run.first; unit < run.last; unit += units, ++tile) {
        const uint32_t barrier = barriers + tile % kSlots * 8;
        meet_team();
        wait_barrier(barrier, tile / kSlots & 1);
        if (columns > 0) {
          WideRows rows(load_word(barrier + kPlaces), units, at.rank_k, at.rank_v, in_keys);
          const int first = unit * kRowTokens,
                    count = min(min(units, run.last - unit) * kRowTokens, length - first);
#pragma unroll 1
          for (int from = 0; from < count; from += kRowTokens) {
            float s[4];
            const uint32_t kept = queries + threadIdx.x % 32 * 16;
            score_ahead<E>(s, rows.k, kept, rows.steps_k, p.scale_log2);
            bound_scores(s, p);
            hide_unseen(s, first + from, min(kRowTokens, count - from), threadIdx.x % 32 / 4 * 2, 1,
                        hidden);
            add_ahead<E>(state, rows.v, rows.steps_v, s);
            rows.k += rows.next_k, rows.v += rows.next_v;
          }
        }
        fence_for_bulk_copies();  // which fill the room that was read by ordinary instructions
      }
    }
    if (columns > 0) put_columns<E>(p, state, span, own, min(columns, kMaxGroup));
    crew.meet();
    if (crew.thread == 0) {
      if (span.first != 0 && span.last == span.total)
        block.ending = {true, span.sequence, head,
                        int(unsigned(block.begin_start) / unsigned(block.share))};
      block.walk.next(p);
    }
    crew.meet();
  }
  if (block.ending.there)
    finish_pair<E, true>(p, block.ending, reinterpret_cast<float*>(shared), crew);
}

// For devices other than Hopper this compiles to nothing. P: BundledTeam.
template <class E, class P>
__global__ void __launch_bounds__(kTeamThreads, 1) attend_team(const __grid_constant__ P p) {
#ifdef KVLATHE_TEAMS
  constexpr int kParts = P::kSlots;
  // Barriers and places of tiles | ring | queries of the warps.
  KVLATHE_DYNAMIC_SHARED(shared);
  __shared__ Block<kParts, 1> block;
  __shared__ Runs<kParts> runs;
  __shared__ Parked parked;
  const uint32_t barriers = shared_address(shared), ring = barriers + kTeamHead;
  if (threadIdx.x < kSlots) init_barrier(barriers + threadIdx.x * 8);
  const Planned<kParts> plan(p);
  if (threadIdx.x == 0) {
    block.walk = plan.walk, block.share = plan.share, block.begin_start = plan.begin_start,
    block.ending.there = false;
  }
  publish_barriers();
  __syncthreads();
  wait_for_previous_kernel();
  if (plan.some_empty) write_empty<E>(p, Crew{int(threadIdx.x), int(blockDim.x)});
  if (!plan.any) return;
  if (threadIdx.x >= kTeamWarps * 32) {
    give_registers<40>();
    if (threadIdx.x < (kTeamWarps + 1) * 32)
      bring_tiles(p, plan, runs, parked, Ring{{}, ring, p.ring_bytes, barriers});
  } else {
    take_registers<232>();
    attend_tiles<E>(p, shared, block);
  }
#endif
}

}  // namespace kvlathe::cuda
