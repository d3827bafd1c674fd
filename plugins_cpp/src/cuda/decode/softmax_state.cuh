// The state of an online softmax that one warp holds: m, l and o of FlashAttention (Dao et al.,
// 2022), for up to 8 query heads. Scores arrive tile by tile; states of the same heads merge.
//
//     m = max of the scores so far          l = sum of exp2(score - m)
//     o = sum of exp2(score - m) * v        the answer is o / l
//
// Scores are in base 2, so that every exponential is one instruction.
//
// The numbers lie as mma.m16n8k16 leaves them: tokens (or channels) are its M, query heads its N.
// Lane t of a warp holds rows t/4 and t/4 + 8 of every 16 x 8 fragment, at columns 2 (t%4) and
// 2 (t%4) + 1. So a lane always has the same two query heads.
//
// kFill 2 is for at most 4 query heads, which would leave half of the 8 columns empty. Columns 0 to
// 3 then belong to the first of two blocks of 16 channels, columns 4 to 7 to the second.
#pragma once

#include "cuda/decode/params.h"
#include "cuda/decode/ring.cuh"

namespace kvlathe::cuda {

// m may lag behind the largest score by this many powers of two. That is rarely exceeded, and
// rescaling o costs more than a larger sum.
constexpr float kSlack = 8.f;

// kSteps: the widest rank of the call / 16, which the registers are sized for.
template <int kSteps, int kFill = 1>
struct SoftmaxState {
  static constexpr int kBlocks = kSteps / kFill;
  float m[2];           // of the lane's two query heads; the same in all lanes of a column
  float l[2];           // this lane's share
  float o[kBlocks][4];  // fragments: channel x query head

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < 2; ++i) m[i] = -INFINITY, l[i] = 0.f;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0.f;
  }

  // Raises m to `m_new`, which is the same in all lanes of a column, and rescales l and o.
  __device__ void raise_to(const float (&m_new)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float factor = m_new[i] == -INFINITY ? 1.f : exp2_fast(m[i] - m_new[i]);
      m[i] = m_new[i];
      l[i] *= factor;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) o[j][i] *= factor, o[j][i + 2] *= factor;
    }
  }

  // Raises m to cover s. Whole warp.
  template <int kUnits>
  __device__ void raise(const float (&s)[kUnits][4]) {
    float m_new[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      m_new[i] = fmaxf(m[i], most_of(s, i));
#pragma unroll
      for (int step = 4; step < 32; step *= 2)
        m_new[i] = fmaxf(m_new[i], __shfl_xor_sync(~0u, m_new[i], step));
    }
    raise_to(m_new);
  }

  // The largest of this lane's scores of query i.
  template <int kUnits>
  __device__ static float most_of(const float (&s)[kUnits][4], int i) {
    float most = fmaxf(s[0][i], s[0][i + 2]);
#pragma unroll
    for (int b = 1; b < kUnits; ++b) most = fmaxf(most, fmaxf(s[b][i], s[b][i + 2]));
    return most;
  }

  // Turns the scores s of units of 16 tokens (-inf where masked) into P = exp2(s - m), in place.
  template <int kUnits>
  __device__ void weigh(float (&s)[kUnits][4]) {
    const bool above = most_of(s, 0) > m[0] + kSlack || most_of(s, 1) > m[1] + kSlack;
    if (__any_sync(~0u, above)) raise(s);
#pragma unroll
    for (int b = 0; b < kUnits; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[b][i] = exp2_fast(s[b][i] - m[i % 2]);
      l[0] += s[b][0] + s[b][2];
      l[1] += s[b][1] + s[b][3];
    }
  }
  __device__ void weigh(float (&s)[4]) { weigh(reinterpret_cast<float (&)[1][4]>(s)); }

  // Merges a state of the same query heads that is not filled.
  __device__ void merge(const SoftmaxState<kSteps>& other) {
    const bool second = kFill == 2 && threadIdx.x % 4 >= 2;
    float m_new[2], factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float its = kFill == 2 ? __shfl_sync(~0u, other.m[i], threadIdx.x & ~2u) : other.m[i];
      m_new[i] = fmaxf(m[i], its);
      factor[i] = exp2_fast(its - m_new[i]);
    }
    raise_to(m_new);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!second) l[i] += factor[i] * other.l[i];
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        const bool here = second == (kFill == 2 && j % 2 == 1);
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          const float x =
              kFill == 2 && j % 2 ? __shfl_xor_sync(~0u, other.o[j][i + e], 2) : other.o[j][i + e];
          if (here) o[j / kFill][i + e] += factor[i] * x;
        }
      }
    }
  }

  // Completes l: adds up the shares of all lanes of a column.
  __device__ void complete() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) l[i] += __shfl_xor_sync(~0u, l[i], step);
    }
  }
};

}  // namespace kvlathe::cuda
