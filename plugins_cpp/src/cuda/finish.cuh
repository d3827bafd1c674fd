// Where a span ends: the block's warps join their states, and blocks that share a pair join theirs.
#pragma once

#include "schedule.cuh"
#include "softmax_state.cuh"

namespace kvlathe::cuda {

// The threads of a block that attend, whole warps: `thread` counts them from 0. They meet at a barrier of their own, so
// that a block may have other warps.
struct Crew {
  int thread, threads;
  __device__ void meet() const { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }
};

// A pair of which this block left a partial result, and who else did.
struct Unfinished {
  bool there, last;           // last: this block arrived last, so it finishes the pair
  int sequence, head, start;  // start: weight at which the pair starts
  int first_block, block_count;
};

// Shared by the block: what its warps do together. The two unfinished pairs are told apart by where the block's span
// starts: in the pair's middle (it is the block's first span) or at its start (its last).
template <int kParts>
struct Block {
  Walk<kParts> walk;                  // the span that the block attends
  int share, begin_start, end_start;  // of the plan
  float2 top_sum[kMaxWarps][kMaxGroup];
  Unfinished unfinished[2];
};

template <class P>
__device__ Partial* partial_of(const P& p, int block, bool from_start) {
  return p.partials + 2 * block + from_start;
}

template <class E, int kParts>
__device__ void write_out(const Params<kParts>& p, const HeadParams<kParts>& head, int sequence, int element,
                          float value) {
  p.o[sequence * p.o_stride + head.o_offset + element] = E::round(value);
}

// Pairs without tokens belong to no span: their rows are zeros. The whole crew.
template <class E, int kParts>
__device__ void write_empty(const Params<kParts>& p, Crew crew) {
  for (int b = blockIdx.x; b < p.batch; b += gridDim.x) {
    for (int h = 0; h < p.heads; ++h) {
      if (Pair<kParts>(p, b, h).units(p)) continue;
#pragma unroll 1
      for (int e = crew.thread; e < p.group_size * p.head[h].rank_v; e += crew.threads)
        write_out<E>(p, p.head[h], b, e, 0.f);
    }
  }
}

// Writes one warp's state where the block's other warps find it.
template <int kSteps, int kFill>
__device__ void put_state(SoftmaxState<kSteps, kFill>& state, int group, int rank_v, float2* top_sum, float* out) {
  const int lane = threadIdx.x % 32, t = lane % 4, first = t % (4 / kFill) * 2;
  state.close();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (lane < 4 / kFill) top_sum[first + i] = {state.top[i], state.sum[i]};
    if (first + i >= group) continue;
    const int own = kFill == 2 ? t / 2 * 16 : 0;
    float* row = out + (first + i) * rank_v + own + lane / 4;
#pragma unroll
    for (int j = 0; j < kSteps / kFill; ++j) {
      const int at = j * 16 * kFill;
      if (at + own < rank_v) row[at] = state.out[j][i], row[at + 8] = state.out[j][i + 2];
    }
  }
}

// Joins the states of the block's warps and writes o', or leaves a partial result; moves on to the next span. The whole
// crew.
template <class E, int kParts, int kSteps, int kFill>
__device__ void finish(const Params<kParts>& p, SoftmaxState<kSteps, kFill>& state, float* buffer, Block<kParts>& m,
                       Crew crew) {
  const Span<kParts>& span = m.walk.span;
  const int sequence = span.sequence, head_index = span.head;
  const bool from_start = span.first == 0, whole = from_start && span.last == span.total;
  const HeadParams<kParts>& head = p.head[head_index];
  const int warp = crew.thread / 32, warps = crew.threads / 32, elements = p.group_size * head.rank_v;
  put_state(state, p.group_size, head.rank_v, m.top_sum[warp], buffer + warp * elements);
  crew.meet();
  if (crew.thread == crew.threads - 1) {
    if (!whole)
      m.unfinished[from_start] = {true, false, sequence, head_index, from_start ? m.end_start : m.begin_start, 0, 0};
    m.walk.next(p);
  }
  Partial* partial = partial_of(p, blockIdx.x, from_start);
#pragma unroll 1
  for (int e = crew.thread; e < elements; e += crew.threads) {
    const int query = e / head.rank_v;
    float top = -INFINITY, sum = 0.f, out = 0.f;
#pragma unroll 1
    for (int w = 0; w < warps; ++w) top = fmaxf(top, m.top_sum[w][query].x);
#pragma unroll 2
    for (int w = 0; w < warps; ++w) {
      const float weight = exp2_fast(m.top_sum[w][query].x - top);
      sum += weight * m.top_sum[w][query].y;
      out += weight * buffer[w * elements + e];
    }
    if (whole) {
      write_out<E>(p, head, sequence, e, out / sum);
    } else {
      partial->out[e] = out;
      if (e % head.rank_v == 0) partial->top_sum[query] = {top, sum};
    }
  }
  crew.meet();
}

