// The end of a span. The warps of a block merge their states; so do the blocks that
// share a pair, a (sequence, head), through device memory.
#pragma once

#include "cuda/decode/schedule.cuh"
#include "cuda/decode/softmax_state.cuh"
#include "cuda/scoring.cuh"
#include "cuda/warp.cuh"

namespace kvlathe::cuda {

// The threads of a block that attend: whole warps, counted from 0. They meet at a barrier of their
// own, so that a block may have other warps.
struct Crew {
  int thread, threads;
  __device__ void meet() const { meet_threads(threads); }
};

// A pair that began in another block and ends in this one, which therefore finishes it.
struct Ending {
  bool there;
  int sequence, head, first_block;
};

// What the warps of a block share.
template <int kParts, int kColumns = kMaxGroup>
struct Block {
  Walk<kParts> walk;       // the span that the block attends
  int share, begin_start;  // of the plan
  float2 m_l[kMaxWarps][kColumns];
  Ending ending;
};

// Partial results need no counters in device memory, whose round trips would be waited for. A place
// is zero until its number is there, and zero again when the number has been read. So a result that
// is zero is stored as -0.
__device__ inline float nonzero(float x) { return x == 0.f ? -0.f : x; }
__device__ inline bool present(float x) { return __float_as_uint(x) != 0; }

// A block leaves two partial results at most: of its first span, which may start in the middle of
// its pair, and of its last one, which starts where its pair does.
template <class P>
__device__ PartialOf<P::kColumns, P::kRankV>* partial_of(const P& p, int block, bool from_start) {
  return reinterpret_cast<PartialOf<P::kColumns, P::kRankV>*>(p.partials) + 2 * block + from_start;
}

template <class E, class P>
__device__ void write_out(const P& p, int head_index, int sequence, int element, float value) {
  const auto& head = p.head[head_index];
  if constexpr (P::kBundled) {
    const int row = p.group_size * head.rank_v;
    element += first_column(p, head_index) * head.rank_v;
    sequence += element / row, element %= row;
  }
  p.o[sequence * p.o_stride + head.o_offset + element] = E::round(value);
}

// Query heads of an item of work.
template <class P, class Pair>
__device__ int columns_in(const P& p, const Pair& pair, int head) {
  if constexpr (P::kBundled) return pair.columns(p, head);
  return p.group_size;
}

// What the sink logit of column `column` adds to a sum of exponentials below m.
template <class P>
__device__ float sink_of(const P& p, int head, int column, float m) {
  if constexpr (P::kBundled)
    return sink_term(
        p, head / p.tiles * p.group_size + (first_column(p, head) + column) % p.group_size, m);
  return sink_term(p, head * p.group_size + column, m);
}

// Zeros for pairs without tokens, which belong to no span. The whole crew.
template <class E, class P>
__device__ void write_empty(const P& p, Crew crew) {
  for (int b = blockIdx.x; b < p.batch; b += gridDim.x) {
    if (P::kBundled && length_of(p.part[0], b) < 0) continue;
    const Lengths<P::kSlots> lengths(p, b);
    for (int h = 0; h < p.heads; ++h) {
      const Pair<P::kSlots> pair(p, lengths, b, h);
      if (pair.units(p, h)) continue;
#pragma unroll 1
      for (int e = crew.thread; e < columns_in(p, pair, h) * p.head[h].rank_v; e += crew.threads)
        write_out<E>(p, h, b, e, 0.f);
    }
  }
}

// Writes one warp's state where the block's other warps find it.
template <int kSteps, int kFill>
__device__ void put_state(SoftmaxState<kSteps, kFill>& state, int group, int rank_v, float2* m_l,
                          float* o) {
  const int lane = threadIdx.x % 32, t = lane % 4, first = t % (4 / kFill) * 2;
  state.complete();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (lane < 4 / kFill) m_l[first + i] = {state.m[i], state.l[i]};
    if (first + i >= group) continue;
    const int own = kFill == 2 ? t / 2 * 16 : 0;
    float* row = o + (first + i) * rank_v + own + lane / 4;
#pragma unroll
    for (int j = 0; j < kSteps / kFill; ++j) {
      const int at = j * 16 * kFill;
      if (at + own < rank_v) row[at] = state.o[j][i], row[at + 8] = state.o[j][i + 2];
    }
  }
}

