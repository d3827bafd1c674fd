// A page of one quantized lane, attended on its codes: K [token][rank] in groups along the rank, V [rank][token] in
// groups along the tokens, 8, 4 or 2 bit. Nothing is dequantized (export/integer.py says the same in torch):
//
//   scores  q ~ A q', q' in [-127, 127], one A a (query, group):  q k = sum over groups of A (s sum q' k' + m sum q')
//   output  p ~ B p', p' in [0, 255], one B a (query, 64 tokens): o  += B (s sum p' v' + m sum p')
//
// Only the sums of products run on matrix units, bytes into 32 bits. 64 tokens are four pairs of 8-token blocks: a pair
// is the 16 rows of one product of scores. Which token is which row is chosen so that a word of packed V, shifted and
// masked, is a fragment of the second product, whose inner dimension runs in the order that transposing the first one's
// result gives.
#pragma once

#include "softmax_state.cuh"

namespace kvlathe::cuda {

// 1.5 x 2^23: adding an integer of at most 22 bits to the bits of this float is adding it to the float.
constexpr float kMagic = 12582912.f;
constexpr int32_t kMagicBits = 0x4B400000;
constexpr float kLog2Levels = 7.99435343685886f;  // of 255
constexpr int kPairs = kChunkTokens / 16;

// The same number with 22 bits of mantissa: its product with kMagic is exact.
__device__ inline float short_mantissa(float x) { return __uint_as_float(__float_as_uint(x) & ~3u); }

// How lane (row or column g, t) of a warp, g = l / 4 and t = l % 4, finds codes.
template <int kBits>
struct Codes {
  static constexpr int kIn = 8 / kBits;  // codes in a byte
  static constexpr uint32_t kMask = kBits == 8 ? ~0u : kBits == 4 ? 0x0f0f0f0fu : 0x03030303u;
  static constexpr int kStepBytes = 2 * kBits;                  // 16 codes
  static constexpr int kChunkBytes = kChunkTokens * kBits / 8;  // a channel's tokens

  // Token of row g of block e of pair p: first(g) + 4 kIn p + kIn e.
  static __device__ int first_token(int g) {
    const int t = g / 2;
    return 16 * kIn * (t / kIn) + t % kIn + 2 * kIn * (g % 2);
  }
  // Channel of byte b, in 16, that lane column t takes from a token's codes: first(t) + kIn b.
  static __device__ int first_channel(int t) { return 4 * kIn * (t / kIn) + t % kIn; }

  // Which 32 tokens of the 64 this lane's fragment of pair p holds.
  static __device__ int half_of(int p) { return kIn == 4 ? p / 2 : threadIdx.x % 4 / 2; }

  // The four codes that lane column t takes from a word.
  static __device__ uint32_t take(uint32_t word) {
    return kBits == 8 ? word : word >> (threadIdx.x % kIn * kBits) & kMask;
  }
};

// One warp's quantized queries in shared memory: [rank_k / 16 steps][32 lanes] fragments, then
// [groups][8 queries] of (A, A sum q').
__host__ __device__ inline int codes_bytes(int rank_k, int groups_k) { return rank_k / 16 * 128 + groups_k * 64; }

// The groups of a rank: near-equal multiples of 16 channels (groups_along_rank of export/layout.py), in steps of 16.
struct Groups {
  int count, least, longer;  // the first `longer` have one step more than `least`
  __device__ void set(int steps, int groups) {
    count = groups;
    least = groups == 1 ? steps : steps / groups;
    longer = steps - least * groups;
  }
  __device__ int steps(int group) const { return least + (group < longer); }
};

// Quantizes the queries of a run. `queries`: shared, [group][rank_k]. Whole warp.
template <class E, int kBits, int kSteps>
__device__ void quantize_queries(uint32_t codes, uint32_t queries, int group, int rank_k, const Groups& groups,
                                 float scale_log2) {
  using C = Codes<kBits>;
  const int lane = threadIdx.x % 32, query = lane / 4, steps = rank_k / 16;
  const uint32_t row = queries + (query * rank_k + C::first_channel(lane % 4)) * 2;
  float x[kSteps][4];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int b = 0; b < 4; ++b)
      x[step][b] = query < group && step < steps ? E::widen(load_half(row + (step * 16 + C::kIn * b) * 2)) : 0.f;
  }
  const auto over_columns = [](float x, auto join) {
    x = join(x, __shfl_xor_sync(~0u, x, 1));
    return join(x, __shfl_xor_sync(~0u, x, 2));
  };
