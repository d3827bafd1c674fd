// The sums of values, and what 64 tokens of a page of codes add to them (fragments.cuh).
#pragma once

#include "cuda/decode/fragments.cuh"

namespace kvlathe::cuda {

// P of 64 tokens as second factors.
struct Weights {
  uint32_t p[kChunkUnits][2];

  template <class E>
  __device__ __forceinline__ void set(const Scores& s) {
#pragma unroll
    for (int b = 0; b < kChunkUnits; ++b) {
      p[b][0] = transposed(E::pack(s[b][0], s[b][1]));
      p[b][1] = transposed(E::pack(s[b][2], s[b][3]));
    }
  }
  // From one order of codes to the other.
  __device__ __forceinline__ void change_order() {
#pragma unroll
    for (int b = 0; b < kChunkUnits; b += 2) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t first = p[b][h], second = p[b + 1][h];
        p[b][h] = picked_bytes(first, second, 0x5410);
        p[b + 1][h] = picked_bytes(first, second, 0x7632);
      }
    }
  }
  // So that one copy of a loop's code is enough.
  __device__ __forceinline__ void drop_first() {
#pragma unroll
    for (int b = 1; b < kChunkUnits; ++b) p[b - 1][0] = p[b][0], p[b - 1][1] = p[b][1];
  }
};

// V [rank][token]. valid: tokens that exist.
template <class E, int kBits, int kSteps>
__device__ __forceinline__ void add_channels(float (&o)[kSteps][4], const FormRows& v,
                                             const Weights& weights, int token, int valid) {
  using Numbers = CodeNumbers<E>;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int count = pinned(v.row_tokens), row_bytes = pinned(count * kBits / 8);
  const int groups = pinned(v.groups), group = v.side.group;
  // What lies in a group that begins later may be anything.
#pragma unroll 1
  for (int first = 0; first < min(valid, kChunkTokens); first += group) {
    Weights own = weights;
    float sum[4] = {};
#pragma unroll
    for (int b = 0; b < kChunkUnits; ++b) {
      const int at = b / 2 * kStrip + 8 * t;
      const bool there = at >= first && at < first + group;
      own.p[b][0] = there ? own.p[b][0] : 0, own.p[b][1] = there ? own.p[b][1] : 0;
      constexpr uint32_t kOne = Numbers::kOnes;
      const uint32_t ones[4] = {kOne, kOne, kOne, kOne};
      E::multiply(sum, ones, own.p[b][0], own.p[b][1]);
    }
    uint32_t row = v.codes + g * row_bytes;
    uint32_t meta = v.meta + (g * groups + small_quotient(token + first, group)) * kPairBytes;
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      if (16 * j >= v.rank) break;
      row = pinned(row), meta = pinned(meta);
      float part[4] = {};
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
        if (strip * kStrip >= first + group || (strip + 1) * kStrip <= first) continue;
        Eight<CodeForm<kBits>> x[2];
#pragma unroll
        for (int h = 0; h < 2; ++h)
          x[h].load(row + 8 * h * row_bytes, token + strip * kStrip + 8 * t, count);
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          const uint32_t a[4] = {
              Numbers::plain(x[0].halves(b, 0)), Numbers::plain(x[1].halves(b, 0)),
              Numbers::plain(x[0].halves(b, 1)), Numbers::plain(x[1].halves(b, 1))};
          const uint32_t (&p)[2] = own.p[2 * strip + b];
          E::multiply(part, a, p[0], p[1]);
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t pair = load_word(meta + 8 * h * groups * kPairBytes);
        const float scale = Half::widen(uint16_t(pair)),
                    minimum = Half::widen(uint16_t(pair >> 16));
        const float rest = fmaf(-Numbers::kOffset, scale, minimum);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& to = o[j][2 * h + i];
          to = fmaf(scale, part[2 * h + i], fmaf(rest, sum[i], to));
        }
      }
      row += 16 * row_bytes, meta += 16 * groups * kPairBytes;
    }
  }
}

// What the elements of a fragment of V [token][rank] need of the metadata, by group: an entry for the
// two tokens that this lane has of half h of a fragment. In shared memory.
constexpr int kGridsOfGroup = 2 * kChunkUnits * 4 * 8;
__host__ __device__ inline int kept_grids_bytes(int groups) { return groups * kGridsOfGroup; }

// Keeps them for 64 tokens, of which `valid` exist: those of others are zeros. Whole warp.
template <Coding kCoding>
__device__ __forceinline__ void keep_grids(uint32_t kept, const FormRows& v, int token, int valid,
                                           Order tokens) {
  const int lane = threadIdx.x % 32, tile = lane / 8;
  const int first = tile / 2 * kStrip + lane % 4 * 8 + tile % 2 * tokens.next() + lane / 4 % 2;
  const int meta_row = v.groups * Grids<kCoding>::kBytes;
  uint32_t meta = v.meta + (token + first) * meta_row;
  __syncwarp();
#pragma unroll 1
  for (int group = 0; group < v.groups; ++group, meta += Grids<kCoding>::kBytes) {
    Grids<kCoding> grids;
    grids.load(meta, meta + tokens.odd * meta_row, first < valid, first + tokens.odd < valid);
    const uint32_t to = kept + group * kGridsOfGroup + lane * 8;
    store_word(to, grids.scales), store_word(to + 4, grids.minima);
  }
  __syncwarp();
}

