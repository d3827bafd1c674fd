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

// A pair that ends in this block and began in another: this block finishes it.
struct Ending {
  bool there;
  int sequence, head, first_block;
};

// Shared by the block: what its warps do together.
template <int kParts>
struct Block {
  Walk<kParts> walk;       // the span that the block attends
  int share, begin_start;  // of the plan
  float2 top_sum[kMaxWarps][kMaxGroup];
  Ending ending;
};

// Partial results meet in device memory without counters: a place is zero until its number is there, and zero again
// after that is read. So a result that is zero is left as -0.
__device__ inline float nonzero(float x) { return x == 0.f ? -0.f : x; }
__device__ inline bool present(float2 state, float4 part) {
  const auto there = [](float x) { return __float_as_uint(x) != 0; };
  return there(state.x) & there(state.y) & there(part.x) & there(part.y) & there(part.z) & there(part.w);
}

// Two partial results a block: of a span that starts in its pair's middle (the block's first) or at its start (its last).
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
    const Lengths<kParts> lengths(p, b);
    for (int h = 0; h < p.heads; ++h) {
      if (Pair<kParts>(p, lengths, h).units(p)) continue;
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
    if (!from_start && span.last == span.total)
      m.ending = {true, sequence, head_index, int(unsigned(m.begin_start) / unsigned(m.share))};
    m.walk.next(p);
  }
  Partial* partial = partial_of(p, blockIdx.x, from_start);
#pragma unroll 1
  for (int e = crew.thread; e < elements; e += crew.threads) {
    const int query = e / head.rank_v;
    float top = -INFINITY, sum = 0.f, out = 0.f;
#pragma unroll 4
    for (int w = 0; w < warps; ++w) top = fmaxf(top, m.top_sum[w][query].x);
#pragma unroll 4
    for (int w = 0; w < warps; ++w) {
      const float weight = exp2_fast(m.top_sum[w][query].x - top);
      sum += weight * m.top_sum[w][query].y;
      out += weight * buffer[w * elements + e];
    }
    if (whole) {
      write_out<E>(p, head, sequence, e, out / sum);
    } else {
      store_relaxed(partial->out + e, nonzero(out));
      if (e % head.rank_v == 0) store_relaxed(partial->top_sum + query, float2{nonzero(top), nonzero(sum)});
    }
  }
  crew.meet();
}

// Sums the partial results of a pair that ends in this block, and writes o'. The whole crew, once, at its end: it waits
// for the blocks before this one, which were started before it. Teams of threads each join every teams-th partial
// result, four channels a thread, eight asked for at once until all are there; then the teams join theirs in `buffer`:
// four sums a thread, and the (maximum, sum) of each team's queries.
template <class E, int kParts>
__device__ void finish_pair(const Params<kParts>& p, const Ending pair, float* buffer, Crew crew) {
  constexpr int kAhead = 8;
  const HeadParams<kParts>& head = p.head[pair.head];
  const int group = p.group_size, count = blockIdx.x - pair.first_block + 1, quads = group * head.rank_v / 4;
  const int teams = min(crew.threads / quads, count);  // at least one: the launcher gives group x rank / 4 threads
  auto* sums = reinterpret_cast<float4*>(buffer);
  auto* states = reinterpret_cast<float2*>(sums + crew.threads);
  const int team = crew.thread / quads, quad = crew.thread % quads, query = quad * 4 / head.rank_v;
  const auto partial = [&](int i) { return partial_of(p, pair.first_block + i, i == 0); };
  if (team < teams) {
    float top = -INFINITY, sum = 0.f;
    float4 out = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int first = team; first < count; first += kAhead * teams) {
      float2* states_at[kAhead];
      float4* parts_at[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {  // past the last: the first once more, without weight
        Partial* from = partial(first + k * teams < count ? first + k * teams : first);
        states_at[k] = from->top_sum + query, parts_at[k] = reinterpret_cast<float4*>(from->out) + quad;
      }
      float2 state[kAhead];
      float4 part[kAhead];
      bool there = false;
      while (!there) {
#pragma unroll
        for (int k = 0; k < kAhead; ++k) state[k] = load_relaxed(states_at[k]), part[k] = load_relaxed(parts_at[k]);
        there = true;
#pragma unroll
        for (int k = 0; k < kAhead; ++k) there = there && present(state[k], part[k]);
      }
      float now = top;
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        store_relaxed(parts_at[k], float4{0.f, 0.f, 0.f, 0.f});
        if (first + k * teams >= count) state[k].x = -INFINITY;
        now = fmaxf(now, state[k].x);
      }
      const float factor = exp2_fast(top - now);
      top = now, sum *= factor, out.x *= factor, out.y *= factor, out.z *= factor, out.w *= factor;
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const float w = exp2_fast(state[k].x - now);
        sum += w * state[k].y;
        out.x += w * part[k].x, out.y += w * part[k].y, out.z += w * part[k].z, out.w += w * part[k].w;
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
#pragma unroll 4
    for (int i = 0; i < teams; ++i) top = fmaxf(top, state[i * group].x);
#pragma unroll 4
    for (int i = 0; i < teams; ++i) {
      const float w = exp2_fast(state[i * group].x - top);
      sum += w * state[i * group].y;
      out += w * flat[i * 4 * quads + e];
    }
    write_out<E>(p, head, pair.sequence, e, out / sum);
  }
#pragma unroll 1
  for (int i = crew.thread; i < count * group; i += crew.threads) partial(i / group)->top_sum[i % group] = {0.f, 0.f};
}

}  // namespace kvlathe::cuda
