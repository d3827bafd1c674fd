// A page of one quantized lane, attended on its codes for a bundle's columns (bundles.cuh). The
// arithmetic is that of attend_codes.cuh with kFill 1. But a fragment of codes meets two tiles of 8
// columns, so codes are unpacked once for both. Each tile has its own queries and its own state.
#pragma once

#include "cuda/decode/attend_codes.cuh"
#include "cuda/decode/bundles.cuh"

namespace kvlathe::cuda {

constexpr int kCodeTiles = 2;
using TileScores = float[kCodeTiles][kPairs][4];
using TileSums = int32_t[kCodeTiles][4];
template <int kSteps>
using TileStates = SoftmaxState<kSteps>[kCodeTiles];

// Adds QK^T of kTaken steps of 16 channels to `sums`. k: where this lane's first row lies; q: where
// the queries of the steps start, those of the second tile `tile_bytes` after them.
template <int kBits, int kTaken>
__device__ void add_tile_products(int32_t (&sums)[kCodeTiles][kPairs][4], uint32_t k, int row_bytes,
                                  uint32_t q, int tile_bytes) {
  using C = Codes<kBits>;
  constexpr int kShare = C::kIn / kTaken;  // lane columns that share a word
  constexpr int kTogether = kTaken < 2 ? 1 : 2;
  uint32_t b[kCodeTiles][kTaken / kTogether][kTogether];
#pragma unroll
  for (int t = 0; t < kCodeTiles; ++t) {
#pragma unroll
    for (int i = 0; i < kTaken / kTogether; ++i)
      load_vector(b[t][i], q + t * tile_bytes + (i * 32 + threadIdx.x % 32) * kTogether * 4);
  }
  if constexpr (is_byte(kBits)) {
#pragma unroll
    for (int p = 0; p < kPairs; p += 2) {
      uint32_t a[4];
      load_matrices(a, k + C::token(0, p) * row_bytes);
#pragma unroll
      for (int t = 0; t < kCodeTiles; ++t) {
        multiply_signed(sums[t][p], a[0], a[1], b[t][0][0]);
        multiply_signed(sums[t][p + 1], a[2], a[3], b[t][0][0]);
      }
    }
  } else {
    const int column = threadIdx.x % 4, shift = column % kShare * kTaken * kBits;
    k += column / kShare * 4;
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      const uint32_t low = load_word(k + C::token(0, p) * row_bytes) >> shift;
      const uint32_t high = load_word(k + C::token(1, p) * row_bytes) >> shift;
      if constexpr (kTaken == 1) {
#pragma unroll
        for (int t = 0; t < kCodeTiles; ++t)
          multiply_signed(sums[t][p], low & C::kMask, high & C::kMask, b[t][0][0]);
      } else {
#pragma unroll
        for (int i = 0; i < kTaken; i += 2) {
          const uint32_t a[4] = {low >> i * kBits & C::kMask, high >> i * kBits & C::kMask,
                                 low >> (i + 1) * kBits & C::kMask,
                                 high >> (i + 1) * kBits & C::kMask};
#pragma unroll
          for (int t = 0; t < kCodeTiles; ++t)
            multiply_signed(sums[t][p], a[0], a[1], a[2], a[3], b[t][i / 2][0], b[t][i / 2][1]);
        }
      }
    }
  }
}

