// Where a span ends: the block's warps join their states, and blocks that share a pair join theirs.
#pragma once

#include "schedule.cuh"
#include "softmax_state.cuh"

namespace kvlathe::cuda {

// A pair of which this block left a partial result, and who else did.
struct Unfinished {
  bool there, last;           // last: this block arrived last, so it finishes the pair
  int sequence, head, start;  // start: weight at which the pair starts
  int first_block, block_count;
};

// Shared by the block. The two unfinished pairs are told apart by where the block's span starts: in the pair's middle
// (it is the block's first span) or at its start (its last).
struct Merge {
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

// Pairs without tokens belong to no span: their rows are zeros. All threads of the block.
template <class E, int kParts>
__device__ void write_empty(const Params<kParts>& p) {
  for (int b = blockIdx.x; b < p.batch; b += gridDim.x) {
    for (int h = 0; h < p.heads; ++h) {
      if (Pair<kParts>(p, b, h).units()) continue;
      for (int e = threadIdx.x; e < p.group_size * p.head[h].rank_v; e += blockDim.x)
        write_out<E>(p, p.head[h], b, e, 0.f);
    }
  }
}

// Writes one warp's state where the block's other warps find it.
template <int kSteps>
__device__ void put_state(SoftmaxState<kSteps>& state, int group, int rank_v, float2* top_sum, float* out) {
  const int lane = threadIdx.x % 32, first = lane % 4 * 2;
  state.close();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (lane < 4) top_sum[first + i] = {state.top[i], state.sum[i]};
    if (first + i >= group) continue;
    float* row = out + (first + i) * rank_v + lane / 4;
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      if (j * 16 < rank_v) row[j * 16] = state.out[j][i], row[j * 16 + 8] = state.out[j][i + 2];
    }
  }
}

// Joins the states of the block's warps and writes o', or leaves a partial result. All threads of the block.
template <class E, int kParts, int kSteps>
__device__ void finish(const Params<kParts>& p, const Plan<kParts>& plan, const Span<kParts>& span,
                       SoftmaxState<kSteps>& state, float* buffer, Merge& m) {
  const HeadParams<kParts>& head = p.head[span.head];
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32, elements = p.group_size * head.rank_v;
  put_state(state, p.group_size, head.rank_v, m.top_sum[warp], buffer + warp * elements);
  __syncthreads();
  const bool whole = span.first == 0 && span.last == span.total, from_start = span.first == 0;
  Partial* partial = partial_of(p, blockIdx.x, from_start);
  for (int e = threadIdx.x; e < elements; e += blockDim.x) {
    const int query = e / head.rank_v;
    float top = -INFINITY, sum = 0.f, out = 0.f;
    for (int w = 0; w < warps; ++w) top = fmaxf(top, m.top_sum[w][query].x);
    for (int w = 0; w < warps; ++w) {
      const float weight = exp2_fast(m.top_sum[w][query].x - top);
      sum += weight * m.top_sum[w][query].y;
      out += weight * buffer[w * elements + e];
    }
    if (whole) {
      write_out<E>(p, head, span.sequence, e, out / sum);
    } else {
      partial->out[e] = out;
      if (e % head.rank_v == 0) partial->top_sum[query] = {top, sum};
    }
  }
  if (!whole && threadIdx.x == 0) {
    m.unfinished[from_start] = {true, false, span.sequence, span.head, from_start ? plan.end.start : plan.begin.start,
                                0,    0};
  }
  __syncthreads();
}

// Turns the (maximum, sum) of one query's partial results into their weights in the whole. One warp.
__device__ inline void weigh_partials(float2* states, int count) {
  const int lane = threadIdx.x % 32;
  float top = -INFINITY, sum = 0.f;
  for (int i = lane; i < count; i += 32) top = fmaxf(top, states[i].x);
  for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  for (int i = lane; i < count; i += 32) sum += exp2_fast(states[i].x - top) * states[i].y;
  for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
  for (int i = lane; i < count; i += 32) states[i].x = exp2_fast(states[i].x - top) / sum;
}