#pragma unroll 1
  for (int g = 0, begin = 0; g < groups.count; ++g) {
    const int end = begin + groups.steps(g);
    float most = 0.f, sum = 0.f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step < begin || step >= end) continue;
#pragma unroll
      for (int b = 0; b < 4; ++b) most = fmaxf(most, fabsf(x[step][b]));
    }
    most = fmaxf(over_columns(most, [](float x, float y) { return fmaxf(x, y); }), 1e-28f);
    const float inverse = __fdividef(127.f, most);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step < begin || step >= end) continue;
      uint32_t word = 0;
#pragma unroll
      for (int b = 0; b < 4; ++b) {  // the low byte of x + kMagic is x rounded, in two's complement
        const float whole = fmaf(x[step][b], inverse, kMagic);
        sum += whole - kMagic;
        word = __byte_perm(word, __float_as_uint(whole), b == 0 ? 0x3214 : b == 1 ? 0x3240 : b == 2 ? 0x3410 : 0x4210);
      }
      store_word(codes + step * 128 + lane * 4, word);
    }
    sum = over_columns(sum, [](float x, float y) { return x + y; });
    if (lane % 4 == 0) {
      const float a = short_mantissa(most * (1.f / 127.f) * scale_log2);
      const uint32_t to = codes + steps * 128 + (g * 8 + query) * 8;
      store_word(to, __float_as_uint(a));
      store_word(to + 4, __float_as_uint(a * sum));
    }
    begin = end;
  }
  __syncwarp();
}

// Where one chunk of a tile lies, as this lane reads it; sizes of the lane.
struct Chunk {
  uint32_t k, k_meta;         // the token of row g of the first block
  uint32_t v, v_meta;         // channel g
  int row_bytes;              // of a token's K
  Groups groups;              // of K
  int v_stride, meta_stride;  // bytes from one channel to the next
  int steps_k, steps_v;
  bool split;  // V has groups of 32 tokens
};

__device__ inline float2 meta_at(uint32_t at) {
  const uint32_t word = load_word(at);
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}

// s[p][2 e + i] in base 2: of the token of row g of block e of pair p, and query 2 t + i.
template <int kBits, int kSteps>
__device__ void scores_of(float (&s)[kPairs][4], const Chunk& at, uint32_t codes) {
  using C = Codes<kBits>;
  const int lane = threadIdx.x % 32;
  uint32_t fragment = codes + lane * 4, rows[kPairs][2];
  uint32_t constants = codes + at.steps_k * 128 + lane % 4 * 16;
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    rows[p][0] = at.k + 4 * C::kIn * p * at.row_bytes;
    rows[p][1] = rows[p][0] + C::kIn * at.row_bytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) s[p][i] = 0.f;
  }
#pragma unroll 1
  for (int g = 0; g < at.groups.count; ++g) {
    int32_t sums[kPairs][4];
#pragma unroll
    for (int p = 0; p < kPairs; ++p) sums[p][0] = sums[p][1] = sums[p][2] = sums[p][3] = kMagicBits;
    const int steps = at.groups.steps(g);
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      if (j >= steps) break;
      const uint32_t q = load_word(fragment + 128 * j);
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        multiply_signed(sums[p], C::take(load_word(rows[p][0] + j * C::kStepBytes)),
                        C::take(load_word(rows[p][1] + j * C::kStepBytes)), q);
      }
    }
    const uint4 constant = load_words(constants + g * 64);  // (A, A sum q') of the two queries
    const float a[2] = {__uint_as_float(constant.x), __uint_as_float(constant.z)};
    const float a_sum[2] = {__uint_as_float(constant.y), __uint_as_float(constant.w)};
    const float less[2] = {-kMagic * a[0], -kMagic * a[1]};
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float2 meta = meta_at(at.k_meta + ((4 * p + e) * C::kIn * at.groups.count + g) * 4);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float product = fmaf(__int_as_float(sums[p][2 * e + i]), a[i], less[i]);
          s[p][2 * e + i] = fmaf(a_sum[i], meta.y, fmaf(product, meta.x, s[p][2 * e + i]));
        }
      }
    }
    fragment += steps * 128;
#pragma unroll
    for (int p = 0; p < kPairs; ++p) rows[p][0] += steps * C::kStepBytes, rows[p][1] += steps * C::kStepBytes;
  }
}