// S in base 2, as find_scores has it.
template <int kBits, int kOnly>
__device__ void tile_scores_of(TileScores& s, const Slab& slab, const Chunk& chunk,
                               uint32_t codes) {
  using C = Codes<kBits>;
  const int row_bytes = kOnly ? kOnly * C::kStepBytes : pinned(slab.row_bytes),
            count = kOnly ? 1 : slab.groups.count;
  const int words = ((kOnly ? kOnly : slab.steps_k) + count) * 128, tile_bytes = words + count * 64;
  uint32_t k = chunk.k, q = codes;
  const uint32_t constants = codes + words + threadIdx.x % 4 * 16;
#pragma unroll
  for (int t = 0; t < kCodeTiles; ++t) {
#pragma unroll
    for (int f = 0; f < kPairs; ++f) s[t][f][0] = s[t][f][1] = s[t][f][2] = s[t][f][3] = 0.f;
  }
#pragma unroll 1
  for (int g = 0; g < count; ++g) {
    int32_t sums[kCodeTiles][kPairs][4];
#pragma unroll
    for (int t = 0; t < kCodeTiles; ++t) {
#pragma unroll
      for (int f = 0; f < kPairs; ++f)
        sums[t][f][0] = sums[t][f][1] = sums[t][f][2] = sums[t][f][3] = kMagicBits;
    }
    const int steps = kOnly ? kOnly : slab.groups.steps(g);
    uint32_t at = k;
    const auto take = [&](auto taken) {
      add_tile_products<kBits, decltype(taken)::value>(sums, at, row_bytes, q, tile_bytes);
      at += decltype(taken)::value * C::kStepBytes, q += decltype(taken)::value * 128;
    };
    int rest = steps;
#pragma unroll kOnly ? 4 : 1
    for (; rest > C::kIn / 2; rest -= C::kIn) take(std::integral_constant<int, C::kIn>{});
    if constexpr (C::kIn > 2) {
      if (rest == 2) take(std::integral_constant<int, 2>{});
    }
    if constexpr (C::kIn > 1) {
      if (rest == 1) take(std::integral_constant<int, 1>{});
    }
    k += steps * C::kStepBytes;
    float a[kCodeTiles][2], a_sum[kCodeTiles][2], less[kCodeTiles][2];
#pragma unroll
    for (int t = 0; t < kCodeTiles; ++t) {  // (A, A sum q') of the two queries
      const uint4 constant = load_words(constants + t * tile_bytes + g * 64);
      a[t][0] = __uint_as_float(constant.x), a[t][1] = __uint_as_float(constant.z);
      a_sum[t][0] = __uint_as_float(constant.y), a_sum[t][1] = __uint_as_float(constant.w);
      less[t][0] = -kMagic * a[t][0], less[t][1] = -kMagic * a[t][1];
    }
#pragma unroll
    for (int f = 0; f < kPairs; ++f) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float2 meta = meta_at(chunk.k_meta + (C::token(e, f) * count + g) * 4);
#pragma unroll
        for (int t = 0; t < kCodeTiles; ++t) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float product = fmaf(__int_as_float(sums[t][f][2 * e + i]), a[t][i], less[t][i]);
            float& own = s[t][f][2 * e + i];
            own = fmaf(a_sum[t][i], meta.y, fmaf(product, meta.x, own));
          }
        }
      }
    }
  }
}

template <int kBits>
__device__ void find_tile_scores(TileScores& s, const Slab& slab, const Chunk& chunk,
                                 uint32_t codes) {
  switch (slab.groups.count == 1 ? slab.steps_k : 0) {
    case 1: return tile_scores_of<kBits, 1>(s, slab, chunk, codes);
    case 2: return tile_scores_of<kBits, 2>(s, slab, chunk, codes);
    case 3: return tile_scores_of<kBits, 3>(s, slab, chunk, codes);
    case 4: return tile_scores_of<kBits, 4>(s, slab, chunk, codes);
    default: return tile_scores_of<kBits, 0>(s, slab, chunk, codes);
  }
}

// Adds V^T P of 16 channels and 64 tokens, as add_channels does.
template <int kBits>
__device__ void add_tile_channels(TileSums& lows, TileSums& highs, uint32_t v, int v_stride,
                                  const CodeWeights<1> (&p)[kCodeTiles]) {
  using C = Codes<kBits>;
  uint32_t first[kBits / 2], second[kBits / 2];
  load_vector(first, v);
  load_vector(second, v + 8 * v_stride);
  const auto take = [](const uint32_t (&words)[kBits / 2], int pair) {
    const uint32_t word = C::crumbs ? words[0] >> pair / 2 * 4 : words[pair / C::kIn];
    return word & C::kMask << (C::packed ? pair % 2 * kBits : 0);
  };
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    const uint32_t a[4] = {take(first, odd), take(second, odd), take(first, 2 + odd),
                           take(second, 2 + odd)};
#pragma unroll
    for (int t = 0; t < kCodeTiles; ++t)
      multiply_unsigned(odd && C::packed ? highs[t] : lows[t], a[0], a[1], a[2], a[3],
                        p[t].all[2 * odd], p[t].all[2 * odd + 1]);
  }
}

