// Where a span ends: the block's warps join their states, and blocks that share a pair join theirs.
#pragma once

#include "cuda/decode/schedule.cuh"
#include "cuda/decode/softmax_state.cuh"

namespace kvlathe::cuda {

// The threads of a block that attend, whole warps: `thread` counts them from 0. They meet at a
// barrier of their own, so that a block may have other warps.
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

// Partial results meet in device memory without counters: a place is zero until its number is
// there, and zero again after that is read. So a result that is zero is left as -0.
__device__ inline float nonzero(float x) { return x == 0.f ? -0.f : x; }
__device__ inline bool present(float x) { return __float_as_uint(x) != 0; }

// Two partial results a block: of a span that starts in its pair's middle (the block's first) or at
// its start (its last).
template <class P>
__device__ Partial* partial_of(const P& p, int block, bool from_start) {
  return p.partials + 2 * block + from_start;
}

template <class E, int kParts>
__device__ void write_out(const Params<kParts>& p, const HeadParams<kParts>& head, int sequence,
                          int element, float value) {
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
__device__ void put_state(SoftmaxState<kSteps, kFill>& state, int group, int rank_v,
                          float2* top_sum, float* out) {
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

// Joins the states of the block's warps and writes o', or leaves a partial result; moves on to the
// next span. The whole crew.
template <class E, int kParts, int kSteps, int kFill>
__device__ void finish(const Params<kParts>& p, SoftmaxState<kSteps, kFill>& state, float* buffer,
                       Block<kParts>& m, Crew crew) {
  const Span<kParts>& span = m.walk.span;
  const int sequence = span.sequence, head_index = span.head;
  const bool from_start = span.first == 0, whole = from_start && span.last == span.total;
  const HeadParams<kParts>& head = p.head[head_index];
  const int warp = crew.thread / 32, warps = crew.threads / 32,
            elements = p.group_size * head.rank_v;
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
      if (e % head.rank_v == 0)
        store_relaxed(partial->top_sum + query, float2{nonzero(top), nonzero(sum)});
    }
  }
  crew.meet();
}

// What each of `count` partial results counts for in one query's answer; leaves zeros behind. Whole
// warp.
template <class Find>
__device__ void find_weights(Find partial, int count, int query, int group, float* weights) {
  const int lane = threadIdx.x % 32;
  float top = -INFINITY, sum = 0.f;
#pragma unroll 1
  for (int first = 0; first < count; first += 32) {
    const int i = first + lane;
    float2 own = {-INFINITY, 0.f};
    if (i < count) {
      float2* at = partial(i)->top_sum + query;
      do own = load_relaxed(at);
      while (!(present(own.x) & present(own.y)));
      store_relaxed(at, float2{0.f, 0.f});
      weights[i * group + query] = own.x;
    }
    float now = fmaxf(top, own.x);
    for (int step = 16; step; step /= 2) now = fmaxf(now, __shfl_xor_sync(~0u, now, step));
    sum = sum * exp2_fast(top - now) + own.y * exp2_fast(own.x - now);
    top = now;
  }
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  for (int i = lane; i < count; i += 32)
    weights[i * group + query] = exp2_fast(weights[i * group + query] - top) / sum;
}

// Sums the partial results of a pair that ends in this block, and writes o'. The whole crew, once,
// at its end: it waits for the blocks before this one, which were started before it. What counts is
// how many instructions a warp has to do one after the other. So a warp finds the weights of one
// query's results, teams of threads add every teams-th result, four channels a thread, and then the
// teams' sums are added. buffer: the block's shared memory from its start, where the rings were.
template <class E, int kParts>
__device__ void finish_pair(const Params<kParts>& p, const Ending pair, float* buffer, Crew crew) {
  constexpr int kAhead = 12;
  const HeadParams<kParts>& head = p.head[pair.head];
  const int group = p.group_size, count = blockIdx.x - pair.first_block + 1,
            quads = group * head.rank_v / 4;
  const int teams = min(crew.threads / quads,
                        count);  // at least one: the launcher gives group x rank / 4 threads
  auto* sums = reinterpret_cast<float4*>(buffer);
  float* weights = buffer + 4 * crew.threads;  // [count][group]
  const int team = crew.thread / quads, quad = crew.thread % quads, query = quad * 4 / head.rank_v;
  const auto partial = [&](int i) { return partial_of(p, pair.first_block + i, i == 0); };
  for (int q = crew.thread / 32; q < group; q += crew.threads / 32)
    find_weights(partial, count, q, group, weights);
  crew.meet();
  float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
  for (int first = team; first < count && team < teams; first += kAhead * teams) {
    float4* at[kAhead];
    float4 part[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {  // past the last: the first once more, without weight
      const int i = first + k * teams;
      at[k] = reinterpret_cast<float4*>(partial(i < count ? i : first)->out) + quad;
    }
    for (bool all = false; !all;) {
#pragma unroll
      for (int k = 0; k < kAhead; ++k) part[k] = load_relaxed(at[k]);
      all = true;
#pragma unroll
      for (int k = 0; k < kAhead; ++k)
        all =
            all & present(part[k].x) & present(part[k].y) & present(part[k].z) & present(part[k].w);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int i = first + k * teams;
      const float w = i < count ? weights[i * group + query] : 0.f;
      store_relaxed(at[k], float4{0.f, 0.f, 0.f, 0.f});
      sum.x += w * part[k].x, sum.y += w * part[k].y, sum.z += w * part[k].z,
          sum.w += w * part[k].w;
    }
  }
  sums[crew.thread] = sum;
  crew.meet();
#pragma unroll 1
  for (int e = crew.thread; e < 4 * quads; e += crew.threads) {
    float out = 0.f;
#pragma unroll 4
    for (int i = 0; i < teams; ++i) out += buffer[i * 4 * quads + e];
    write_out<E>(p, head, pair.sequence, e, out);
  }
}

}  // namespace kvlathe::cuda