// Adds the weights of the chunk's tokens to the state and turns them into fragments of bytes, one a pair; returns in
// `step` what a byte is worth, B.
template <int kBits, int kSteps>
__device__ void weigh_codes(SoftmaxState<kSteps>& state, const float (&s)[kPairs][4], uint32_t (&weights)[kPairs],
                            float (&step)[2]) {
  float most[2], shift[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    most[i] = fmaxf(s[0][i], s[0][i + 2]);
#pragma unroll
    for (int p = 1; p < kPairs; ++p) most[i] = fmaxf(most[i], fmaxf(s[p][i], s[p][i + 2]));
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], lanes));
  }
  if (__any_sync(~0u, most[0] > state.top[0] + kSlack || most[1] > state.top[1] + kSlack)) {
    const float now[2] = {fmaxf(state.top[0], most[0]), fmaxf(state.top[1], most[1])};
    state.raise_to(now);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    step[i] = short_mantissa(exp2_fast(most[i] - state.top[i]) * (1.f / 255.f));
    shift[i] = most[i] - kLog2Levels;
  }
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    uint32_t bytes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) bytes[i] = __float_as_uint(exp2_fast(s[p][i] - shift[i % 2]) + kMagic);
    const uint32_t first = __byte_perm(bytes[0], bytes[2], 0x0040), second = __byte_perm(bytes[1], bytes[3], 0x0040);
    weights[p] = transposed(__byte_perm(first, second, 0x5410));
  }
}

// out += B (s sum p' v' + m sum p') over the tokens of one group of V. total: B sum p'.
template <int kBits, int kSteps>
__device__ void add_values(SoftmaxState<kSteps>& state, const Chunk& at, const uint32_t (&weights)[kPairs],
                           const float (&step)[2], const float (&total)[2], uint32_t meta) {
  using C = Codes<kBits>;
  const float less[2] = {-kMagic * step[0], -kMagic * step[1]};
  uint32_t row = at.v;
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    if (j >= at.steps_v) break;
    const uint4 lows = load_words(row), highs = load_words(row + 8 * at.v_stride);
    const uint32_t low[4] = {lows.x, lows.y, lows.z, lows.w}, high[4] = {highs.x, highs.y, highs.z, highs.w};
    int32_t sums[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits};
#pragma unroll
    for (int p = 0; p < kPairs; p += 2) {
      multiply_unsigned(sums, C::take(low[p]), C::take(high[p]), C::take(low[p + 1]), C::take(high[p + 1]), weights[p],
                        weights[p + 1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 group = meta_at(meta + (i < 2 ? 0 : 8 * at.meta_stride));
      const float product = fmaf(__int_as_float(sums[i]), step[i % 2], less[i % 2]);
      state.out[j][i] = fmaf(total[i % 2], group.y, fmaf(product, group.x, state.out[j][i]));
    }
    row += 16 * at.v_stride;
    meta += 16 * at.meta_stride;
  }
}

// The 64 tokens of one chunk, of which the first `rows` exist.
template <int kBits, int kSteps>
__device__ void attend_chunk(SoftmaxState<kSteps>& state, const Chunk& at, uint32_t codes, int rows) {
  using C = Codes<kBits>;
  const int lane = threadIdx.x % 32;
  float s[kPairs][4], step[2];
  uint32_t weights[kPairs];
  scores_of<kBits, kSteps>(s, at, codes);
  if (rows < kChunkTokens) {
    const int first = C::first_token(lane / 4);
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + C::kIn * (4 * p + i / 2) >= rows) s[p][i] = -INFINITY;
      }
    }
  }
  weigh_codes<kBits>(state, s, weights, step);

  // Sums of p' by the matrix unit: every row of a product with ones is the sum over its inner dimension.
  constexpr uint32_t kOnes = 0x01010101u;
  const auto total_of = [&](const uint32_t (&p)[kPairs], float (&total)[2]) {
    int32_t sums[4] = {0, 0, 0, 0};
    multiply_unsigned(sums, kOnes, kOnes, kOnes, kOnes, p[0], p[1]);
    multiply_unsigned(sums, kOnes, kOnes, kOnes, kOnes, p[2], p[3]);
    total[0] = step[0] * float(sums[0]);
    total[1] = step[1] * float(sums[1]);
  };
  float total[2];
  total_of(weights, total);
  if (lane < 4) state.sum[0] += total[0], state.sum[1] += total[1];

  if (!at.split) {
    add_values<kBits>(state, at, weights, step, total, at.v_meta);
    return;
  }
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    uint32_t own[kPairs];
#pragma unroll
    for (int p = 0; p < kPairs; ++p) own[p] = C::half_of(p) == half ? weights[p] : 0u;
    total_of(own, total);
    add_values<kBits>(state, at, own, step, total, at.v_meta + 4 * half);
  }
}

}  // namespace kvlathe::cuda
