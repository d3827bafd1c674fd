// K and V of 64 tokens of a page of codes as fragments of the products of tile16.cuh, in registers,
// straight from the page.
//
// A code c is the half 1024 + c, which takes one instruction for two codes. What a group's scale and
// minimum make of it stands where it is needed least often:
//
//   K [rank][token]   in the queries: q' = scale q, s = q' (1024 + c) - 1024 q' + minimum q
//   V [rank][token]   in the sums: o += scale O + (minimum - 1024 scale) sum p, O = p (1024 + c)
//   [token][rank]     in each element. Products that are left to sums would need one group for all
//                     channels of a fragment, and scale p is too small for a half.
//
// Codes are read eight at a time: of a strip of 32 channels, or tokens, lane t = lane % 4 has codes
// 8 t .. 8 t + 7. So places in the two fragments of a strip stand for codes in another order (Order):
// of the channels in QK^T, which the queries take too; of the channels of O, which is put right at the
// end of the run; and of the tokens in PV, which the rows of QK^T take. Where rows of a page run the
// other way than those of a fragment, codes are transposed before they are numbers, several in an
// element of 16 bits.
#pragma once

#include "cuda/decode/tile16.cuh"
#include "cuda/forms.cuh"

namespace kvlathe::cuda {

constexpr int kStrip = 32, kStrips = kChunkTokens / kStrip, kChunkUnits = kChunkTokens / 16;

// Which of a strip's 32 stands at place g of half h of fragment b.
struct Order {
  int odd;  // from place 0 to place 1. 1: as they are; of codes that become numbers as a byte each 2,
            // and as four of 16 bits 4

  __device__ bool plain() const { return odd == 1; }
  __device__ int next() const { return plain() ? 16 : 6 - odd; }  // from a fragment to the next one
  __device__ int later() const { return plain() ? 8 : 1; }        // from a half to the next one
  __device__ int of_lane(int g) const { return g / 2 * (plain() ? 2 : 8) + g % 2 * odd; }
  __device__ int of(int b, int g, int h) const { return of_lane(g) + b * next() + h * later(); }
  __device__ bool operator!=(Order other) const { return odd != other.odd; }
};
constexpr Order kPlainOrder{1};
__device__ inline Order code_order(bool bytes) { return {bytes ? 2 : 4}; }
__device__ inline Order order_of(const FormSide& side) {
  return code_order(side.bits == 8 || side.bits == 3 || side.fixed_levels());
}

// x / y of small numbers, in few instructions.
__device__ inline int small_quotient(int x, int y) { return int(__fdividef(x + 0.5f, float(y))); }

// -- codes ----------------------------------------------------------------------------------------

// Eight codes of a row as elements of 16 bits with two (kBytes) or four codes each.
template <int kBits, bool kLevels>
struct Eight {
  static constexpr bool kBytes = kBits == 8 || kBits == 3 || kLevels;
  static constexpr int kWords = kBytes ? 2 : 1;
  uint32_t x[kWords];

