// A page of one quantized lane, attended on its codes: K [token][rank] in groups along the rank, V [rank][token] in
// groups along the tokens, 8, 4 or 2 bit. Nothing is dequantized (export/integer.py says the same in torch):
//
//   scores  q ~ A q', q' in [-127, 127], one A a (query, group):  q k = sum over groups of A (s sum q' k' + m sum q')
//   output  p ~ B p', p' in [0, 255], one B a (query, 64 tokens): o  += B (s sum p' v' + m sum p')
//
// Only the sums of products run on matrix units, bytes into 32 bits. 64 tokens are four pairs of 8-token blocks: a pair
// is the 16 rows of one product of scores. Which token is which row is chosen so that a lane's own word of packed V,
// shifted and masked, is a fragment of the second product, whose inner dimension runs in the order that transposing the
// first one's result gives.
//
// kFill 2, for at most 4 query heads: they would leave half of a product's 8 columns empty. So the queries come twice,
// in columns 0 to 3 and in columns 4 to 7, zeros elsewhere, and two pairs (for V two blocks of 16 channels) add into
// one fragment, each with its own copy. The products stay as many; all the work on their results halves.
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
  static constexpr int kHigh = kBits < 8 ? 1 << kBits : 1;  // what a code is worth that is left in a byte's higher bits
  static constexpr uint32_t kMask = kBits == 8 ? ~0u : kBits == 4 ? 0x0f0f0f0fu : 0x03030303u;
  static constexpr int kStepBytes = 2 * kBits;  // 16 codes: also what lane column t owns of a channel's 64 tokens

  // Token of row g of block e of pair p: first_token(g) + token(e, p).
  static __device__ int first_token(int g) { return 16 * (g / 2) + 2 * kIn * (g % 2); }
  static __host__ __device__ constexpr int token(int e, int p) { return (4 * (p / kIn) + e) * kIn + p % kIn; }

  // K's steps of 16 channels are taken kIn at a time, each lane column with its own word; what remains of a group, two
  // or one at a time, where columns share a word, and three as four. log2 of those taken with step `step` of `steps`.
  static constexpr int kLogIn = kIn / 2;
  static __device__ int taken_with(int step, int steps) {
    const int rest = steps % kIn;
    return step < steps - rest || rest == 3 ? kLogIn : rest / 2;
  }
  // Steps of a group with what is added to take three as four.
  static __device__ int padded(int steps) { return steps + (steps % kIn == 3); }
};

// One warp's quantized queries in shared memory: [padded steps][32 lanes][kFill] words, of steps taken together [two
// steps][32 lanes][kFill][2], in room for one step more a group; then [groups][8 queries] of (A, A sum q').
__host__ __device__ inline int codes_bytes(int fill, int rank_k, int groups_k) {
  return (rank_k / 16 + groups_k) * 128 * fill + groups_k * 64;
}

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