// V [token][rank] of codes. Channels of o then have the order of the codes. kept: kept_grids_bytes.
template <class E, class C, int kSteps>
__device__ __forceinline__ void add_tokens(float (&o)[kSteps][4], const FormRows& v,
                                           Weights& weights, uint32_t kept, int token, int valid,
                                           Order tokens) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const TokenRows rows(v, 0, token, tokens);
  keep_grids<C::coding>(kept, v, token, valid, tokens);
  // Groups of many strips are found anew in each tile: registers hold the sums.
  constexpr bool kKeepsGroups = kSteps <= 16;
  int group[kKeepsGroups ? kSteps / 2 : 1];
  GroupWalk walk(v.rank, v.groups, g / 4);
#pragma unroll
  for (int strip = 0; kKeepsGroups && strip < kSteps / 2; ++strip)
    group[strip] = strip * kStrip < v.rank ? walk.of(strip) * kGridsOfGroup : 0;
#pragma unroll 1
  for (int tile = 0; tile < kChunkUnits; ++tile, weights.drop_first()) {
    if constexpr (!kKeepsGroups) walk = GroupWalk(v.rank, v.groups, g / 4);
    const uint32_t first = rows.codes + rows.token_of(tile) * rows.row_bytes,
                   row[2] = {first, first + rows.row_bytes};
    const uint32_t entries = kept + tile * 64 + t * 8;
#pragma unroll
    for (int strip = 0; strip < kSteps / 2; ++strip) {
      if (strip * kStrip >= v.rank) break;
      uint32_t grids[2][2];
      Eight<C> x[2];
      const int at =
          kKeepsGroups ? group[kKeepsGroups ? strip : 0] : walk.of(strip) * kGridsOfGroup;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        load_vector(grids[h], entries + at + 32 * h);
        x[h].load(row[h], strip * kStrip + 8 * t, v.rank), x[h].turn();
      }
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t (&grid)[2] = grids[i / 2];
          a[i] = worth_of<E, C::coding>(x[i / 2].halves(b, i % 2), grid[0], grid[1]);
        }
        E::multiply(o[2 * strip + b], a, weights.p[0][0], weights.p[0][1]);
      }
    }
  }
}

// V [token][rank] as it is.
template <class E, int kSteps>
__device__ __forceinline__ void add_elements(float (&o)[kSteps][4], const FormRows& v,
                                             Weights& weights, int token, int valid, Order tokens) {
  const TokenRows rows(v, 0, token, tokens);
  const int own = tokens.of_lane(threadIdx.x % 32 / 4);
#pragma unroll 1
  for (int tile = 0; tile < kChunkUnits; ++tile, weights.drop_first()) {
    const int at = rows.token_of(tile);
    const uint32_t row = rows.codes + at * rows.row_bytes + 4 * (threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      if (16 * j >= v.rank) break;
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool there = own + at + i / 2 < valid;
        a[i] =
            transposed(there ? load_word(row + i / 2 * rows.row_bytes + 32 * j + i % 2 * 16) : 0);
      }
      E::multiply(o[j], a, weights.p[0][0], weights.p[0][1]);
    }
  }
}

// The order of o's channels after a run of such values.
__device__ inline Order order_of_sums(const FormSide& values) {
  return is_half(values.bits) || values.by_channel() ? kPlainOrder : order_of(values);
}

// Puts the channels of o from one order into another, by kStripBytes of shared memory. Whole warp.
template <int kSteps>
__device__ __forceinline__ void reorder(float (&o)[kSteps][4], uint32_t scratch, Order from,
                                        Order to) {
  const int g = threadIdx.x % 32 / 4;
  const uint32_t own = scratch + threadIdx.x % 4 * 8;
#pragma unroll
  for (int strip = 0; strip < kSteps / 2; ++strip) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t at = own + from.of(i / 2, g, i % 2) * kMaxGroup * 4;
      const float (&x)[4] = o[2 * strip + i / 2];
      store_word(at, __float_as_uint(x[i % 2 * 2])),
          store_word(at + 4, __float_as_uint(x[i % 2 * 2 + 1]));
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t pair[2];
      load_vector(pair, own + to.of(i / 2, g, i % 2) * kMaxGroup * 4);
      float (&x)[4] = o[2 * strip + i / 2];
      x[i % 2 * 2] = __uint_as_float(pair[0]), x[i % 2 * 2 + 1] = __uint_as_float(pair[1]);
    }
  }
  __syncwarp();
}

// Adds V of 64 tokens, of which the first `valid` exist; the scores of the others are -inf. grids:
// room for what keep_grids keeps. kFloat8: as in score_codes.
template <class E, bool kFloat8, int kSteps>
__device__ __forceinline__ void add_codes(SoftmaxState<kSteps>& state, const FormRows& values,
                                          uint32_t grids, int token, int valid, Order tokens,
                                          Scores& s) {
  state.weigh(s);
  Weights weights;
  weights.template set<E>(s);
  if (is_half(values.side.bits))
    add_elements<E>(state.o, values, weights, token, valid, tokens);
  else
    for_bits(values.side.bits, [&](auto bits) {
      constexpr int kBits = decltype(bits)::value;
      if (values.side.by_channel()) {
        if (tokens != order_of(values.side)) weights.change_order();
        add_channels<E, kBits>(state.o, values, weights, token, valid);
      } else if (has_width(Coding::kNormal, kBits) && values.side.fixed_levels()) {
        using C = CodedAs<kBits, Coding::kNormal>;
        add_tokens<E, C>(state.o, values, weights, grids, token, valid, tokens);
      } else if (kFloat8 && has_width(Coding::kFloat8, kBits) && values.side.float8()) {
        using C = CodedAs<kBits, Coding::kFloat8>;
        add_tokens<E, C>(state.o, values, weights, grids, token, valid, tokens);
      } else {
        add_tokens<E, CodeForm<kBits>>(state.o, values, weights, grids, token, valid, tokens);
      }
    });
}

}  // namespace kvlathe::cuda
