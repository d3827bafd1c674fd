// The layout of pages of codes, and of queries as codes, in the lanes of a warp. The products with K (codes_scores.cuh) and
// with V (codes_values.cuh) share it. attend_codes.cuh says how pages are attended.
#pragma once

#include "cuda/decode/softmax_state.cuh"

namespace kvlathe::cuda {

// 1.5 x 2^23. An integer of at most 22 bits, added to the bits of this float, is added to the
// float. So a sum that starts at kMagicBits is read as a float without a conversion.
constexpr float kMagic = 12582912.f;
constexpr int32_t kMagicBits = 0x4B400000;
constexpr float kLog2Levels = 7.99435343685886f;  // of 255
constexpr int kPairs = kChunkTokens / 16;

// The same number with 22 bits of mantissa. Its product with kMagic is then exact, and cancels.
__device__ inline float short_mantissa(float x) {
  return __uint_as_float(__float_as_uint(x) & ~3u);
}

// How a lane of a warp finds codes. In fragments it has row or column g = lane / 4 and t = lane %
// 4.
template <int kBits>
struct Codes : CodeForm<kBits> {
  static constexpr int kIn = Codes::planes;  // codes in a byte
  // What a code is worth that stays in the higher bits of its byte.
  static constexpr int kHigh = Codes::packed ? 1 << kBits : 1;
  static constexpr uint32_t kMask = !Codes::packed   ? ~0u
                                    : Codes::nibbles ? 0x0f0f0f0fu
                                                     : 0x03030303u;
  // Of 16 codes. Lane column t owns as many of a channel's 64 tokens.
  static constexpr int kStepBytes = 2 * kBits;

  // Row g of block e of pair p is token first_token(g) + token(e, p).
  static __device__ int first_token(int g) { return 16 * (g / 2) + 2 * kIn * (g % 2); }
  static __host__ __device__ constexpr int token(int e, int p) {
    return (4 * (p / kIn) + e) * kIn + p % kIn;
  }