  // From `code` on, of a row of `count`. (Of 3 bits: threes_at, in few registers.)
  __device__ __forceinline__ void load(uint32_t row, unsigned code, int count) {
    if constexpr (kBits == 8)
      load_vector(x, row + code);
    else if constexpr (kBits == 3)
      load_threes(x, row + code / 64 * 24 + code % 64 / 8, min(count - int(code & ~63u), 64) / 8);
    else if constexpr (kBytes)
      load_row_codes<kBits>(x, row, code, count);
    else if constexpr (kBits == 4)
      x[0] = load_word(row + code / 2);
    else
      x[0] = picked_bytes(load_half(row + code / 4), 0, 0x4140);
    if constexpr (kLevels) x[0] = levels_of_codes<kBits>(x[0]), x[1] = levels_of_codes<kBits>(x[1]);
  }
  __device__ __forceinline__ void turn() {
#pragma unroll
    for (uint32_t& word : x) word = transposed(word);
  }
  // Two halves 1024 + code, of half h of fragment b.
  __device__ __forceinline__ uint32_t halves(int b, int h) const {
    if constexpr (kBytes) return picked_bytes(x[b], 0x64646464, h ? 0x4341 : 0x4240);
    constexpr uint32_t kMask = kBits == 4 ? 0x000f000f : 0x00030003;
    return with_bits(x[0] >> kBits % 8 * (2 * b + h), kMask, 0x64006400);
  }
};

constexpr uint32_t k1024 = 0x64006400, k1151 = 0x647f647f;  // pairs of halves

// Codes as numbers of the element E. `x`: two halves 1024 + code; kOffset: what `plain` leaves of the
// 1024. Scales and minima are pairs of halves.
template <class E>
struct CodeNumbers;

template <>
struct CodeNumbers<Half> {
  static constexpr float kOffset = 1024.f;
  static constexpr uint32_t kOnes = 0x3c003c00, kLessOffset = 0xe400e400;
  __device__ static uint32_t plain(uint32_t x) { return x; }
  // (x - less) scale + minimum, rounded once.
  __device__ static uint32_t worth(uint32_t x, uint32_t less, uint32_t scale, uint32_t minimum) {
    return fma_halves(sub_halves(x, less), scale, minimum);
  }
  __device__ static uint32_t scaled(uint32_t q, uint32_t scale) { return fma_halves(q, scale, 0); }
  __device__ static uint32_t of_halves(uint32_t x) { return x; }
};

template <>
struct CodeNumbers<Bfloat> {
  static constexpr float kOffset = 0.f;
  static constexpr uint32_t kOnes = 0x3f803f80, kLessOffset = 0;
  __device__ static float low(uint32_t x) { return Half::widen(uint16_t(x)); }
  __device__ static float high(uint32_t x) { return Half::widen(uint16_t(x >> 16)); }
  __device__ static uint32_t of_halves(uint32_t x) { return Bfloat::pack(low(x), high(x)); }
  __device__ static uint32_t plain(uint32_t x) { return of_halves(sub_halves(x, k1024)); }
  __device__ static uint32_t worth(uint32_t x, uint32_t less, uint32_t scale, uint32_t minimum) {
    x = sub_halves(x, less);
    return Bfloat::pack(fmaf(low(x), low(scale), low(minimum)),
                        fmaf(high(x), high(scale), high(minimum)));
  }
  __device__ static uint32_t scaled(uint32_t q, uint32_t scale) {
    return Bfloat::pack(Bfloat::widen(uint16_t(q)) * low(scale),
                        Bfloat::widen(uint16_t(q >> 16)) * high(scale));
  }
};

// The scales and the minima of two groups.
template <bool kLevels>
struct Grids {
  static constexpr int kBytes = kLevels ? 2 : kPairBytes;
  // A level's value is scale (level - 127) - scale / 2, so that a rounded scale is no shift.
  static constexpr uint32_t kLess = kLevels ? k1151 : k1024;
  uint32_t scales = 0, minima = 0;

  // first, second: where their metadata is. there: or else zeros; what lies there may be anything.
  __device__ __forceinline__ void load(uint32_t first, uint32_t second, bool first_there = true,
                                       bool second_there = true) {
    if constexpr (kLevels) {
      const float a = first_there ? Half::widen(load_half(first)) * kTwo255ths : 0.f;
      const float b = second_there ? Half::widen(load_half(second)) * kTwo255ths : 0.f;
      scales = Half::pack(a, b), minima = Half::pack(-0.5f * a, -0.5f * b);
    } else {
      const uint32_t a = load_word(first) & (first_there ? ~0u : 0u);
      const uint32_t b = load_word(second) & (second_there ? ~0u : 0u);
      scales = picked_bytes(a, b, 0x5410), minima = picked_bytes(a, b, 0x7632);
    }
  }
};

// The groups of a token along the rank, strip by strip: `least` steps of 16 channels or, the first
// `longer`, one more. This lane's channels of a strip are of its step `own`.
struct GroupWalk {
  int least, longer, own, last;
  int group = 0, end;  // the first group that has not ended, and where it ends

