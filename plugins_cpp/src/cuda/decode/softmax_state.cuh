// The softmax state of one warp as a value: scores arrive tile by tile, the result merges with
// other states.
//
// Fragments of mma.m16n8k16 with tokens (or channels) on M and query heads on N. Lane l of a warp
// holds, of every 16 x 8 fragment, rows l/4 and l/4 + 8 at columns 2 (l%4) and 2 (l%4) + 1: so its
// two query heads are always the same.
//
// kFill 2 (at most 4 query heads): they are in columns 0 to 3 of the first of two blocks of 16
// channels, and in columns 4 to 7 of the second.
#pragma once

#include "cuda/decode/params.h"
#include "cuda/decode/ring.cuh"

namespace kvlathe::cuda {

constexpr float kSlack =
    8.f;  // the reference maximum may lag by this many powers of two before all is rescaled

// kSteps: the widest rank of the call / 16; what the registers are sized for.
template <int kSteps, int kFill = 1>
struct SoftmaxState {
  static constexpr int kBlocks = kSteps / kFill;
  float top[2];  // reference maximum (base 2) of the lane's two query heads; the same in all lanes
                 // of a column
  float sum[2];  // this lane's share of the sum
  float out[kBlocks][4];  // v' fragments: channel x query head

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < 2; ++i) top[i] = -INFINITY, sum[i] = 0.f;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) out[j][0] = out[j][1] = out[j][2] = out[j][3] = 0.f;
  }

  // Raises the reference maxima to `now`, the same in all lanes of a column, and rescales what is
  // there.
  __device__ void raise_to(const float (&now)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float factor = now[i] == -INFINITY ? 1.f : exp2_fast(top[i] - now[i]);
      top[i] = now[i];
      sum[i] *= factor;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) out[j][i] *= factor, out[j][i + 2] *= factor;
    }
  }

  // Raises the reference maxima to cover s. Whole warp.
  __device__ void raise(const float (&s)[4]) {
    float now[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      now[i] = fmaxf(top[i], fmaxf(s[i], s[i + 2]));
#pragma unroll
      for (int step = 4; step < 32; step *= 2)
        now[i] = fmaxf(now[i], __shfl_xor_sync(~0u, now[i], step));
    }
    raise_to(now);
  }

  // Turns scores (base 2; -inf where masked) of 16 tokens into weights, in place.
  __device__ void weigh(float (&s)[4]) {
    const bool above = fmaxf(s[0], s[2]) > top[0] + kSlack || fmaxf(s[1], s[3]) > top[1] + kSlack;
    if (__any_sync(~0u, above)) raise(s);
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = exp2_fast(s[i] - top[i % 2]);
    sum[0] += s[0] + s[2];
    sum[1] += s[1] + s[3];
  }

  // Adds what a state of the same query heads has that is not filled.
  __device__ void join(const SoftmaxState<kSteps>& other) {
    const bool second = kFill == 2 && threadIdx.x % 4 >= 2;
    float now[2], factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float its =
          kFill == 2 ? __shfl_sync(~0u, other.top[i], threadIdx.x & ~2u) : other.top[i];
      now[i] = fmaxf(top[i], its);
      factor[i] = exp2_fast(its - now[i]);
    }
    raise_to(now);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!second) sum[i] += factor[i] * other.sum[i];
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        const bool here = second == (kFill == 2 && j % 2 == 1);
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          const float x = kFill == 2 && j % 2 ? __shfl_xor_sync(~0u, other.out[j][i + e], 2)
                                              : other.out[j][i + e];
          if (here) out[j / kFill][i + e] += factor[i] * x;
        }
      }
    }
  }

  // Completes the sums over the tokens of all lanes of a column.
  __device__ void close() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], step);
    }
  }
};

}  // namespace kvlathe::cuda
