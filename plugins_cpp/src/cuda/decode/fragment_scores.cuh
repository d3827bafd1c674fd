// Scores of 64 tokens of a page of codes (fragments.cuh).
#pragma once

#include "cuda/decode/fragments.cuh"

namespace kvlathe::cuda {

// K [rank][token]. Groups along the tokens are taken in turn: mostly there is one.
template <class E, int kBits>
__device__ __forceinline__ void score_channels(Scores& s, const FormRows& k, uint32_t queries,
                                               int token) {
  using Numbers = CodeNumbers<E>;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int count = pinned(k.row_tokens), row_bytes = count * kBits / 8;
  const int groups = pinned(k.groups), group = k.side.group;
#pragma unroll 1
  for (int first = 0; first < kChunkTokens; first += group) {
    float sums[kChunkUnits][4] = {}, rest[4] = {};
    uint32_t row = k.codes + g * row_bytes, q = queries;
    uint32_t meta = k.meta + (2 * t * groups + small_quotient(token + first, group)) * kPairBytes;
#pragma unroll 1
    for (int j = k.rank / 16; j > 0; --j) {
      uint32_t own[2], scaled[2], minima[4];
      load_vector(own, q);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        Grids<Coding::kAffine> grids;
        const uint32_t at = meta + 8 * h * groups * kPairBytes;
        grids.load(at, at + groups * kPairBytes);
        scaled[h] = Numbers::scaled(own[h], grids.scales);
        minima[2 * h] = minima[2 * h + 1] = Numbers::of_halves(grids.minima);
      }
      E::multiply(rest, minima, own[0], own[1]);
      if constexpr (Numbers::kOffset != 0.f) {
        constexpr uint32_t kLess = Numbers::kLessOffset;
        const uint32_t less[4] = {kLess, kLess, kLess, kLess};
        E::multiply(rest, less, scaled[0], scaled[1]);
      }
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
        if (strip * kStrip >= first + group || (strip + 1) * kStrip <= first) continue;
        Eight<CodeForm<kBits>> x[2];
#pragma unroll
        for (int h = 0; h < 2; ++h)
          x[h].load(row + 8 * h * row_bytes, token + strip * kStrip + 8 * t, count), x[h].turn();
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          const uint32_t a[4] = {
              Numbers::plain(x[0].halves(b, 0)), Numbers::plain(x[0].halves(b, 1)),
              Numbers::plain(x[1].halves(b, 0)), Numbers::plain(x[1].halves(b, 1))};
          E::multiply(sums[2 * strip + b], a, scaled[0], scaled[1]);
        }
      }
      row += 16 * row_bytes, meta += 16 * groups * kPairBytes, q += 32;
    }
#pragma unroll
    for (int b = 0; b < kChunkUnits; ++b) {
      const int own = b / 2 * kStrip + g / 2 * 8;
      if (own < first || own >= first + group) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) s[b][i] = sums[b][i] + rest[i];
    }
  }
}

// K [token][rank] of codes. A strip of tokens at a time.
template <class E, class C>
__device__ __forceinline__ void score_tokens(Scores& s, const FormRows& k, uint32_t queries,
                                             int token, Order tokens) {
  using Pair = Grids<C::coding>;
  const int t = threadIdx.x % 4;
  const TokenRows rows(k, Pair::kBytes, token, tokens);
#pragma unroll 1
  for (int of_tokens = 0; of_tokens < kStrips; ++of_tokens) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[0][i] = s[2][i], s[1][i] = s[3][i], s[2][i] = s[3][i] = 0.f;
    GroupWalk walk(k.rank, k.groups, t / 2);
    uint32_t q = queries, row[2][2], meta[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = rows.token_of(2 * of_tokens + i / 2) + i % 2;
      row[i / 2][i % 2] = rows.codes + at * rows.row_bytes;
      meta[i / 2][i % 2] = rows.meta + at * rows.meta_row;
    }
#pragma unroll 1
    for (int strip = 0; strip * kStrip < k.rank; ++strip, q += 64) {
      uint32_t own[2][2];
      load_vector(own[0], q), load_vector(own[1], q + 32);
      const int group = walk.of(strip) * Pair::kBytes;
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        Eight<C> x[2];
        Pair grids[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          grids[h].load(meta[tile][h] + group, meta[tile][h] + group);
          x[h].load(row[tile][h], strip * kStrip + 8 * t, k.rank);
        }
        // Channels that are not there: their queries are zeros, and their codes finite.
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          uint32_t a[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const Pair& grid = grids[i % 2];
            a[i] = worth_of<E, C::coding>(x[i % 2].halves(b, i / 2), grid.scales, grid.minima);
          }
          E::multiply(s[2 + tile], a, own[b][0], own[b][1]);
        }
      }
    }
  }
}

// K [token][rank] as it is.
template <class E>
__device__ __forceinline__ void score_elements(Scores& s, const FormRows& k, uint32_t queries,
                                               int token, Order tokens) {
  const TokenRows rows(k, 0, token, tokens);
#pragma unroll 1
  for (int tile = 0; tile < kChunkUnits; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      s[0][i] = s[1][i], s[1][i] = s[2][i], s[2][i] = s[3][i], s[3][i] = 0.f;
    uint32_t q = queries;
    uint32_t at = rows.codes + rows.token_of(tile) * rows.row_bytes + 4 * (threadIdx.x % 4);
#pragma unroll 1
    for (int j = k.rank / 16; j > 0; --j, at += 32, q += 32) {
      uint32_t own[2];
      load_vector(own, q);
      const uint32_t a[4] = {load_word(at), load_word(at + rows.row_bytes), load_word(at + 16),
                             load_word(at + rows.row_bytes + 16)};
      E::multiply(s[3], a, own[0], own[1]);
    }
  }
}

// What order the scores of a page have: that of K's codes along the tokens, and otherwise any.
__device__ inline Order order_of_tokens(const FormSide& keys) {
  return keys.by_channel() ? order_of(keys) : code_order(true);
}
// And the kept queries.
__device__ inline Order order_of_queries(const FormSide& keys) {
  return is_half(keys.bits) || keys.by_channel() ? kPlainOrder : order_of(keys);
}

// Scores of 64 tokens from `token` of a page on, in base 2. Those of tokens that do not exist may be
// anything. queries: this lane's of those that are kept. kFloat8: codes may be floats of 8 bits.
template <class E, bool kFloat8>
__device__ __forceinline__ void score_codes(Scores& s, const FormRows& keys, uint32_t queries,
                                            int token, Order tokens, float scale_log2) {
  if (is_half(keys.side.bits))
    score_elements<E>(s, keys, queries, token, tokens);
  else
    for_bits(keys.side.bits, [&](auto bits) {
      constexpr int kBits = decltype(bits)::value;
      if (keys.side.by_channel())
        score_channels<E, kBits>(s, keys, queries, token);
      else if (has_width(Coding::kNormal, kBits) && keys.side.fixed_levels())
        score_tokens<E, CodedAs<kBits, Coding::kNormal>>(s, keys, queries, token, tokens);
      else if (kFloat8 && has_width(Coding::kFloat8, kBits) && keys.side.float8())
        score_tokens<E, CodedAs<kBits, Coding::kFloat8>>(s, keys, queries, token, tokens);
      else
        score_tokens<E, CodeForm<kBits>>(s, keys, queries, token, tokens);
    });
#pragma unroll
  for (int b = 0; b < kChunkUnits; ++b) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[b][i] *= scale_log2;
  }
}

}  // namespace kvlathe::cuda