  __device__ GroupWalk(int rank, int groups, int own)
      : least(small_quotient(rank / 16, groups)), longer(rank / 16 - least * groups), own(own) {
    end = least + (longer > 0), last = groups - 1;
  }
  // The group of this lane's channels of `strip`, one after the other; of channels that are not there
  // the last one.
  __device__ __forceinline__ int of(int strip) {
    while (end <= 2 * strip) ++group, end += least + (group < longer);
    return min(group + (2 * strip + own >= end), last);
  }
};

// -- queries --------------------------------------------------------------------------------------

// The queries of a run with codes, in shared memory: rows of fragments, 8 bytes a lane and fragment.
// Rows are 16 bytes apart in banks.
__host__ __device__ inline int query_row(int rank_k) {
  return (rank_k + kStrip - 1) / kStrip * kStrip * 2 + 16;
}
// And where O is put right, a strip at a time.
constexpr int kStripBytes = kStrip * kMaxGroup * 4;
__host__ __device__ inline int kept_queries_bytes(int rank_k) {
  const int queries = kMaxGroup * query_row(rank_k);
  return queries > kStripBytes ? queries : kStripBytes;
}
__device__ inline uint32_t own_queries(uint32_t kept, int rank_k) {
  return kept + threadIdx.x % 32 / 4 * query_row(rank_k) + threadIdx.x % 4 * 8;
}

// Keeps `queries` (shared, [group][rank_k]), their channels in `order`. Whole warp.
__device__ inline void keep_queries(uint32_t kept, uint32_t queries, int group, int rank_k,
                                    Order order) {
  const int query = threadIdx.x % 32 / 4, first = 2 * (threadIdx.x % 4);
  const uint32_t row = queries + query * rank_k * 2, own = own_queries(kept, rank_k);
  __syncwarp();
#pragma unroll 1
  for (int strip = 0; strip * kStrip < rank_k; ++strip) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t x[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int channel = strip * kStrip + order.of(i / 2, first + e, i % 2);
        x[e] = query < group && channel < rank_k ? load_half(row + 2 * channel) : 0;
      }
      store_word(own + 64 * strip + 32 * (i / 2) + 4 * (i % 2), x[0] | x[1] << 16);
    }
  }
  __syncwarp();
}

// Keeps them as they are.
__device__ inline void keep_plain_queries(uint32_t kept, uint32_t queries, int group, int rank_k) {
  __syncwarp();
  for (int at = threadIdx.x % 32 * 16; at < group * rank_k * 2; at += 512)
    shared_at<uint4>(kept + at) = load_words(queries + at);
  __syncwarp();
}

// -- scores ---------------------------------------------------------------------------------------

// s[b][2 h + i]: of the token at place g of half h of fragment b, and of this lane's query i. Fragments
// 0 and 1 are of the first strip, 2 and 3 of the second.
using Scores = float[kChunkUnits][4];

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
        Grids<false> grids;
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
        Eight<kBits, false> x[2];
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

// Where the tokens of a fragment lie in rows of a page [token][rank].
struct TokenRows {
  uint32_t codes, meta;  // of this lane's token in half 0 of the first fragment
  int row_bytes, meta_row;
  Order tokens;

  __device__ TokenRows(const FormRows& from, int meta_bytes, int token, Order tokens)
      : row_bytes(from.rank * from.side.bits / 8),
        meta_row(from.groups * meta_bytes),
        tokens(tokens) {
    const int own = token + tokens.of_lane(threadIdx.x % 32 / 4);
    codes = from.codes + own * row_bytes, meta = from.meta + own * meta_row;
  }
  __device__ int token_of(int tile) const { return tile / 2 * kStrip + tile % 2 * tokens.next(); }
};