// The same of a state for each tile of 8 columns.
template <int kTiles, int kSteps, int kFill>
__device__ void put_state(SoftmaxState<kSteps, kFill> (&states)[kTiles], int columns, int rank_v,
                          float2* m_l, float* o) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
    put_state(states[t], columns - t * kMaxGroup, rank_v, m_l + t * kMaxGroup,
              o + t * kMaxGroup * rank_v);
}

// exp2(x - m). kHides: all tokens may have been hidden, and both are -inf then.
template <bool kHides>
__device__ inline float weight_below(float x, float m) {
  return kHides && m == -INFINITY ? 0.f : exp2_fast(x - m);
}

// A number of o of all warps, with the m and l of its query.
struct Merged {
  float m, l, o;
};

// Merges number `e` of the `elements` that each warp has left in the buffer.
template <bool kHides, int kParts, int kColumns>
__device__ __forceinline__ Merged merged(const Block<kParts, kColumns>& block, const float* buffer,
                                         int query, int e, int elements, int warps) {
  Merged all = {-INFINITY, 0.f, 0.f};
#pragma unroll 4
  for (int w = 0; w < warps; ++w) all.m = fmaxf(all.m, block.m_l[w][query].x);
#pragma unroll 4
  for (int w = 0; w < warps; ++w) {
    const float weight = weight_below<kHides>(block.m_l[w][query].x, all.m);
    all.l += weight * block.m_l[w][query].y;
    all.o += weight * buffer[w * elements + e];
  }
  return all;
}

// Merges the states of the block's warps. Writes o / l, or leaves a partial result where the pair
// goes on in another block. Then moves on to the next span. The whole crew.
template <class E, bool kHides = false, class P, class States, int kParts, int kColumns>
__device__ void finish(const P& p, States& states, float* buffer, Block<kParts, kColumns>& block,
                       Crew crew) {
  const Span<kParts>& span = block.walk.span;
  const int sequence = span.sequence, head_index = span.head;
  const bool from_start = span.first == 0, whole = from_start && span.last == span.total;
  const HeadParams<kParts>& head = p.head[head_index];
  const int warp = crew.thread / 32, warps = crew.threads / 32,
            group = columns_in(p, span.pair, head_index), elements = group * head.rank_v;
  put_state(states, group, head.rank_v, block.m_l[warp], buffer + warp * elements);
  crew.meet();
  if (crew.thread == crew.threads - 1) {
    if (!from_start && span.last == span.total)
      block.ending = {true, sequence, head_index,
                      int(unsigned(block.begin_start) / unsigned(block.share))};
    block.walk.next(p);
  }
  auto* partial = partial_of(p, blockIdx.x, from_start);
#pragma unroll 1
  for (int e = crew.thread; e < elements; e += crew.threads) {
    const int query = e / head.rank_v;
    auto [m, l, o] = merged<kHides>(block, buffer, query, e, elements, warps);
    if (whole) {
      if constexpr (P::kScored) l += sink_of(p, head_index, query, m);
      write_out<E>(p, head_index, sequence, e, o / l);
    } else {
      store_relaxed(partial->o + e, nonzero(o));
      if (e % head.rank_v == 0) store_relaxed(partial->m_l + query, float2{nonzero(m), nonzero(l)});
    }
  }
  crew.meet();
}

// Puts kMergedChannels of one warp's sums, from channel 16 `first` on, where the block's other warps find
// them: [group][kMergedChannels]. `first` is a constant once its loop is unrolled.
template <int kSteps>
__device__ __forceinline__ void put_channels(const SoftmaxState<kSteps>& state, int first,
                                             int group, float* to) {
  const int lane = threadIdx.x % 32, query = lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (query + i >= group) continue;
    float* row = to + (query + i) * kMergedChannels + lane / 4;
#pragma unroll
    for (int j = 0; j < kMergedChannels / 16; ++j)
      row[16 * j] = state.o[first + j][i], row[16 * j + 8] = state.o[first + j][i + 2];
  }
}