// Sums the partial results of a pair and writes o'. Called by the block that arrives last; its whole crew. Teams of
// threads each join every teams-th partial result, four channels a thread, all asked for at once; then the teams join
// theirs in `buffer`: four sums a thread, and the (maximum, sum) of each team's queries.
template <class E, int kParts>
__device__ void merge_partials(const Params<kParts>& p, const Unfinished& pair, float* buffer, Crew crew) {
  const HeadParams<kParts>& head = p.head[pair.head];
  const int group = p.group_size, count = pair.block_count, quads = group * head.rank_v / 4;
  const int teams = min(crew.threads / quads, count);  // at least one: the launcher gives group x rank / 4 threads
  auto* sums = reinterpret_cast<float4*>(buffer);
  auto* states = reinterpret_cast<float2*>(sums + crew.threads);
  const int team = crew.thread / quads, quad = crew.thread % quads, query = quad * 4 / head.rank_v;
  if (team < teams) {
    constexpr int kAhead = 8;
    float top = -INFINITY, sum = 0.f;
    float4 out = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int first = team; first < count; first += kAhead * teams) {
      float4 parts[kAhead];
      float2 top_sum[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const int i = first + k * teams;
        top_sum[k] = {-INFINITY, 0.f};
        parts[k] = {0.f, 0.f, 0.f, 0.f};
        if (i >= count) continue;
        const Partial* partial = partial_of(p, pair.first_block + i, i == 0);
        top_sum[k] = __ldcg(partial->top_sum + query);
        parts[k] = __ldcg(reinterpret_cast<const float4*>(partial->out) + quad);
      }
      float now = top;
#pragma unroll
      for (int k = 0; k < kAhead; ++k) now = fmaxf(now, top_sum[k].x);
      const float factor = exp2_fast(top - now);
      top = now, sum *= factor, out.x *= factor, out.y *= factor, out.z *= factor, out.w *= factor;
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const float w = exp2_fast(top_sum[k].x - now);
        sum += w * top_sum[k].y;
        out.x += w * parts[k].x, out.y += w * parts[k].y, out.z += w * parts[k].z, out.w += w * parts[k].w;
      }
    }
    sums[crew.thread] = out;
    if (quad * 4 % head.rank_v == 0) states[team * group + query] = {top, sum};
  }
  crew.meet();
  const auto* flat = reinterpret_cast<const float*>(sums);
#pragma unroll 1
  for (int e = crew.thread; e < 4 * quads; e += crew.threads) {
    const float2* state = states + e / head.rank_v;
    float top = -INFINITY, sum = 0.f, out = 0.f;
#pragma unroll 1
    for (int i = 0; i < teams; ++i) top = fmaxf(top, state[i * group].x);
#pragma unroll 2
    for (int i = 0; i < teams; ++i) {
      const float w = exp2_fast(state[i * group].x - top);
      sum += w * state[i * group].y;
      out += w * flat[i * 4 * quads + e];
    }
    write_out<E>(p, head, pair.sequence, e, out / sum);
  }
  crew.meet();
}

// Reports the block's partial result of a pair; learns whether all others are there. One thread, behind a barrier: what
// the block's other threads have written is covered by its release.
template <int kParts>
__device__ void arrive(const Params<kParts>& p, int share, Unfinished& pair) {
  const Pair<kParts> lengths(p, pair.sequence, pair.head);
  const int last = pair.start + lengths.weight_before_last(p, pair.head);  // where the pair's last tile starts
  pair.first_block = unsigned(pair.start) / unsigned(share);  // the block that takes a tile that starts there
  pair.block_count = int(unsigned(last) / unsigned(share)) - pair.first_block + 1;
  int32_t* arrivals = p.arrivals + pair.sequence * p.heads + pair.head;
  pair.last = add_ordered(arrivals, 1) == pair.block_count - 1;
  if (pair.last) *arrivals = 0;
}

// Finishes the pairs that this block shares with others and reaches last. The whole crew, once, at its end.
template <class E, int kParts>
__device__ void finish_shared_pairs(const Params<kParts>& p, float* buffer, Block<kParts>& m, Crew crew) {
  if (crew.thread < 64 && crew.thread % 32 == 0 && m.unfinished[crew.thread / 32].there)
    arrive(p, m.share, m.unfinished[crew.thread / 32]);
  crew.meet();
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const Unfinished& pair = m.unfinished[i];
    if (pair.there && pair.last) merge_partials<E>(p, pair, buffer, crew);
  }
}

}  // namespace kvlathe::cuda