// K [token][rank] of codes. A strip of tokens at a time.
template <class E, int kBits, bool kLevels>
__device__ __forceinline__ void score_tokens(Scores& s, const FormRows& k, uint32_t queries,
                                             int token, Order tokens) {
  using Numbers = CodeNumbers<E>;
  using Pair = Grids<kLevels>;
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
        Eight<kBits, kLevels> x[2];
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
            a[i] = Numbers::worth(x[i % 2].halves(b, i / 2), Pair::kLess, grid.scales, grid.minima);
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

// -- sums of values -------------------------------------------------------------------------------

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
        Eight<kBits, false> x[2];
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
template <bool kLevels>
__device__ __forceinline__ void keep_grids(uint32_t kept, const FormRows& v, int token, int valid,
                                           Order tokens) {
  const int lane = threadIdx.x % 32, tile = lane / 8;
  const int first = tile / 2 * kStrip + lane % 4 * 8 + tile % 2 * tokens.next() + lane / 4 % 2;
  const int meta_row = v.groups * Grids<kLevels>::kBytes;
  uint32_t meta = v.meta + (token + first) * meta_row;
  __syncwarp();
#pragma unroll 1
  for (int group = 0; group < v.groups; ++group, meta += Grids<kLevels>::kBytes) {
    Grids<kLevels> grids;
    grids.load(meta, meta + tokens.odd * meta_row, first < valid, first + tokens.odd < valid);
    const uint32_t to = kept + group * kGridsOfGroup + lane * 8;
    store_word(to, grids.scales), store_word(to + 4, grids.minima);
  }
  __syncwarp();
}

// V [token][rank] of codes. Channels of o then have the order of the codes. kept: kept_grids_bytes.
template <class E, int kBits, bool kLevels, int kSteps>
__device__ __forceinline__ void add_tokens(float (&o)[kSteps][4], const FormRows& v,
                                           Weights& weights, uint32_t kept, int token, int valid,
                                           Order tokens) {
  using Numbers = CodeNumbers<E>;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const TokenRows rows(v, 0, token, tokens);
  keep_grids<kLevels>(kept, v, token, valid, tokens);
  int group[kSteps / 2];
  GroupWalk walk(v.rank, v.groups, g / 4);
#pragma unroll
  for (int strip = 0; strip < kSteps / 2; ++strip)
    group[strip] = strip * kStrip < v.rank ? walk.of(strip) * kGridsOfGroup : 0;
#pragma unroll 1
  for (int tile = 0; tile < kChunkUnits; ++tile, weights.drop_first()) {
    const uint32_t first = rows.codes + rows.token_of(tile) * rows.row_bytes,
                   row[2] = {first, first + rows.row_bytes};
    const uint32_t entries = kept + tile * 64 + t * 8;
#pragma unroll
    for (int strip = 0; strip < kSteps / 2; ++strip) {
      if (strip * kStrip >= v.rank) break;
      uint32_t grids[2][2];
      Eight<kBits, kLevels> x[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        load_vector(grids[h], entries + group[strip] + 32 * h);
        x[h].load(row[h], strip * kStrip + 8 * t, v.rank), x[h].turn();
      }
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t (&grid)[2] = grids[i / 2];
          a[i] = Numbers::worth(x[i / 2].halves(b, i % 2), Grids<kLevels>::kLess, grid[0], grid[1]);
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
  return values.bits == 16 || values.by_channel() ? kPlainOrder : order_of(values);
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

// -- chunks of 64 tokens --------------------------------------------------------------------------

// Runs body(bits) with the bits of codes as a constant.
template <class Body>
__device__ __forceinline__ void for_bits(int bits, Body body) {
  using std::integral_constant;
  switch (bits) {
    case 8: body(integral_constant<int, 8>{}); break;
    case 4: body(integral_constant<int, 4>{}); break;
    case 3: body(integral_constant<int, 3>{}); break;
    case 2: body(integral_constant<int, 2>{}); break;
  }
}

// What order the scores of a page have: that of K's codes along the tokens, and otherwise any.
__device__ inline Order order_of_tokens(const FormSide& keys) {
  return keys.by_channel() ? order_of(keys) : code_order(true);
}
// And the kept queries.
__device__ inline Order order_of_queries(const FormSide& keys) {
  return keys.bits == 16 || keys.by_channel() ? kPlainOrder : order_of(keys);
}

// Scores of 64 tokens from `token` of a page on, in base 2. Those of tokens that do not exist may be
// anything. queries: this lane's of those that are kept.
template <class E>
__device__ __forceinline__ void score_codes(Scores& s, const FormRows& keys, uint32_t queries,
                                            int token, Order tokens, float scale_log2) {
  if (keys.side.bits == 16)
    score_elements<E>(s, keys, queries, token, tokens);
  else
    for_bits(keys.side.bits, [&](auto bits) {
      constexpr int kBits = decltype(bits)::value;
      if (keys.side.by_channel())
        score_channels<E, kBits>(s, keys, queries, token);
      else if (kBits < 8 && keys.side.fixed_levels())
        score_tokens<E, kBits, (kBits < 8)>(s, keys, queries, token, tokens);
      else
        score_tokens<E, kBits, false>(s, keys, queries, token, tokens);
    });
#pragma unroll
  for (int b = 0; b < kChunkUnits; ++b) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[b][i] *= scale_log2;
  }
}

// Adds V of 64 tokens, of which the first `valid` exist; the scores of the others are -inf. grids:
// room for what keep_grids keeps.
template <class E, int kSteps>
__device__ __forceinline__ void add_codes(SoftmaxState<kSteps>& state, const FormRows& values,
                                          uint32_t grids, int token, int valid, Order tokens,
                                          Scores& s) {
  state.weigh(s);
  Weights weights;
  weights.template set<E>(s);
  if (values.side.bits == 16)
    add_elements<E>(state.o, values, weights, token, valid, tokens);
  else
    for_bits(values.side.bits, [&](auto bits) {
      constexpr int kBits = decltype(bits)::value;
      if (values.side.by_channel()) {
        if (tokens != order_of(values.side)) weights.change_order();
        add_channels<E, kBits>(state.o, values, weights, token, valid);
      } else if (kBits < 8 && values.side.fixed_levels()) {
        add_tokens<E, kBits, (kBits < 8)>(state.o, values, weights, grids, token, valid, tokens);
      } else {
        add_tokens<E, kBits, false>(state.o, values, weights, grids, token, valid, tokens);
      }
    });
}

}  // namespace kvlathe::cuda
