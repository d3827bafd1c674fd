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
__device__ inline Order order_of(const FormSide& side) { return code_order(side.in_bytes()); }

// x / y of small numbers, in few instructions.
__device__ inline int small_quotient(int x, int y) { return int(__fdividef(x + 0.5f, float(y))); }

// -- codes ----------------------------------------------------------------------------------------

// Eight codes of a row as elements of 16 bits with two (kBytes) or four codes each. C: CodeForm.
template <class C>
struct Eight {
  static constexpr int kBits = C::bits;
  static constexpr bool kBytes = !C::packed || C::blocks || C::levels;
  static constexpr int kWords = kBytes ? 2 : 1;
  uint32_t x[kWords];

  // From `code` on, of a row of `count`. (Of 3 bits: threes_at, in few registers.)
  __device__ __forceinline__ void load(uint32_t row, unsigned code, int count) {
    if constexpr (!C::packed)
      load_vector(x, row + code);
    else if constexpr (C::blocks)
      load_threes(x, row + code / 64 * 24 + code % 64 / 8, min(count - int(code & ~63u), 64) / 8);
    else if constexpr (kBytes)
      load_row_codes<kBits>(x, row, code, count);
    else if constexpr (is_nibble(kBits))
      x[0] = load_word(row + code / 2);
    else
      x[0] = picked_bytes(load_half(row + code / 4), 0, 0x4140);
    if constexpr (C::levels)
      x[0] = levels_of_codes<kBits>(x[0]), x[1] = levels_of_codes<kBits>(x[1]);
  }
  __device__ __forceinline__ void turn() {
#pragma unroll
    for (uint32_t& word : x) word = transposed(word);
  }
  // Two halves 1024 + code, of half h of fragment b. Of floats what is 2^8 times smaller than they
  // (small_half_of).
  __device__ __forceinline__ uint32_t halves(int b, int h) const {
    if constexpr (C::floats) {
      const uint32_t above = picked_bytes(x[b], 0, h ? 0x3414 : 0x2404);
      return (above & 0x80008000) | (above >> 1 & 0x3f803f80);
    }
    if constexpr (kBytes) return picked_bytes(x[b], 0x64646464, h ? 0x4341 : 0x4240);
    constexpr uint32_t kMask = is_nibble(kBits) ? 0x000f000f : 0x00030003;
    return with_bits(x[0] >> kBits % 8 * (2 * b + h), kMask, 0x64006400);
  }
};

constexpr uint32_t k256 = 0x5c005c00, k1024 = 0x64006400, k1151 = 0x647f647f;  // pairs of halves

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
  // x scale of floats that are 2^8 times smaller, rounded once.
  __device__ static uint32_t worth(uint32_t x, uint32_t scale) {
    return fma_halves(fma_halves(x, k256, 0), scale, 0);
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
  __device__ static uint32_t worth(uint32_t x, uint32_t scale) {
    return Bfloat::pack(low(x) * (low(scale) * kFloat8Unit), high(x) * (high(scale) * kFloat8Unit));
  }
  __device__ static uint32_t scaled(uint32_t q, uint32_t scale) {
    return Bfloat::pack(Bfloat::widen(uint16_t(q)) * low(scale),
                        Bfloat::widen(uint16_t(q >> 16)) * high(scale));
  }
};

// The scales and the minima of two groups.
template <Coding kCoding>
struct Grids {
  static constexpr int kBytes = 2 * metadata_halves(kCoding);
  // A level's value is scale (level - 127) - scale / 2, so that a rounded scale is no shift.
  static constexpr uint32_t kLess = has_levels(kCoding) ? k1151 : k1024;
  uint32_t scales = 0, minima = 0;

  // first, second: where their metadata is. there: or else zeros; what lies there may be anything.
  __device__ __forceinline__ void load(uint32_t first, uint32_t second, bool first_there = true,
                                       bool second_there = true) {
    if constexpr (has_floats(kCoding)) {
      const uint32_t a = first_there ? load_half(first) : 0;
      const uint32_t b = second_there ? load_half(second) : 0;
      scales = a | b << 16;
    } else if constexpr (has_levels(kCoding)) {
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

// What two codes are worth (Eight::halves), whose groups have such a scale and minimum.
template <class E, Coding kCoding>
__device__ __forceinline__ uint32_t worth_of(uint32_t halves, uint32_t scale, uint32_t minimum) {
  if constexpr (has_floats(kCoding))
    return CodeNumbers<E>::worth(halves, scale);
  else
    return CodeNumbers<E>::worth(halves, Grids<kCoding>::kLess, scale, minimum);
}

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

// Codes of such a coding, where they may have so many bits; or else affine ones.
template <int kBits, Coding kCoding>
using CodedAs = CodeForm<kBits, has_width(kCoding, kBits) ? kCoding : Coding::kAffine>;

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

// -- rows and scores ------------------------------------------------------------------------------

// s[b][2 h + i]: of the token at place g of half h of fragment b, and of this lane's query i. Fragments
// 0 and 1 are of the first strip, 2 and 3 of the second.
using Scores = float[kChunkUnits][4];

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

}  // namespace kvlathe::cuda
