// A page of one quantized lane, attended on its codes: K [token][rank] in groups along the rank, V
// [rank][token] in groups along the tokens, 8, 4 or 2 bit. Nothing is dequantized
// (export/attention/integer.py says the same in torch):
//
//   scores  q ~ A q', q' in [-127, 127], one A a (query, group):
//           q k = sum over groups of A (s sum q' k' + m sum q')
//   output  p ~ B p', p' in [0, 255], one B a (query, 64 tokens):
//           o += B (s sum p' v' + m sum p')
//
// Only the sums of products run on matrix units, bytes into 32 bits. 64 tokens are four pairs of
// 8-token blocks: a pair is the 16 rows of one product of scores. Which token is which row is
// chosen so that a lane's own word of packed V, shifted and masked, is a fragment of the second
// product, whose inner dimension runs in the order that transposing the first one's result gives.
//
// kFill 2, for at most 4 query heads: they would leave half of a product's 8 columns empty. So the
// queries come twice, in columns 0 to 3 and in columns 4 to 7, zeros elsewhere, and two pairs (for
// V two blocks of 16 channels) add into one fragment, each with its own copy. The products stay as
// many; all the work on their results halves.
#pragma once

#include "cuda/decode/codes_scores.cuh"
#include "cuda/decode/codes_values.cuh"

namespace kvlathe::cuda {

// A chunk whose first `rows` tokens exist. codes: the run's quantized queries; v_stride: bytes of a
// channel of V. kPlain: pages of 64 tokens, each one group of V: sizes are constants.
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
  const Weights<kFill> weights(own);
  if constexpr (kPlain) {
    add_values<kBits, kPlain>(state, slab, chunk.v, v_stride, chunk.v_meta, weights, step);
  } else {
    const int groups = slab.group_shift > 5 ? 1 : 2;  // of V in 64 tokens
#pragma unroll 1
    for (int half = 0; half < groups; ++half) {
      Weights<kFill> part = weights;
      if (groups == 2) part.keep_half(half);
      add_values<kBits, kPlain>(state, slab, chunk.v, v_stride, chunk.v_meta + 4 * half, part,
                                step);
    }
  }
}

// A tile of pages whose first `rows` tokens exist.
template <int kBits, bool kPlain, int kSteps, int kFill>
__device__ void attend_pages(SoftmaxState<kSteps, kFill>& state, const Slab& slab, uint32_t tile,
                             uint32_t codes, int page_tokens, int rows) {
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
      const uint32_t page =
          tile + (token >= page_tokens ? slab.bytes : 0);  // a tile has at most two
      const Chunk chunk{page + slab.k + first * slab.row_bytes +
                            (kBits == 8 ? first / kPieceTokens * kPieceGap : 0),
                        page + slab.k_meta + first * slab.groups.count * 4,
                        page + slab.v + first * kBits / 8,
                        page + slab.v_meta + (first >> slab.group_shift) * 4};
      attend_chunk<kBits, kPlain>(state, slab, chunk, codes, page_tokens * kBits / 8, rows - token);
    }
  }
}

}  // namespace kvlathe::cuda
