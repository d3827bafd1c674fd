// The rows that a warpgroup of attend_prompt attends: scores by products, softmax and output in
// registers.
#pragma once

#include "cuda/prefill/prompt_stages.cuh"

namespace kvlathe::cuda {

#ifdef KVLATHE_WGMMA

// The rows of one thread: r and r + 8 of its warp's 16, and of each 8 columns the two from lane % 4
// * 2 on.
template <class E, int kV>
struct PromptRows {
  // Scores of as many tokens at once as leave registers for the rest.
  static constexpr int kKeys = prompt_keys(kV), kScores = kKeys / 2, kSteps = kKeys / 16;
  // Whether there are registers for scores, weights and the output at once.
  static constexpr bool kBoth = kV <= 4 || kKeys == 64;
  float out[8 * kV];
  float top[2],
      sum[2];  // maximum that `out` is relative to, not scaled; this thread's share of the sum

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < 8 * kV; ++i) out[i] = 0.f;
    top[0] = top[1] = -INFINITY, sum[0] = sum[1] = 0.f;
  }

  // Asks for scores = queries x keys.
  __device__ void score(float (&scores)[kScores], uint64_t queries, uint64_t keys, int steps) {
    multiply_tiles<E, kKeys>(scores, queries, keys, 0);
#pragma unroll 1
    for (int i = 1; i < steps; ++i)
      multiply_tiles<E, kKeys>(scores, queries + i * (kPromptRows * 2), keys + i * (kKeys * 2), i);
    close_products();
  }

  // Asks for out += weights x values.
  __device__ void add(uint32_t (&weights)[4 * kSteps], uint64_t values) {
    pin(weights);
    pin(out);
    begin_products();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) multiply_rows<E, kV>(out, weights + 4 * i, values + i * 16);
    close_products();
  }

  // Makes `out` relative to the largest scores yet.
  __device__ void follow(const float (&s)[kScores], float scale) {
    float now[2] = {top[0], top[1]}, factor[2];
#pragma unroll
    for (int i = 0; i < kScores; ++i) now[i / 2 % 2] = fmaxf(now[i / 2 % 2], s[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      now[r] = fmaxf(now[r], __shfl_xor_sync(~0u, now[r], 1));
      now[r] = fmaxf(now[r], __shfl_xor_sync(~0u, now[r], 2));
      factor[r] = exp2_fast((top[r] - now[r]) * scale);
      top[r] = now[r], sum[r] *= factor[r];
    }
#pragma unroll
    for (int i = 0; i < 8 * kV; ++i) out[i] *= factor[i / 2 % 2];
  }

  // Scores to weights, in the order that the next product takes them from registers; adds them up.
  __device__ void weigh(const float (&s)[kScores], float scale, uint32_t (&weights)[4 * kSteps],
                        float (&added)[2]) const {
    const float shift[2] = {top[0] * scale, top[1] * scale};
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const int r = i / 2 % 2;
      const float a = exp2_fast(fmaf(s[i], scale, -shift[r])),
                  b = exp2_fast(fmaf(s[i + 1], scale, -shift[r]));
      sums[2 * r] += a, sums[2 * r + 1] += b;
      weights[i / 2] = E::pack(a, b);
    }
    added[0] = sums[0] + sums[1], added[1] = sums[2] + sums[3];
  }

  // Weights relative to the maximum of the steps before: as exact as below 1 while they add up to
  // no more than 2^8. Where they do, as at first and where scores jump, the maximum is followed and
  // they are computed again. That saves looking for the maximum of each step.
  __device__ void soften(const float (&s)[kScores], float scale, uint32_t (&weights)[4 * kSteps]) {
    float added[2];
    weigh(s, scale, weights, added);
    if (__any_sync(~0u, !(added[0] <= 256.f && added[1] <= 256.f))) {
      follow(s, scale);
      weigh(s, scale, weights, added);
    }
    sum[0] += added[0], sum[1] += added[1];
  }

  // The same where scores cannot be kept beside weights.
  __device__ void soften_eagerly(const float (&s)[kScores], float scale,
                                 uint32_t (&weights)[4 * kSteps]) {
    float some[4] = {s[0], s[1], s[2], s[3]}, added[2];
#pragma unroll
    for (int i = 4; i < kScores; ++i) some[i % 4] = fmaxf(some[i % 4], s[i]);
    const float over0 = (fmaxf(some[0], some[1]) - top[0]) * scale,
                over1 = (fmaxf(some[2], some[3]) - top[1]) * scale;
    if (__any_sync(~0u, !(over0 <= 8.f && over1 <= 8.f))) follow(s, scale);
    weigh(s, scale, weights, added);
    sum[0] += added[0], sum[1] += added[1];
  }
};

// Scores of tokens from limit[r] on do not count.
template <int kScores>
__device__ void hide(float (&s)[kScores], int first, const int (&limit)[2]) {
  const int column = first + threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    if (column + i / 4 * 8 + i % 2 >= limit[i / 2 % 2]) s[i] = -INFINITY;
  }
}

template <class E, int kV>
__device__ void write_rows(const PromptParams& p, const PromptTile& tile, const PromptHead& head,
                           const PromptRows<E, kV>& rows, int row) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = rows.sum[r] + __shfl_xor_sync(~0u, rows.sum[r], 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const float inverse = 1.f / sum;
    const int in = row + 8 * r, token = in / p.group_size;
    if (in >= tile.rows) continue;
    uint16_t* to = p.o + (tile.token + token) * p.o_stride + head.o_offset +
                   (in - token * p.group_size) * 16 * kV;
#pragma unroll
    for (int i = 0; i < 2 * kV; ++i) {
      const uint32_t pair =
          E::pack(rows.out[4 * i + 2 * r] * inverse, rows.out[4 * i + 2 * r + 1] * inverse);
      *reinterpret_cast<uint32_t*>(to + 8 * i + threadIdx.x % 4 * 2) = pair;
    }
  }
}

#endif

}  // namespace kvlathe::cuda