// Merges what the warps have put there, the channels from `first` on. The whole crew.
template <class E, class P, int kParts, int kColumns>
__device__ __noinline__ void merge_channels(const P& p, int sequence, int head, int group,
                                            bool whole, bool from_start, int first,
                                            const float* buffer,
                                            const Block<kParts, kColumns>& block, Crew crew) {
  const int warps = crew.threads / 32, rank_v = p.head[head].rank_v,
            elements = group * kMergedChannels;
  auto* partial = partial_of(p, blockIdx.x, from_start);
#pragma unroll 1
  for (int e = crew.thread; e < elements; e += crew.threads) {
    const int query = e / kMergedChannels, channel = first + e % kMergedChannels;
    if (channel >= rank_v) continue;
    auto [m, l, o] = merged<true>(block, buffer, query, e, elements, warps);
    if (whole) {
      if constexpr (P::kScored) l += sink_of(p, head, query, m);
      write_out<E>(p, head, sequence, query * rank_v + channel, o / l);
    } else {
      store_relaxed(partial->o + query * rank_v + channel, nonzero(o));
      if (channel == 0) store_relaxed(partial->m_l + query, float2{nonzero(m), nonzero(l)});
    }
  }
}

// finish with a merge buffer of kMergedChannels. The whole crew.
template <class E, class P, int kSteps, int kParts, int kColumns>
__device__ __forceinline__ void finish_sliced(const P& p, SoftmaxState<kSteps>& state,
                                              float* buffer, Block<kParts, kColumns>& block,
                                              Crew crew) {
  constexpr int kEach = kMergedChannels / 16;
  const Span<kParts>& span = block.walk.span;
  const int sequence = span.sequence, head = span.head, lane = crew.thread % 32,
            warp = crew.thread / 32, group = columns_in(p, span.pair, head),
            rank_v = p.head[head].rank_v;
  const bool from_start = span.first == 0, whole = from_start && span.last == span.total;
  state.complete();
  if (lane < 4) {
#pragma unroll
    for (int i = 0; i < 2; ++i) block.m_l[warp][lane * 2 + i] = {state.m[i], state.l[i]};
  }
#pragma unroll
  for (int first = 0; first < kSteps; first += kEach) {
    if (16 * first >= rank_v) break;
    put_channels(state, first, group, buffer + warp * group * kMergedChannels);
    crew.meet();
    if (first == 0 && crew.thread == crew.threads - 1) {
      if (!from_start && span.last == span.total)
        block.ending = {true, sequence, head,
                        int(unsigned(block.begin_start) / unsigned(block.share))};
      block.walk.next(p);
    }
    merge_channels<E>(p, sequence, head, group, whole, from_start, 16 * first, buffer, block, crew);
    crew.meet();
  }
}

// The weight of each of `count` partial results in one query's answer. Leaves zeros where it read
// them. `beside` adds to the sum of exponentials what no result has. Whole warp.
template <bool kHides, class Find, class Beside>
__device__ void find_weights(Find partial, int count, int query, int group, float* weights,
                             Beside beside) {
  const int lane = threadIdx.x % 32;
  float m = -INFINITY, l = 0.f;
#pragma unroll 1
  for (int first = 0; first < count; first += 32) {
    const int i = first + lane;
    float2 own = {-INFINITY, 0.f};
    if (i < count) {
      float2* at = partial(i)->m_l + query;
      do own = load_relaxed(at);
      while (!(present(own.x) & present(own.y)));
      store_relaxed(at, float2{0.f, 0.f});
      weights[i * group + query] = own.x;
    }
    float m_new = fmaxf(m, own.x);
    for (int step = 16; step; step /= 2) m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, step));
    l = l * weight_below<kHides>(m, m_new) + own.y * weight_below<kHides>(own.x, m_new);
    m = m_new;
  }
  for (int step = 16; step; step /= 2) l += __shfl_xor_sync(~0u, l, step);
  beside(l, m);
  for (int i = lane; i < count; i += 32)
    weights[i * group + query] = exp2_fast(weights[i * group + query] - m) / l;
}