// Quantizes the queries of a run. `queries`: shared, [group][rank_k]. Whole warp. A function of its own, so that its
// registers are not the loop's; short, since code that is run now and then is fetched anew each time.
template <class E, int kBits, int kFill>
__device__ __noinline__ void quantize_queries(uint32_t codes, uint32_t queries, int group, int rank_k, Groups groups,
                                 float scale_log2) {
  using C = Codes<kBits>;
  const int lane = threadIdx.x % 32, t = lane % 4, column = lane / 4, query = column % (8 / kFill);
  const uint32_t constants = codes + (rank_k / 16 + groups.count) * 128 * kFill;
  uint32_t row = queries + query * rank_k * 2, to = codes;
  const auto at = [&](int channel) { return query < group ? E::widen(load_half(row + channel * 2)) : 0.f; };
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
      const int taken = C::taken_with(j, steps), apart = C::kLogIn - taken;  // log2; columns that share a word
      const int i = j & ((1 << taken) - 1), shared = t & ((1 << apart) - 1);
      const int first = 16 * (j - i) + (t >> apart) * 4 * C::kIn + (shared << taken) + i;
      uint32_t word = 0;
#pragma unroll
      for (int b = 3; b >= 0; --b) {  // the low byte of x + kMagic is x rounded, in two's complement
        const float whole = fmaf(first < steps * 16 ? at(first + C::kIn * b) : 0.f, inverse, kMagic);
        sum += whole - kMagic;
        word = word << 8 | (__float_as_uint(whole) & 0xff);
      }
      const int together = min(taken, 1), place = j & together;
#pragma unroll
      for (int copy = 0; copy < kFill; ++copy) {
        store_word(to + ((j - place) * 32 * kFill + ((lane * kFill + copy) << together) + place) * 4,
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

// Where this lane's part of a filled fragment of scores starts: kFill 2 lays two pairs side by side in its columns.
template <int kBits, int kFill>
__device__ int own_token() {
  using C = Codes<kBits>;
  const int second = kFill == 2 && threadIdx.x % 4 >= 2 ? C::token(0, kPairs / 2) : 0;
  return C::first_token(threadIdx.x % 32 / 4) + second;
}

// How this lane reads the pages of one quantized lane: offsets of its first rows from a page's start, and sizes.
struct Slab {
  int k, k_meta, v, v_meta;
  int bytes = 0;                         // of a page, in the ring; 0 while the run is a 16-bit one
  int row_bytes, meta_stride;            // of a token's K; of a channel's V metadata
  int steps_k, steps_v, group_shift;     // log2 of the tokens of a V group
  bool plain;                            // pages of 64 tokens, each one group of V
  Groups groups;                         // of K

  template <int kBits, int kFill, class P>
  __device__ void set(const P& p, int head, int part) {
    using C = Codes<kBits>;
    const auto& at = p.head[head];
    const auto& lane = at.lane[part];
    const int l = threadIdx.x % 32, g = l / 4;
    bytes = lane.tile_bytes / lane.tile_units;
    const int gaps = bytes - lane.bytes;
    group_shift = p.part[part].groups_v;
    plain = p.page_tokens == kChunkTokens && group_shift == 6;
    steps_k = at.rank_k / 16, steps_v = at.rank_v / 16;
    groups.set(steps_k, lane.groups_k);
    row_bytes = at.rank_k * kBits / 8;
    meta_stride = p.page_tokens >> group_shift << 2;
    if (kBits == 8) {  // this lane gives row l % 8 of matrix l / 8
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

// Adds the products of kTaken steps of 16 channels to sums. k: of this lane's first row; q: where the steps' queries
// start.
template <int kBits, int kTaken, int kFill>
__device__ void add_products(int32_t (&sums)[kPairs / kFill][4], uint32_t k, int row_bytes, uint32_t q) {
  using C = Codes<kBits>;
  constexpr int kFragments = kPairs / kFill, kShare = C::kIn / kTaken;  // lane columns that share a word
  constexpr int kTogether = kTaken < 2 ? 1 : 2;
  uint32_t b[kTaken / kTogether][kFill * kTogether];
#pragma unroll
  for (int i = 0; i < kTaken / kTogether; ++i)
    load_vector(b[i], q + (i * 32 + threadIdx.x % 32) * kFill * kTogether * 4);
  if constexpr (kBits == 8) {
#pragma unroll
    for (int p = 0; p < kPairs; p += 2) {
      uint32_t a[4];
      load_matrices(a, k + C::token(0, p) * row_bytes);
      multiply_signed(sums[p % kFragments], a[0], a[1], b[0][p / kFragments]);
      multiply_signed(sums[(p + 1) % kFragments], a[2], a[3], b[0][p / kFragments]);
    }
  } else {
    const int t = threadIdx.x % 4, shift = t % kShare * kTaken * kBits;
    k += t / kShare * 4;
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      const uint32_t low = load_word(k + C::token(0, p) * row_bytes) >> shift;
      const uint32_t high = load_word(k + C::token(1, p) * row_bytes) >> shift;
      const int f = p % kFragments, copy = p / kFragments;
      if constexpr (kTaken == 1) {
        multiply_signed(sums[f], low & C::kMask, high & C::kMask, b[0][copy]);
      } else {
#pragma unroll
        for (int i = 0; i < kTaken; i += 2) {
          multiply_signed(sums[f], low >> i * kBits & C::kMask, high >> i * kBits & C::kMask,
                          low >> (i + 1) * kBits & C::kMask, high >> (i + 1) * kBits & C::kMask, b[i / 2][2 * copy],
                          b[i / 2][2 * copy + 1]);
        }
      }
    }
  }
}

// s[f][2 e + i] in base 2: of row g of block e of this lane's pair in fragment f, and of its query i.
// kOnly: the steps of K's only group, or 0 for any groups.
template <int kBits, int kFill, int kOnly>
__device__ void scores_of(float (&s)[kPairs / kFill][4], const Slab& slab, const Chunk& chunk, uint32_t codes) {
  using C = Codes<kBits>;
  constexpr int kFragments = kPairs / kFill;
  const int row_bytes = kOnly ? kOnly * C::kStepBytes : pinned(slab.row_bytes), count = kOnly ? 1 : slab.groups.count;
  uint32_t k = chunk.k, q = codes;
  const uint32_t constants =
      codes + ((kOnly ? kOnly : slab.steps_k) + count) * 128 * kFill + threadIdx.x % (4 / kFill) * 16;
#pragma unroll
  for (int f = 0; f < kFragments; ++f) s[f][0] = s[f][1] = s[f][2] = s[f][3] = 0.f;
#pragma unroll 1
  for (int g = 0; g < count; ++g) {
    int32_t sums[kFragments][4];
#pragma unroll
    for (int f = 0; f < kFragments; ++f) sums[f][0] = sums[f][1] = sums[f][2] = sums[f][3] = kMagicBits;
    const int steps = kOnly ? kOnly : slab.groups.steps(g);
    uint32_t at = k;
    const auto take = [&](auto taken) {
      add_products<kBits, decltype(taken)::value, kFill>(sums, at, row_bytes, q);
      at += decltype(taken)::value * C::kStepBytes, q += decltype(taken)::value * 128 * kFill;
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
    const uint4 constant = load_words(constants + g * 64);  // (A, A sum q') of the two queries
    const float a[2] = {__uint_as_float(constant.x), __uint_as_float(constant.z)};
    const float a_sum[2] = {__uint_as_float(constant.y), __uint_as_float(constant.w)};
    const float less[2] = {-kMagic * a[0], -kMagic * a[1]};
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float2 meta = meta_at(chunk.k_meta + (C::token(e, f) * count + g) * 4);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float product = fmaf(__int_as_float(sums[f][2 * e + i]), a[i], less[i]);
          s[f][2 * e + i] = fmaf(a_sum[i], meta.y, fmaf(product, meta.x, s[f][2 * e + i]));
        }
      }
    }
  }
}

// scores_of with the common shapes as constants: one group of up to four steps.
template <int kBits, int kFill>
__device__ void find_scores(float (&s)[kPairs / kFill][4], const Slab& slab, const Chunk& chunk, uint32_t codes) {
  switch (slab.groups.count == 1 ? slab.steps_k : 0) {
    case 1: return scores_of<kBits, kFill, 1>(s, slab, chunk, codes);
    case 2: return scores_of<kBits, kFill, 2>(s, slab, chunk, codes);
    case 3: return scores_of<kBits, kFill, 3>(s, slab, chunk, codes);
    case 4: return scores_of<kBits, kFill, 4>(s, slab, chunk, codes);
    default: return scores_of<kBits, kFill, 0>(s, slab, chunk, codes);
  }
}

// Raises the state's maxima to cover the scores, and turns them into weights, fragments of bytes, one a fragment of
// scores; returns in `step` what a byte is worth, B.
template <int kSteps, int kFill>
__device__ void weigh_codes(SoftmaxState<kSteps, kFill>& state, const float (&s)[kPairs / kFill][4],
                            uint32_t (&weights)[kPairs / kFill], float (&step)[2]) {
  constexpr int kFragments = kPairs / kFill;
  float most[2], shift[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    most[i] = fmaxf(s[0][i], s[0][i + 2]);
#pragma unroll
    for (int f = 1; f < kFragments; ++f) most[i] = fmaxf(most[i], fmaxf(s[f][i], s[f][i + 2]));
  }
#pragma unroll
  for (int lanes = 4 / kFill; lanes < 32; lanes *= 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], lanes));
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
  for (int f = 0; f < kFragments; ++f) {  // the low byte of x + kMagic is x rounded
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __float_as_uint(exp2_fast(s[f][i] - shift[i % 2]) + kMagic);
    weights[f] = transposed(__byte_perm(x[0] + (x[2] << 8), x[1] + (x[3] << 8), 0x5410));
  }
}

// The weights of 64 tokens as second factors of products with V, in the order of pairs 0 2 1 3. kFill 2: the queries in
// columns 4 to 7 have the order 2 0 3 1, and each product sees those of one half of the columns only.
template <int kFill>
struct Weights {
  uint32_t all[kPairs];

  __device__ explicit Weights(const uint32_t (&own)[kPairs / kFill]) {
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      const uint32_t x = own[kFill == 2 ? p % 2 : p];
      all[p % 2 * 2 + p / 2] = kFill == 2 && p >= 2 ? __shfl_xor_sync(~0u, x, 16) : x;
    }
  }
  // Only the tokens of one half of the 64.
  __device__ void keep_half(int half) {
#pragma unroll
    for (int p = 0; p < kPairs; ++p) all[p] = threadIdx.x % 4 / 2 == half ? all[p] : 0u;
  }
  __device__ void only(uint32_t (&x)[kPairs], int copy) const {
#pragma unroll
    for (int p = 0; p < kPairs; ++p) x[p] = kFill == 1 || threadIdx.x % 32 / 16 == copy ? all[p] : 0u;
  }
  // B sum p' by the matrix unit: every row of a product with ones is the sum over its inner dimension.
  __device__ void total(const float (&step)[2], float (&total)[2]) const {
    constexpr uint32_t kOnes = 0x01010101u;
    int32_t sums[4] = {0, 0, 0, 0};
    multiply_unsigned(sums, kOnes, kOnes, kOnes, kOnes, all[0], all[1]);
    multiply_unsigned(sums, kOnes, kOnes, kOnes, kOnes, all[2], all[3]);
    total[0] = step[0] * float(sums[0]);
    total[1] = step[1] * float(sums[1]);
  }
};