  // Steps of 16 channels of K are taken kIn at a time, each lane column with its own word. What
  // remains of a group is taken two or one at a time, where columns share a word; three are taken
  // as four. This is log2 of those taken together with step `step` of `steps`.
  static constexpr int kLogIn = kIn / 2;
  static __device__ int taken_with(int step, int steps) {
    const int rest = steps % kIn;
    return step < steps - rest || rest == 3 ? kLogIn : rest / 2;
  }
  // Steps of a group, and one more where three are taken as four.
  static __device__ int padded(int steps) { return steps + (steps % kIn == 3); }
};

// Shared memory of one warp's quantized queries: words [padded steps][32 lanes][kFill], or
// [two steps][32 lanes][kFill][2] of steps that are taken together, with room for one more step in
// each group. Then (A, A sum q') [groups][8 queries].
__host__ __device__ inline int codes_bytes(int fill, int rank_k, int groups_k) {
  return (rank_k / 16 + groups_k) * 128 * fill + groups_k * 64;
}

// The groups of a rank: near-equal multiples of 16 channels (groups_along_rank of
// kvlathe/plan/formats.py), in steps of 16.
struct Groups {
  int count, least, longer;  // the first `longer` have one step more than `least`
  __device__ void set(int steps, int groups) {
    count = groups;
    least = groups == 1 ? steps : steps / groups;
    longer = steps - least * groups;
  }
  __device__ int steps(int group) const { return least + (group < longer); }
};

// Quantizes the queries of a run. `queries`: shared, [group][rank_k]. Whole warp. It is a function
// of its own, so that its registers do not count among those of the loop. It is short, because code
// that runs now and then is fetched anew each time.
template <class E, int kBits, int kFill>
__device__ __noinline__ void quantize_queries(uint32_t codes, uint32_t queries, int group,
                                              int rank_k, Groups groups, float scale_log2) {
  using C = Codes<kBits>;
  const int lane = threadIdx.x % 32, t = lane % 4, column = lane / 4, query = column % (8 / kFill);
  const uint32_t constants = codes + (rank_k / 16 + groups.count) * 128 * kFill;
  uint32_t row = queries + query * rank_k * 2, to = codes;
  const auto at = [&](int channel) {
    return query < group ? E::widen(load_half(row + channel * 2)) : 0.f;
  };
  const auto over_columns = [](float x, auto join) {
    x = join(x, __shfl_xor_sync(~0u, x, 1));
    return join(x, __shfl_xor_sync(~0u, x, 2));
  };
#pragma unroll 1
  for (int g = 0; g < groups.count; ++g) {
    const int steps = groups.steps(g), padded = C::padded(steps);
    float most = 0.f, sum = 0.f;
#pragma unroll 4
    for (int i = 0; i < steps * 4; ++i) most = fmaxf(most, fabsf(at(4 * i + t)));
    most = fmaxf(over_columns(most, [](float x, float y) { return fmaxf(x, y); }), 1e-28f);
    const float inverse = __fdividef(127.f, most);
#pragma unroll 1
    for (int j = 0; j < padded; ++j) {
      const int taken = C::taken_with(j, steps),
                apart = C::kLogIn - taken;  // log2; columns that share a word
      const int i = j & ((1 << taken) - 1), shared = t & ((1 << apart) - 1);
      const int first = 16 * (j - i) + (t >> apart) * 4 * C::kIn + (shared << taken) + i;
      uint32_t word = 0;
#pragma unroll
      for (int b = 3; b >= 0; --b) {
        // The low byte of x + kMagic is x, rounded, in two's complement.
        const float whole =
            fmaf(first < steps * 16 ? at(first + C::kIn * b) : 0.f, inverse, kMagic);
        sum += whole - kMagic;
        word = word << 8 | (__float_as_uint(whole) & 0xff);
      }
      const int together = min(taken, 1), place = j & together;
#pragma unroll
      for (int copy = 0; copy < kFill; ++copy) {
        store_word(
            to + ((j - place) * 32 * kFill + ((lane * kFill + copy) << together) + place) * 4,
            column / (8 / kFill) == copy ? word : 0u);
      }
    }
    sum = over_columns(sum, [](float x, float y) { return x + y; });
    if (t == 0) {
      const float a = short_mantissa(most * (1.f / 127.f) * scale_log2);
      store_word(constants + (g * 8 + column) * 8, __float_as_uint(a));
      store_word(constants + (g * 8 + column) * 8 + 4, __float_as_uint(a * sum));
    }
    row += steps * 32, to += padded * 128 * kFill;
  }
  __syncwarp();
}

__device__ inline float2 meta_at(uint32_t at) {
  const uint32_t word = load_word(at);
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}

// The first token of this lane in a fragment of scores. kFill 2 lays two pairs side by side in the
// columns of a fragment.
template <int kBits, int kFill>
__device__ int own_token() {
  using C = Codes<kBits>;
  const int second = kFill == 2 && threadIdx.x % 4 >= 2 ? C::token(0, kPairs / 2) : 0;
  return C::first_token(threadIdx.x % 32 / 4) + second;
}

// How this thread reads the pages of one quantized lane: where its first rows begin in a page, and
// sizes.
//
// Sizes are numbers. Code with them as constants, a piece for each rank, is shorter. But warps of
// one multiprocessor attend heads of several ranks at a time, and the nearest cache of instructions
// would have to hold all pieces (docs/performance.md). Bundles still have pieces for K.
struct SlabPlaces {
  int thread;  // this thread's number in its warp; reading threadIdx at each use takes longer
  int k, k_meta, v, v_meta;
};
struct SlabSizes {                    // the same in all threads
  int bytes;                          // of a page, in the ring
  int row_bytes, meta_stride;         // of a token's K; of a channel's V metadata
  int steps_k, steps_v, group_shift;  // log2 of the tokens of a V group
  int plain;                          // pages of 64 tokens, each one group of V
  Groups groups;                      // of K
};
struct Slab : SlabPlaces, SlabSizes {
  template <int kBits, int kFill, class P>
  __device__ void set(const P& p, int head, int part) {
    using C = Codes<kBits>;
    const auto& at = p.head[head];
    const auto& lane = at.lane[part];
    const int l = threadIdx.x % 32, g = l / 4;
    thread = pinned(l);
    bytes = lane.tile_bytes / lane.tile_units;
    const int gaps = bytes - lane.bytes;
    group_shift = p.part[part].groups_v;
    plain = p.page_tokens == kChunkTokens && group_shift == 6;
    steps_k = at.rank_k / 16, steps_v = at.rank_v / 16;
    groups.set(steps_k, lane.groups_k);
    row_bytes = at.rank_k * kBits / 8;
    meta_stride = p.page_tokens >> group_shift << 2;
    if (!C::packed) {  // this lane gives row l % 8 of matrix l / 8
      k = (C::first_token(l % 8) + C::token(l / 8 % 2, l / 16)) * row_bytes + l % 8 / 2 * kPieceGap;
    } else {
      k = C::first_token(g) * row_bytes;
    }
    k_meta = lane.k_meta * 16 + gaps + own_token<kBits, kFill>() * groups.count * 4;
    v = lane.v + gaps + g * (p.page_tokens * kBits / 8) + l % 4 * C::kStepBytes;
    v_meta = lane.v_meta * 16 + gaps + g * meta_stride;
  }
};

// Where this lane reads a chunk.
struct Chunk {
  uint32_t k, k_meta, v, v_meta;
};

}  // namespace kvlathe::cuda
