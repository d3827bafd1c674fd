// The plan of a warp that attends alone (attend_alone.cuh), and the end of its spans: as blocks have
// them elsewhere. Warps of all blocks are counted one after the other.
#pragma once

#include "cuda/decode/finish.cuh"
#include "cuda/decode/schedule.cuh"
#include "cuda/decode/softmax_state.cuh"

namespace kvlathe::cuda {

__device__ inline int own_warp() { return (blockIdx.x * blockDim.x + threadIdx.x) / 32; }

// The part of a block's share that each of its warps takes. The launcher sees to it that the last
// one's is a tile or more.
__device__ inline int share_of_warp(int share) {
  const int warps = blockDim.x / 32;
  return int(unsigned(share + warps - 1) / unsigned(warps));
}

// The warp that takes what stands at a weight in the row of work.
__device__ inline int warp_at(int weight, int share) {
  const int block = int(unsigned(weight) / unsigned(share));
  return block * int(blockDim.x / 32) +
         int(unsigned(weight - block * share) / unsigned(share_of_warp(share)));
}

// unit_at, but between two pages of a quantized tile, too: a tile is much of a warp's share.
template <int kParts, class P>
__device__ int page_at(const P& p, const Pair<kParts>& pair, int head, int rest) {
  int unit = 0;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const auto& lane = p.head[head].lane[i];
    if (rest <= 0 || !lane.weight) continue;
    const int whole = is_quantized(p.part_of(head, i).bits) ? 1 : lane.tile_units,
              wanted = (int(unsigned(rest + lane.weight - 1) / lane.weight) + whole - 1) & -whole,
              skipped = min(pair.units(p, head, i), wanted);
    unit += skipped;
    rest = skipped < wanted ? rest - skipped * lane.weight : 0;
  }
  return unit;
}

// The work of one warp, found in that of its block. `share` stays the block's.
template <int kParts>
struct AlonePlan : Planned<kParts> {
  int first = 0;  // of all warps, the one in which the pair of the first span begins

  template <class P>
  __device__ explicit AlonePlan(const P& p) : Planned<kParts>(p) {
    Walk<kParts>& walk = this->walk;
    this->any = this->any && walk.valid;
    if (!this->any) return;
    const int of_sequence = walk.span.sequence, of_head = walk.span.head;
    narrow(p);
    this->any = walk.valid;
    if (!this->any) return;
    first = warp_at(this->begin_start, this->share);
    if (walk.span.sequence != of_sequence || walk.span.head != of_head) this->slot = -1;
  }

 private:
  // A pair, counted through all sequences, and the weight at which it starts.
  struct Start {
    int pair, weight;

    // As in Plan.
    __device__ void enter(int base, int upto, int own, int x) {
      const unsigned beyond = __ballot_sync(~0u, upto > x);
      if (pair >= 0 || !beyond) return;
      pair = base + __ffs(beyond) - 1;
      weight = __shfl_sync(~0u, upto - own, __ffs(beyond) - 1);
    }
  };

  template <class P>
  __device__ static int weight_of(const P& p, int pair) {
    const int sequence = int(unsigned(pair) / unsigned(p.heads)), head = pair - sequence * p.heads;
    return Pair<kParts>(p, Lengths<kParts>(p, sequence), sequence, head).weight(p, head);
  }

  // A block's first span is of the pair after the one in which its share begins, where no tile of
  // that one is left. Returns the pair in which the share begins.
  template <class P>
  __device__ int first_pair(const P& p, int from) const {
    const Span<kParts>& span = this->walk.span;
    int pair = span.sequence * p.heads + span.head;
    if (span.first || this->begin_start == from) return pair;
    for (unsigned there = 0; !there && pair > 0;) {
      const int own = pair - 1 - int(threadIdx.x % 32);
      there = __ballot_sync(~0u, own >= 0 && weight_of(p, max(own, 0)) > 0);
      pair -= there ? __ffs(there) : 32;
    }
    return max(pair, 0);
  }