// Adds the products of 16 channels with the weights of 64 tokens. The codes of every other pair are left in the higher
// bits, so that they are worth 2^kBits times as much, and add into `highs`. kTurn: the pairs come in the order 2 3 0 1.
template <int kBits, bool kTurn>
__device__ void add_channels(int32_t (&lows)[4], int32_t (&highs)[4], uint32_t v, int v_stride,
                             const uint32_t (&weights)[kPairs]) {
  using C = Codes<kBits>;
  uint32_t first[kBits / 2], second[kBits / 2];
  load_vector(first, v);
  load_vector(second, v + 8 * v_stride);
  const auto take = [](const uint32_t(&words)[kBits / 2], int p) {
    const uint32_t word = kBits == 2 ? words[0] >> p / 2 * 4 : words[p / C::kIn];
    return word & C::kMask << (kBits < 8 ? p % 2 * kBits : 0);
  };
  constexpr int kTo = kTurn ? 2 : 0;
  multiply_unsigned(lows, take(first, kTo), take(second, kTo), take(first, 2 - kTo), take(second, 2 - kTo), weights[0],
                    weights[1]);
  multiply_unsigned(kBits < 8 ? highs : lows, take(first, kTo + 1), take(second, kTo + 1), take(first, 3 - kTo),
                    take(second, 3 - kTo), weights[2], weights[3]);
}