// Sums the partial results of a pair and writes o'. Called by the block that arrives last; all threads. `buffer` holds
// the states of the partial results (at most one a block), then four sums a thread.
template <class E, int kParts>
__device__ void merge_partials(const Params<kParts>& p, const Unfinished& pair, float* buffer) {
  const HeadParams<kParts>& head = p.head[pair.head];
  const int group = p.group_size, count = pair.block_count, quads = group * head.rank_v / 4;
  const int teams = int(blockDim.x) / quads;          // at least one: the launcher gives group x rank / 4 threads
  auto* weights = reinterpret_cast<float2*>(buffer);  // [group][count]: (maximum, sum), then (weight, -)
  auto* sums = reinterpret_cast<float4*>(weights + (count * group + 1) / 2 * 2);
  const auto partial = [&](int i) { return partial_of(p, pair.first_block + i, i == 0); };
  // Each team of threads sums every teams-th partial result, four channels a thread; the teams' sums meet in `sums`.
  const int team = threadIdx.x / quads, quad = threadIdx.x % quads;
  constexpr int kAhead =
      8;  // partial results that a thread asks for at once; the first ones before their weights are known
  float4 ahead[kAhead], out = {0.f, 0.f, 0.f, 0.f};
  const auto ask = [&](int first) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int i = first + k * teams;
      if (i < count) ahead[k] = __ldcg(reinterpret_cast<const float4*>(partial(i)->out) + quad);
    }
  };
  if (team < teams) ask(team);
  for (int i = threadIdx.x; i < count * group; i += blockDim.x)
    weights[i] = __ldcg(&partial(i % count)->top_sum[i / count]);
  __syncthreads();
  for (int query = threadIdx.x / 32; query < group; query += blockDim.x / 32)
    weigh_partials(weights + query * count, count);
  __syncthreads();
  if (team < teams) {
    const float2* weight = weights + quad * 4 / head.rank_v * count;
    for (int first = team; first < count; first += kAhead * teams) {
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const int i = first + k * teams;
        if (i >= count) break;
        const float w = weight[i].x;
        out.x += w * ahead[k].x, out.y += w * ahead[k].y, out.z += w * ahead[k].z, out.w += w * ahead[k].w;
      }
      ask(first + kAhead * teams);
    }
    sums[threadIdx.x] = out;
  }
  __syncthreads();
  const auto* flat = reinterpret_cast<const float*>(sums);
  for (int e = threadIdx.x; e < 4 * quads; e += blockDim.x) {
    float out = 0.f;
    for (int i = 0; i < teams; ++i) out += flat[i * 4 * quads + e];
    write_out<E>(p, head, pair.sequence, e, out);
  }
  __syncthreads();
}

// Reports the block's partial result of a pair; learns whether all others are there. One thread, behind a barrier: what
// the block's other threads have written is covered by its release.
template <int kParts>
__device__ void arrive(const Params<kParts>& p, const Plan<kParts>& plan, Unfinished& pair) {
  const Pair<kParts> lengths(p, pair.sequence, pair.head);
  pair.first_block = plan.owner(pair.start);
  pair.block_count = plan.owner(pair.start + lengths.weight_before_last(p.head[pair.head])) - pair.first_block + 1;
  int32_t* arrivals = p.arrivals + pair.sequence * p.heads + pair.head;
  pair.last = add_ordered(arrivals, 1) == pair.block_count - 1;
  if (pair.last) *arrivals = 0;
}

// Finishes the pairs that this block shares with others and reaches last. All threads of the block, once, at its end.
template <class E, int kParts>
__device__ void finish_shared_pairs(const Params<kParts>& p, const Plan<kParts>& plan, float* buffer, Merge& m) {
  if (threadIdx.x < 64 && threadIdx.x % 32 == 0 && m.unfinished[threadIdx.x / 32].there)
    arrive(p, plan, m.unfinished[threadIdx.x / 32]);
  __syncthreads();
  for (int i = 0; i < 2; ++i) {
    const Unfinished& pair = m.unfinished[i];
    if (pair.there && pair.last) merge_partials<E>(p, pair, buffer);
  }
}

}  // namespace kvlathe::cuda