  // As Plan, among the pairs of the block. Whole warp.
  template <class P>
  __device__ void narrow(const P& p) {
    Walk<kParts>& walk = this->walk;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = share_of_warp(this->share),
              block_from = int(blockIdx.x) * this->share, from = block_from + warp * own,
              to = min(from + own, block_from + this->share);
    const Position stop = walk.end;
    const int last_pair = min(stop.sequence * p.heads + stop.head, p.batch * p.heads - 1);
    Start begin{-1, 0}, end{-1, 0};
    int before = this->begin_start;
    for (int base = first_pair(p, block_from); base <= last_pair && end.pair < 0; base += 32) {
      const int here = base + lane <= last_pair ? weight_of(p, base + lane) : 0,
                upto = before + inclusive_sum(here);
      begin.enter(base, upto, here, from);
      end.enter(base, upto, here, to);
      before = __shfl_sync(~0u, upto, 31);
    }
    walk.valid = begin.pair >= 0;
    if (!walk.valid) return;
    // One half of the warp looks for the begin, the other for the end.
    const bool ends = lane >= 16 && end.pair >= 0;
    const Start& mine = ends ? end : begin;
    const int sequence = int(unsigned(mine.pair) / unsigned(p.heads)),
              head = mine.pair - sequence * p.heads;
    const int unit = page_at(p, Pair<kParts>(p, Lengths<kParts>(p, sequence), sequence, head), head,
                             (ends ? to : from) - mine.weight);
    const auto at = [&](int of_lane) {
      return Position{__shfl_sync(~0u, sequence, of_lane), __shfl_sync(~0u, head, of_lane),
                      __shfl_sync(~0u, unit, of_lane)};
    };
    Position first = at(0), last = at(16);
    if (end.pair < 0 || to == block_from + this->share) last = stop;
    if (warp == 0)
      first = {walk.span.sequence, walk.span.head, walk.span.first};
    else
      this->begin_start = begin.weight;
    walk = Walk<kParts>::start(p, first, last);
  }
};

// A partial result, as the lanes of a warp hold it. What finish.cuh says of zeros holds here, too.
template <int kSteps, int kFill>
struct AlonePartial {
  float4 m_l[8];  // m and l of a lane column's two query heads; the last four are not used
  float4 o[SoftmaxState<kSteps, kFill>::kBlocks][32];
};

// A warp leaves two at most, as a block does elsewhere.
template <int kSteps, int kFill>
__device__ AlonePartial<kSteps, kFill>* alone_partial(const AloneParams& p, int warp,
                                                      bool from_start) {
  return reinterpret_cast<AlonePartial<kSteps, kFill>*>(p.partials) + 2 * warp + from_start;
}

// Completes a state as SoftmaxState does, but so that all lanes of a query head have its l.
template <int kSteps, int kFill>
__device__ void complete_everywhere(SoftmaxState<kSteps, kFill>& state) {
  state.complete();
  if (kFill == 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) state.l[i] += __shfl_xor_sync(~0u, state.l[i], 2);
  }
}

// Writes o / l of a completed state. Whole warp.
template <class E, int kSteps, int kFill>
__device__ void write_answer(const AloneParams& p, const SoftmaxState<kSteps, kFill>& state,
                             int sequence, int head_index) {
  const auto& head = p.head[head_index];
  const int lane = threadIdx.x % 32, t = lane % 4, first = t % (4 / kFill) * 2,
            channel = lane / 4 + (kFill == 2 ? t / 2 * 16 : 0);
  uint16_t* row = p.o + sequence * p.o_stride + head.o_offset + first * head.rank_v + channel;
#pragma unroll
  for (int i = 0; i < 2; ++i, row += head.rank_v) {
    if (first + i >= p.group_size) break;
    const float share = 1.f / state.l[i];
#pragma unroll
    for (int j = 0; j < kSteps / kFill; ++j) {
      const int at = j * 16 * kFill;
      if (at + channel >= head.rank_v) break;
      row[at] = E::round(state.o[j][i] * share);
      row[at + 8] = E::round(state.o[j][i + 2] * share);
    }
  }
}

// Leaves a completed state where other warps find it. Whole warp.
template <int kSteps, int kFill>
__device__ void leave_partial(AlonePartial<kSteps, kFill>* to,
                              const SoftmaxState<kSteps, kFill>& state, int rank_v) {
  const int lane = threadIdx.x % 32;
  if (lane < 4)
    store_relaxed(to->m_l + lane, float4{nonzero(state.m[0]), nonzero(state.l[0]),
                                         nonzero(state.m[1]), nonzero(state.l[1])});
#pragma unroll
  for (int j = 0; j < kSteps / kFill; ++j) {
    if (j * 16 * kFill >= rank_v) break;
    store_relaxed(to->o[j] + lane, float4{nonzero(state.o[j][0]), nonzero(state.o[j][1]),
                                          nonzero(state.o[j][2]), nonzero(state.o[j][3])});
  }
}