// Query heads of a pair that ends in this block.
template <class P>
__device__ int columns_of_ending(const P& p, const Ending& pair) {
  if constexpr (P::kBundled) {
    const Lengths<P::kSlots> lengths(p, pair.sequence);
    return Pair<P::kSlots>(p, lengths, pair.sequence, pair.head).columns(p, pair.head);
  }
  return p.group_size;
}

// Merges the partial results of a pair that ends in this block, and writes the answer. The whole
// crew, once, at its end. It waits for the blocks before this one, which started earlier.
//
// Its time is the instructions that a warp does one after the other. So one warp finds the weights
// of one query's results. Teams of threads then add every teams-th result, four channels a thread,
// and at last the sums of the teams are added. buffer: the block's shared memory from its start,
// where the rings were.
template <class E, bool kHides = false, class P>
__device__ void finish_pair(const P& p, const Ending pair, float* buffer, Crew crew) {
  constexpr int kAhead = 12;
  const auto& head = p.head[pair.head];
  const int group = columns_of_ending(p, pair), count = blockIdx.x - pair.first_block + 1,
            quads = group * head.rank_v / 4;
  // But for general calls (kHides) the launcher gives group x rank / 4 threads: a team at least. There
  // threads may be fewer, and take their channels in turns.
  const int teams =
      kHides ? max(1, min(crew.threads / quads, count)) : min(crew.threads / quads, count);
  auto* sums = reinterpret_cast<float4*>(buffer);
  float* weights =
      buffer + 4 * (kHides ? max(crew.threads, quads) : crew.threads);  // [count][group]
  int team = crew.thread / quads, quad = crew.thread % quads, query = quad * 4 / head.rank_v;
  const auto partial = [&](int i) { return partial_of(p, pair.first_block + i, i == 0); };
  for (int q = crew.thread / 32; q < group; q += crew.threads / 32)
    find_weights<kHides>(partial, count, q, group, weights, [&](float& l, float m) {
      if constexpr (P::kScored) l += sink_of(p, pair.head, q, m);
    });
  crew.meet();
  for (int own = crew.thread;;) {
    float4 o = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int first = team; first < count && team < teams; first += kAhead * teams) {
      float4* at[kAhead];
      float4 part[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        // Past the last one: the first once more, without weight, so that no branch parts the loads.
        const int i = first + k * teams;
        at[k] = reinterpret_cast<float4*>(partial(i < count ? i : first)->o) + quad;
      }
      for (bool all = false; !all;) {
#pragma unroll
        for (int k = 0; k < kAhead; ++k) part[k] = load_relaxed(at[k]);
        all = true;
#pragma unroll
        for (int k = 0; k < kAhead; ++k)
          all = all & present(part[k].x) & present(part[k].y) & present(part[k].z) &
                present(part[k].w);
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const int i = first + k * teams;
        const float w = i < count ? weights[i * group + query] : 0.f;
        store_relaxed(at[k], float4{0.f, 0.f, 0.f, 0.f});
        o.x += w * part[k].x, o.y += w * part[k].y, o.z += w * part[k].z, o.w += w * part[k].w;
      }
    }
    sums[own] = o;
    if constexpr (!kHides) break;
    own += crew.threads;
    if (own >= teams * quads) break;
    team = own / quads, quad = own % quads, query = quad * 4 / head.rank_v;
  }
  crew.meet();
#pragma unroll 1
  for (int e = crew.thread; e < 4 * quads; e += crew.threads) {
    float sum = 0.f;
#pragma unroll 4
    for (int i = 0; i < teams; ++i) sum += buffer[i * 4 * quads + e];
    write_out<E>(p, pair.head, pair.sequence, e, sum);
  }
}

}  // namespace kvlathe::cuda
