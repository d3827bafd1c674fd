// The rows that a warpgroup of attend_prompt attends. S = QK^T and O += PV are warpgroup products;
// S, P, and the state m, l, o of the softmax (decode/softmax_state.cuh has its equations) stay in
// registers.
#pragma once

#include "cuda/prefill/prompt_stages.cuh"
#include "cuda/scoring.cuh"

namespace kvlathe::cuda {

#ifdef KVLATHE_WGMMA

// The rows of one thread: r and r + 8 of its warp's 16. Of each 8 columns it has the two from
// lane % 4 * 2 on. kWindows: a row may see nothing of a stage, even of its first one.
template <class E, int kV, bool kWindows>
struct PromptRows {
  static constexpr int kKeys = kStageTokens, kScores = kKeys / 2, kSteps = kKeys / 16;
  float o[8 * kV];
  float m[2];  // the maximum that o and l are relative to, before it is scaled
  float l[2];  // this thread's share

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < 8 * kV; ++i) o[i] = 0.f;
    m[0] = m[1] = -INFINITY, l[0] = l[1] = 0.f;
  }

  // Whether a row whose maximum is m has seen no token yet. Without windows there is no such row.
  __device__ static bool unseen(float m) { return kWindows && m == -INFINITY; }

  // Asks for s = q k^T. k: the address of K.
  template <int kCount>
  __device__ void score(float (&s)[kScores], uint64_t q, uint32_t k) {
    constexpr int kWidth = block_steps(kCount);
    const uint64_t keys = describe_blocks<kWidth>(k, 16);
    begin_products();
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      multiply_tiles<E, kKeys>(s, q + i * (kPromptRows * 2),
                               keys + (i / kWidth * kWidth * kStageUnit + i % kWidth * 32) / 16, i);
    close_products();
  }
  // Products that follow each other without a branch between them overlap.
  __device__ void score(float (&s)[kScores], uint64_t q, uint32_t k, int steps) {
    switch (steps) {
      case 1: return score<1>(s, q, k);
      case 2: return score<2>(s, q, k);
      case 3: return score<3>(s, q, k);
      case 4: return score<4>(s, q, k);
      case 5: return score<5>(s, q, k);
      case 6: return score<6>(s, q, k);
      case 7: return score<7>(s, q, k);
      default: return score<8>(s, q, k);
    }
  }

  // Asks for o += p v. v: the address of V.
  __device__ void add(uint32_t (&p)[4 * kSteps], uint32_t v) {
    constexpr int kWidth = block_steps(kV);
    const uint64_t values = describe_blocks<kWidth>(v, kWidth * kStageUnit);
    pin(p);
    pin(o);
    begin_products();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) multiply_rows<E, kV>(o, p + 4 * i, values + i * 32 * kWidth);
    close_products();
  }

  // Raises m to the largest score yet, and rescales l and o.
  __device__ void raise(const float (&s)[kScores], float scale) {
    float m_new[2] = {m[0], m[1]}, factor[2];
#pragma unroll
    for (int i = 0; i < kScores; ++i) m_new[i / 2 % 2] = fmaxf(m_new[i / 2 % 2], s[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      m_new[r] = fmaxf(m_new[r], __shfl_xor_sync(~0u, m_new[r], 1));
      m_new[r] = fmaxf(m_new[r], __shfl_xor_sync(~0u, m_new[r], 2));
      factor[r] = unseen(m_new[r]) ? 1.f : exp2_fast((m[r] - m_new[r]) * scale);
      m[r] = m_new[r], l[r] *= factor[r];
    }
#pragma unroll
    for (int i = 0; i < 8 * kV; ++i) o[i] *= factor[i / 2 % 2];
  }

  // P of scores, in the order in which the next product takes it from registers, and its sums.
  __device__ void weigh(const float (&s)[kScores], float scale, uint32_t (&p)[4 * kSteps],
                        float (&added)[2]) const {
    const float shift[2] = {unseen(m[0]) ? 0.f : m[0] * scale, unseen(m[1]) ? 0.f : m[1] * scale};
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const int r = i / 2 % 2;
      const float a = exp2_fast(fmaf(s[i], scale, -shift[r])),
                  b = exp2_fast(fmaf(s[i + 1], scale, -shift[r]));
      sums[2 * r] += a, sums[2 * r + 1] += b;
      p[i / 2] = E::pack(a, b);
    }
    added[0] = sums[0] + sums[1], added[1] = sums[2] + sums[3];
  }

  // P relative to the m of the steps before. That saves the search for the maximum of each step. P
  // is as exact as below 1 while it adds up to 2^8 at most. Where it exceeds that, as at first and
  // where scores jump, m is raised and P computed again.
  __device__ void soften(const float (&s)[kScores], float scale, uint32_t (&p)[4 * kSteps]) {
    float added[2];
    weigh(s, scale, p, added);
    const bool early = unseen(m[0]) || unseen(m[1]);
    if (__any_sync(~0u, early || !(added[0] <= 256.f && added[1] <= 256.f))) {
      wait_products<0>();  // of the step before, which add to o
      pin(o);
      raise(s, scale);
      weigh(s, scale, p, added);
    }
    l[0] += added[0], l[1] += added[1];
  }
};

// Hides the scores of tokens from limit[r] on: the causal mask.
template <int kScores>
__device__ void hide(float (&s)[kScores], int first, const int (&limit)[2]) {
  const int column = first + threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    if (column + i / 4 * 8 + i % 2 >= limit[i / 2 % 2]) s[i] = -INFINITY;
  }
}

// Hides the scores of tokens from `sink` on that lie before seen[r]: the window.
template <int kScores>
__device__ void hide_gap(float (&s)[kScores], int first, int sink, const int (&seen)[2]) {
  const int column = first + threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const int token = column + i / 4 * 8 + i % 2;
    if (token >= sink && token < seen[i / 2 % 2]) s[i] = -INFINITY;
  }
}

// Writes o / l of the rows that exist.
template <class E, int kV, class P, bool kWindows>
__device__ void write_rows(const P& p, const PromptTile& tile, const PromptHead& head,
                           const PromptRows<E, kV, kWindows>& rows, int row) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float l = rows.l[r] + __shfl_xor_sync(~0u, rows.l[r], 1);
    l += __shfl_xor_sync(~0u, l, 2);
    if constexpr (P::kScored) {
      const int query = p.sink_at[tile.head] + (row + 8 * r) % p.group_size;
      l += sink_term(p, query, rows.m[r] * p.scale_log2);
    }
    const float inverse = 1.f / l;
    const int in = row + 8 * r, token = in / p.group_size;
    if (in >= tile.rows) continue;
    uint16_t* to = p.o + (tile.token + token) * p.o_stride + head.o_offset +
                   (in - token * p.group_size) * 16 * kV;
#pragma unroll
    for (int i = 0; i < 2 * kV; ++i) {
      const uint32_t pair =
          E::pack(rows.o[4 * i + 2 * r] * inverse, rows.o[4 * i + 2 * r + 1] * inverse);
      *reinterpret_cast<uint32_t*>(to + 8 * i + threadIdx.x % 4 * 2) = pair;
    }
  }
}

#endif

}  // namespace kvlathe::cuda