__device__ inline bool present(const float4& x) {
  return present(x.x) & present(x.y) & present(x.z) & present(x.w);
}

// Adds a partial result to a completed state when it is there, and leaves zeros. Whole warp.
template <int kSteps, int kFill>
__device__ void take_partial(SoftmaxState<kSteps, kFill>& state, AlonePartial<kSteps, kFill>* from,
                             int rank_v) {
  constexpr int kBlocks = SoftmaxState<kSteps, kFill>::kBlocks;
  constexpr float4 kNone = {0.f, 0.f, 0.f, 0.f};
  const int lane = threadIdx.x % 32;
  float4 m_l, o[kBlocks];
  for (bool all = false; !all;) {
    m_l = load_relaxed(from->m_l + lane % 4);
    all = present(m_l);
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      // Past the last one: the first once more, so that no branch parts the loads.
      o[j] = load_relaxed(from->o[j * 16 * kFill < rank_v ? j : 0] + lane);
      all = all & present(o[j]);
    }
  }
  const float m[2] = {m_l.x, m_l.z}, l[2] = {m_l.y, m_l.w};
  float m_new[2], factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) m_new[i] = fmaxf(state.m[i], m[i]);
  state.raise_to(m_new);
#pragma unroll
  for (int i = 0; i < 2; ++i)
    factor[i] = exp2_fast(m[i] - m_new[i]), state.l[i] += factor[i] * l[i];
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    const float x[4] = {o[j].x, o[j].y, o[j].z, o[j].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) state.o[j][i] += factor[i % 2] * x[i];
  }
  __syncwarp();  // all lanes have read m and l
  if (lane < 4) store_relaxed(from->m_l + lane, kNone);
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    if (j * 16 * kFill < rank_v) store_relaxed(from->o[j] + lane, kNone);
  }
}

// A pair may cross hundreds of warps, where one sequence is as long as many others. The last one of
// every kTogether warps then adds up their results, and its own is left for all of them.
constexpr int kTogether = 32;

// Adds the results of warps [from, own) to a completed state. first: the warp in which the pair
// begins. It waits for warps that started earlier only. Whole warp.
template <int kSteps, int kFill>
__device__ void take_partials(const AloneParams& p, SoftmaxState<kSteps, kFill>& state, int first,
                              int from, int own, int rank_v) {
#pragma unroll 1
  for (int warp = from; warp < own; ++warp) {
    const int together = warp | (kTogether - 1);
    if (together < own) warp = together;
    take_partial(state, alone_partial<kSteps, kFill>(p, warp, warp == first), rank_v);
  }
}

// Writes the answer of the span that ends, or leaves a partial result. Then moves on to the next
// one. Whole warp.
template <class E, class Lone, int kSteps, int kFill>
__device__ void end_span(const AloneParams& p, SoftmaxState<kSteps, kFill>& state, Lone& lone) {
  const auto& span = lone.walk.span;
  const int sequence = span.sequence, head = span.head;
  const bool from_start = span.first == 0, to_end = span.last == span.total;
  complete_everywhere(state);
  if (from_start && to_end) {
    write_answer<E>(p, state, sequence, head);
  } else {
    const int own = own_warp(), rank_v = p.head[head].rank_v;
    if (!from_start && !to_end && own % kTogether == kTogether - 1)
      take_partials(p, state, lone.first, max(lone.first, own - (kTogether - 1)), own, rank_v);
    leave_partial(alone_partial<kSteps, kFill>(p, own, from_start), state, rank_v);
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    if (!from_start && to_end) lone.ending = {true, sequence, head, lone.first};
    lone.walk.next(p);
  }
  __syncwarp();
}

// Writes the answer of a pair that began in another warp and ends in this one. Whole warp, once, at
// its end: the warps before it have ended by then, or nearly.
template <class E, int kSteps, int kFill>
__device__ void end_pair(const AloneParams& p, const Ending& pair) {
  const int own = own_warp(), rank_v = p.head[pair.head].rank_v;
  SoftmaxState<kSteps, kFill> state;
  state.clear();
  take_partial(state, alone_partial<kSteps, kFill>(p, own, false), rank_v);
  take_partials(p, state, pair.first_block, pair.first_block, own, rank_v);
  write_answer<E>(p, state, pair.sequence, pair.head);
}

}  // namespace kvlathe::cuda
