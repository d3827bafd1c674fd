// A page of one quantized lane, attended on its codes of 8, 4 or 2 bits. K is [token][rank] in
// groups along the rank, V [rank][token] in groups along the tokens. Nothing is dequantized: a
// group's scale and minimum leave the sum (Eq. 4 of HACK; export/attention/integer.py says the same
// in torch). With codes k' and v':
//
//   S  q ~ A q', q' in [-127, 127], one A for each query and group of K:
//      q k = sum over groups of A (scale sum q' k' + minimum sum q')
//   O  p ~ B p', p' in [0, 255], one B for each query and 64 tokens:
//      o += B (scale sum p' v' + minimum sum p')
//
// Matrix units take the sums of products, bytes into 32 bits. Everything else is arithmetic on
// their results, and there is much of it.
//
// 64 tokens are four pairs of blocks of 8 tokens. A pair is the 16 rows of one product QK^T. Which
// token is which row is chosen for the second product, PV: its inner dimension runs in the order in
// which P comes out of the first, transposed. A lane's own word of packed V, shifted and masked, is
// then a fragment of it, and no code is moved between lanes.
//
// kFill 2 is for at most 4 query heads, which would leave half of a product's 8 columns empty. The
// queries come twice, in columns 0 to 3 and in columns 4 to 7, with zeros elsewhere. Two pairs (of
// V: two blocks of 16 channels) add into one fragment, each by its own copy. There are as many
// products as before, but half as many results to work on.
#pragma once

#include "cuda/decode/codes_scores.cuh"
#include "cuda/decode/codes_values.cuh"

namespace kvlathe::cuda {

// 64 tokens, of which the first `rows` exist. codes: the run's quantized queries. v_stride: bytes
// of a channel of V. kPlain: a page has 64 tokens and is one group of V, the commonest case. Its
// sizes are constants, which saves instructions.
template <int kBits, bool kPlain, int kSteps, int kFill>
__device__ void attend_chunk(SoftmaxState<kSteps, kFill>& state, const Slab& slab,
                             const Chunk& chunk, uint32_t codes, int v_stride, int rows) {
  using C = Codes<kBits>;
  constexpr int kFragments = kPairs / kFill;
  float s[kFragments][4], step[2];
  uint32_t own[kFragments];
  find_scores<kBits, kFill>(s, slab, chunk, codes);
  if (rows < kChunkTokens) {
    const int token = own_token<kBits, kFill>();
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (token + C::token(i / 2, f) >= rows) s[f][i] = -INFINITY;
      }
    }
  }
  weigh_codes(state, s, own, step);
  const CodeWeights<kFill> p(own);
  if constexpr (kPlain) {
    add_values<kBits, kPlain>(state, slab, chunk.v, v_stride, chunk.v_meta, p, step);
  } else {
    const int groups = slab.group_shift > 5 ? 1 : 2;  // of V in 64 tokens
#pragma unroll 1
    for (int half = 0; half < groups; ++half) {
      CodeWeights<kFill> part = p;
      if (groups == 2) part.keep_half(half);
      add_values<kBits, kPlain>(state, slab, chunk.v, v_stride, chunk.v_meta + 4 * half, part,
                                step);
    }
  }
}

// A tile of one or two pages, of which the first `rows` tokens exist.
// State: what attend_chunk adds to.
template <int kBits, bool kPlain, class State>
__device__ void attend_pages(State& state, const Slab& slab, uint32_t tile, uint32_t codes,
                             int page_tokens, int rows) {
  if constexpr (kPlain) {
#pragma unroll 1
    for (; rows > 0; rows -= kChunkTokens, tile += slab.bytes) {
      const Chunk chunk{tile + slab.k, tile + slab.k_meta, tile + slab.v, tile + slab.v_meta};
      attend_chunk<kBits, kPlain>(state, slab, chunk, codes, kChunkTokens * kBits / 8, rows);
    }
  } else {
#pragma unroll 1
    for (int token = 0; token < rows; token += kChunkTokens) {
      const int first = token & (page_tokens - 1);
      const uint32_t page = tile + (token >= page_tokens ? slab.bytes : 0);
      const Chunk chunk{page + slab.k + first * slab.row_bytes +
                            (Codes<kBits>::packed ? 0 : first / kPieceTokens * kPieceGap),
                        page + slab.k_meta + first * slab.groups.count * 4,
                        page + slab.v + first * kBits / 8,
                        page + slab.v_meta + (first >> slab.group_shift) * 4};
      attend_chunk<kBits, kPlain>(state, slab, chunk, codes, page_tokens * kBits / 8, rows - token);
    }
  }
}

}  // namespace kvlathe::cuda