// o += B (scale sum p' v' + minimum sum p') and l += B sum p', as add_values does.
template <int kBits, bool kPlain, int kSteps>
__device__ void add_tile_values(TileStates<kSteps>& states, const Slab& slab, uint32_t v,
                                int v_stride, uint32_t v_meta,
                                const CodeWeights<1> (&p)[kCodeTiles],
                                const float (&step)[kCodeTiles][2]) {
  using C = Codes<kBits>;
  const int meta_stride = kPlain ? 4 : pinned(slab.meta_stride);
  float worth[kCodeTiles][2], less[kCodeTiles][2], total[kCodeTiles][2];  // worth: of a sum
#pragma unroll
  for (int t = 0; t < kCodeTiles; ++t) {
    p[t].total(step[t], total[t]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      worth[t][i] = step[t][i] * (1.f / C::kHigh), less[t][i] = -kMagic * worth[t][i];
      if (threadIdx.x % 32 < 4) states[t].l[i] += total[t][i];
    }
  }
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    if (j >= slab.steps_v) break;
    TileSums lows, sums;
#pragma unroll
    for (int t = 0; t < kCodeTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) lows[t][i] = 0, sums[t][i] = kMagicBits;
    }
    add_tile_channels<kBits>(C::packed ? lows : sums, sums, v, v_stride, p);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 group = meta_at(v_meta + (i < 2 ? 0 : 8 * meta_stride));
#pragma unroll
      for (int t = 0; t < kCodeTiles; ++t) {
        const float product = fmaf(__int_as_float(lows[t][i] * C::kHigh + sums[t][i]),
                                   worth[t][i % 2], less[t][i % 2]);
        float& to = states[t].o[j][i];
        to = fmaf(total[t][i % 2], group.y, fmaf(product, group.x, to));
      }
    }
    v += 16 * v_stride;
    v_meta += 16 * meta_stride;
  }
}

// 64 tokens, of which the first `rows` exist, as attend_chunk has them.
template <int kBits, bool kPlain, int kSteps>
__device__ void attend_chunk(TileStates<kSteps>& states, const Slab& slab, const Chunk& chunk,
                             uint32_t codes, int v_stride, int rows) {
  using C = Codes<kBits>;
  TileScores s;
  float step[kCodeTiles][2];
  uint32_t own[kPairs];
  CodeWeights<1> p[kCodeTiles];
  find_tile_scores<kBits>(s, slab, chunk, codes);
  const int token = own_token<kBits, 1>();
#pragma unroll
  for (int t = 0; t < kCodeTiles; ++t) {
    if (rows < kChunkTokens) {
#pragma unroll
      for (int f = 0; f < kPairs; ++f) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (token + C::token(i / 2, f) >= rows) s[t][f][i] = -INFINITY;
        }
      }
    }
    weigh_codes(states[t], s[t], own, step[t]);
    p[t] = CodeWeights<1>(own);
  }
  if constexpr (kPlain) {
    add_tile_values<kBits, kPlain, kSteps>(states, slab, chunk.v, v_stride, chunk.v_meta, p, step);
  } else {
    const int groups = slab.group_shift > 5 ? 1 : 2;  // of V in 64 tokens
#pragma unroll 1
    for (int half = 0; half < groups; ++half) {
      CodeWeights<1> part[kCodeTiles];
#pragma unroll
      for (int t = 0; t < kCodeTiles; ++t) {
        part[t] = p[t];
        if (groups == 2) part[t].keep_half(half);
      }
      add_tile_values<kBits, kPlain, kSteps>(states, slab, chunk.v, v_stride,
                                             chunk.v_meta + 4 * half, part, step);
    }
  }
}

}  // namespace kvlathe::cuda