// out += B (s sum p' v' + m sum p') over the tokens of one group of V. v, v_meta: of this lane.
template <int kBits, bool kPlain, int kSteps, int kFill>
__device__ void add_values(SoftmaxState<kSteps, kFill>& state, const Slab& slab, uint32_t v, int v_stride,
                           uint32_t v_meta, const Weights<kFill>& weights, const float (&step)[2]) {
  using C = Codes<kBits>;
  const int meta_stride = kPlain ? 4 : pinned(slab.meta_stride);
  const float worth[2] = {step[0] * (1.f / C::kHigh), step[1] * (1.f / C::kHigh)};  // of a sum
  const float less[2] = {-kMagic * worth[0], -kMagic * worth[1]};
  float total[2];
  weights.total(step, total);
  if (threadIdx.x % 32 < 4 / kFill) state.sum[0] += total[0], state.sum[1] += total[1];
  uint32_t first[kPairs], second[kPairs];
  weights.only(first, 0);
  if (kFill == 2) weights.only(second, 1);
#pragma unroll
  for (int j = 0; j < kSteps / kFill; ++j) {
    if (j * kFill >= slab.steps_v) break;
    int32_t lows[4] = {0, 0, 0, 0}, sums[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits};
    uint32_t meta = v_meta;
    add_channels<kBits, false>(kBits < 8 ? lows : sums, sums, v, v_stride, first);
    if (kFill == 2 && j * kFill + 1 < slab.steps_v) {
      add_channels<kBits, true>(kBits < 8 ? lows : sums, sums, v + 16 * v_stride, v_stride, second);
      if (threadIdx.x % 4 >= 2) meta += 16 * meta_stride;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 group = meta_at(meta + (i < 2 ? 0 : 8 * meta_stride));
      const float product = fmaf(__int_as_float(lows[i] * C::kHigh + sums[i]), worth[i % 2], less[i % 2]);
      state.out[j][i] = fmaf(total[i % 2], group.y, fmaf(product, group.x, state.out[j][i]));
    }
    v += 16 * kFill * v_stride;
    v_meta += 16 * kFill * meta_stride;
  }
}

// A chunk whose first `rows` tokens exist. codes: the run's quantized queries; v_stride: bytes of a channel of V.
// kPlain: pages of 64 tokens, each one group of V: sizes are constants.
template <int kBits, bool kPlain, int kSteps, int kFill>
__device__ void attend_chunk(SoftmaxState<kSteps, kFill>& state, const Slab& slab, const Chunk& chunk, uint32_t codes,
                             int v_stride, int rows) {
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
      add_values<kBits, kPlain>(state, slab, chunk.v, v_stride, chunk.v_meta + 4 * half, part, step);
    }
  }
}

// A tile of pages whose first `rows` tokens exist.
template <int kBits, bool kPlain, int kSteps, int kFill>
__device__ void attend_pages(SoftmaxState<kSteps, kFill>& state, const Slab& slab, uint32_t tile, uint32_t codes,
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
      const uint32_t page = tile + (token >= page_tokens ? slab.bytes : 0);  // a tile has at most two
      const Chunk chunk{page + slab.k + first * slab.row_bytes + (kBits == 8 ? first / kPieceTokens * kPieceGap : 0),
                        page + slab.k_meta + first * slab.groups.count * 4, page + slab.v + first * kBits / 8,
                        page + slab.v_meta + (first >> slab.group_shift) * 4};
      attend_chunk<kBits, kPlain>(state, slab, chunk, codes, page_tokens * kBits / 8, rows - token);
    }
  }
}

}  // namespace kvlathe::cuda
