// Decode attention over rows of bytes: sealed pages whose V is [token][rank] in codes of 8 bits, and a
// token is one group. K is likewise, or [rank][token] with a channel of a page as a group. It is the
// kernel of 16-bit parts (attend_decode.cuh) with rows of half the bytes: they are copied, and lie in
// shared memory, as 16-bit rows of half the rank would, 64 tokens of K and then of V. Codes become
// halves in registers (byte_numbers.cuh). Scales of tokens leave the sum of QK^T, and for PV go into
// their shares, so the products take what the codes are.
#pragma once

#include "cuda/decode/attend_decode.cuh"
#include "cuda/decode/byte_numbers.cuh"

namespace kvlathe::cuda {

// What shares of tokens times scales of V may be, so that a half holds them: shares reach 2^kSlack.
constexpr float kMostWorth = 128.f;

// The softmax state of a warp. While rows of bytes are attended, o counts in units of 1 / inverse, a
// power of two, and its channels have the order of the codes. `rest` is this lane's share of what the
// minima add to each channel.
template <Coding kCoding>
struct ByteState : SoftmaxState<kNarrowRank / 16> {
  float inverse, rest[2];

  __device__ void clear() {
    SoftmaxState::clear();
    inverse = 1024.f / ByteNumbers<kCoding>::kUnit;
    rest[0] = rest[1] = 0.f;
  }

  // A fragment's channels: g and g + 8 of 16-bit rows, 2 g and 2 g + 1 of bytes.
  template <bool kToBytes>
  __device__ void reorder() {
    const int lane = threadIdx.x % 32, g = lane / 4;
    const int first = (kToBytes ? 2 * g % 8 : g / 2) * 4 + lane % 4,
              second = first + (kToBytes ? 4 : 16);
    const bool high = kToBytes ? g >= 4 : g % 2;
#pragma unroll
    for (auto& block : o) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float a = __shfl_sync(~0u, block[i], first),
                    b = __shfl_sync(~0u, block[i + 2], first),
                    c = __shfl_sync(~0u, block[i], second),
                    d = __shfl_sync(~0u, block[i + 2], second);
        block[i] = high ? b : a, block[i + 2] = high ? d : c;
      }
    }
  }
  __device__ void scale_sums(float by) {
#pragma unroll
    for (auto& block : o) {
#pragma unroll
      for (float& x : block) x *= by;
    }
  }
  __device__ void enter_bytes() { reorder<true>(), scale_sums(inverse); }
  __device__ void leave_bytes() {
    scale_sums(power_inverse(inverse));
    reorder<false>();
    if constexpr (has_minimum(kCoding)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) rest[i] += __shfl_xor_sync(~0u, rest[i], step);
#pragma unroll
        for (auto& block : o) block[i] += rest[i], block[i + 2] += rest[i];
        rest[i] = 0.f;
      }
    }
  }

  // Raises m to cover s, and makes the unit of o so large that shares times `worth` fit halves.
  template <int kUnits>
  __device__ void raise_both(float (&s)[kUnits][4], float (&worth)[kUnits][2]) {
    const float before[2] = {m[0], m[1]};
    this->raise(s);
#pragma unroll
    for (int i = 0; i < 2; ++i) rest[i] *= m[i] == before[i] ? 1.f : exp2_fast(before[i] - m[i]);
    float most = largest(worth);
#pragma unroll
    for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    if (most <= kMostWorth) return;
    const float by = power_inverse(power_below(most)) * (kMostWorth / 2);
    inverse *= by;
#pragma unroll
    for (auto& pair : worth) pair[0] *= by, pair[1] *= by;
    scale_sums(by);
  }

  // Turns the scores of units of 16 tokens (-inf where masked) into shares times `worth`, as second
  // factors of products. least: what the minima are of each token.
  template <int kUnits>
  __device__ void weigh_bytes(float (&s)[kUnits][4], float (&worth)[kUnits][2],
                              const float (&least)[kUnits][2], uint32_t (&p)[kUnits][2]) {
    const bool above = this->most_of(s, 0) > m[0] + kSlack || this->most_of(s, 1) > m[1] + kSlack ||
                       largest(worth) > kMostWorth;
    if (__any_sync(~0u, above)) raise_both(s, worth);
#pragma unroll
    for (int b = 0; b < kUnits; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = s[b][i];
        x = exp2_fast(x - m[i % 2]);
        l[i % 2] += x;
        if constexpr (has_minimum(kCoding)) rest[i % 2] = fmaf(x, least[b][i / 2], rest[i % 2]);
        x *= worth[b][i / 2];
      }
      p[b][0] = transposed(Half::pack(s[b][0], s[b][1]));
      p[b][1] = transposed(Half::pack(s[b][2], s[b][3]));
    }
  }

 private:
  template <int kUnits>
  __device__ static float largest(const float (&worth)[kUnits][2]) {
    float most = fmaxf(worth[0][0], worth[0][1]);
#pragma unroll
    for (int b = 1; b < kUnits; ++b) most = fmaxf(most, fmaxf(worth[b][0], worth[b][1]));
    return most;
  }
};

// The queries of a run for products with codes, in lane16, and for this lane's two of them what a
// product is worth in base 2, and the sum of their numbers.
struct ByteQueries {
  float factor[2], sum[2];

  // kByChannel: K is by channel.
  template <class E, bool kByChannel>
  __device__ void set(Lane16<kNarrowRank / 16>& lane16, uint32_t queries, int group, int rank_k,
                      int rank_v, float scale_log2) {
    const int lane = threadIdx.x % 32, query = lane / 4;
    const uint32_t row = queries + query * rank_k * 2 + lane % 4 * (kByChannel ? 4 : 8);
    const auto over_row = [](float x, auto join) {
      x = join(x, __shfl_xor_sync(~0u, x, 1));
      return join(x, __shfl_xor_sync(~0u, x, 2));
    };
    float own = 0.f, power = 1.f;
#pragma unroll
    for (int j = 0; j < Lane16<kNarrowRank / 16>::kSteps; ++j) {
      lane16.q[j][0] = lane16.q[j][1] = 0;
      if (query >= group || j * 16 >= rank_k) continue;
      if constexpr (kByChannel)
        lane16.q[j][0] = load_word(row + j * 32), lane16.q[j][1] = load_word(row + j * 32 + 16);
      else
        load_vector(lane16.q[j], row + j * 32);
    }
    if constexpr (!HalfOf<E>::kSame) {  // of a power of two below the row's largest number
      float most = 0.f;
      each(lane16, [&](uint32_t x) {
        most = fmaxf(most, fmaxf(fabsf(E::widen(uint16_t(x))), fabsf(E::widen(uint16_t(x >> 16)))));
        return x;
      });
      most = over_row(most, [](float x, float y) { return fmaxf(x, y); });
      power = power_below(fminf(fmaxf(most, 0x1p-100f), 0x1p100f));
      const float inverse = power_inverse(power);
      each(lane16, [&](uint32_t x) {
        return Half::pack(E::widen(uint16_t(x)) * inverse, E::widen(uint16_t(x >> 16)) * inverse);
      });
    }
    each(lane16, [&](uint32_t x) {
      own += Half::widen(uint16_t(x)) + Half::widen(uint16_t(x >> 16));
      return x;
    });
    own = over_row(own, [](float x, float y) { return x + y; });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int from = (lane % 4 * 2 + i) * 4;
      sum[i] = __shfl_sync(~0u, own, from);
      factor[i] = __shfl_sync(~0u, power, from) * scale_log2;
    }
    lane16.k.set(kByChannel ? kChunkTokens / 2 : rank_k / 2, lane % 16, lane / 16);
    const int row_v = kByChannel ? 2 * (lane % 8) + lane / 16 : lane / 16 * 8 + lane % 8;
    lane16.v.set(rank_v / 2, row_v, lane / 8 % 2);
    lane16.steps_k = pinned(rank_k / (kByChannel ? 16 : 32)), lane16.steps_v = pinned(rank_v / 32);
  }

 private:
  template <class Body>
  __device__ static void each(Lane16<kNarrowRank / 16>& lane16, Body body) {
#pragma unroll
    for (auto& step : lane16.q) step[0] = body(step[0]), step[1] = body(step[1]);
  }
};

// Adds V of 64 tokens, whose shares are p. The four loads of a block of channels go first, so that one
// wait serves all.
template <class E, Coding kCoding>
__device__ __forceinline__ void add_byte_values(float (&o)[kNarrowRank / 16][4],
                                                const Lane16<kNarrowRank / 16>& lane16, uint32_t v,
                                                const uint32_t (&p)[kPairs][2]) {
  using Numbers = ByteNumbers<kCoding>;
  using Product = typename HalfOf<E>::type;
  const uint32_t next = lane16.steps_v * 512;
  // What the numbers are too large by is the same in all channels.
  constexpr uint32_t kLess = Numbers::kLessOfValues;
  const uint32_t less[4] = {kLess, kLess, kLess, kLess};
  float rest[4] = {};
  if constexpr (kLess != 0) {
#pragma unroll
    for (int b = 0; b < kPairs; ++b) Product::multiply(rest, less, p[b][0], p[b][1]);
  }
#pragma unroll
  for (int j = 0; j < kNarrowRank / 32; ++j) {
    if (j >= lane16.steps_v) break;
    uint32_t a[kPairs][4];
#pragma unroll
    for (int b = 0; b < kPairs; ++b) load_matrices_transposed(a[b], lane16.v(v + b * next, j));
    if constexpr (kLess != 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[2 * j][i] += rest[i], o[2 * j + 1][i] += rest[i];
    }
#pragma unroll
    for (int b = 0; b < kPairs; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t values[4] = {Numbers::value(a[b][h], 0), Numbers::value(a[b][h], 1),
                                    Numbers::value(a[b][2 + h], 0), Numbers::value(a[b][2 + h], 1)};
        Product::multiply(o[2 * j + h], values, p[b][0], p[b][1]);
      }
    }
  }
}

// Scores of 64 tokens whose K is [token][rank], and then their metadata. A row of fragment b is token
// 16 b + g, or that + 8. Those of tokens that do not exist may be anything.
template <class E, Coding kCoding>
__device__ __forceinline__ void score_key_rows(float (&s)[kPairs][4],
                                               const Lane16<kNarrowRank / 16>& lane16,
                                               const ByteQueries& queries, uint32_t k) {
  using Numbers = ByteNumbers<kCoding>;
  const uint32_t meta = k + lane16.steps_k * 32 * kChunkTokens;
#pragma unroll
  for (int b = 0; b < kPairs; ++b, k += lane16.steps_k * 512) {
    float sums[2][4] = {};
#pragma unroll
    for (int j = 0; j < kNarrowRank / 32; ++j) {
      if (j >= lane16.steps_k) break;
      uint32_t a[4];
      load_matrices(a, lane16.k(k, j));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t keys[4] = {Numbers::key(a[2 * h], 0), Numbers::key(a[2 * h + 1], 0),
                                  Numbers::key(a[2 * h], 1), Numbers::key(a[2 * h + 1], 1)};
        const uint32_t (&q)[2] = lane16.q[2 * j + h];
        HalfOf<E>::type::multiply(sums[h], keys, q[0], q[1]);
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const ByteGrid grid = Numbers::grid(meta, 16 * b + threadIdx.x % 32 / 4 + 8 * e);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x = (sums[0][2 * e + i] + sums[1][2 * e + i]) * grid.scale;
        if constexpr (has_minimum(kCoding))
          x = fmaf(queries.sum[i], fmaf(-Numbers::kOfKeys, grid.scale, grid.minimum), x);
        s[b][2 * e + i] = x * queries.factor[i];
      }
    }
  }
}

// Scores of a page of 64 tokens whose K is by channel: [rank][token], then a scale and a minimum a
// channel. A row of fragment b is token 16 b + 2 g, or the one after it. The scales go into the queries,
// and what else is the same for all tokens is one product beside them:
//
//   s = q' (1024 + c) - 1024 q' + minimum q,   q' = scale q
template <class E>
__device__ __forceinline__ void score_key_page(float (&s)[kPairs][4],
                                               const Lane16<kNarrowRank / 16>& lane16,
                                               const ByteQueries& queries, uint32_t k) {
  using Product = typename HalfOf<E>::type;
  constexpr uint32_t kLess = 0xe400e400;  // -1024, twice
  const uint32_t less[4] = {kLess, kLess, kLess, kLess};
  uint32_t meta = k + lane16.steps_k * 16 * kChunkTokens + threadIdx.x % 4 * 2 * kPairBytes;
  float rest[4] = {};
#pragma unroll
  for (int b = 0; b < kPairs; ++b) s[b][0] = s[b][1] = s[b][2] = s[b][3] = 0.f;
  // 32 channels at a time: all loads first.
#pragma unroll
  for (int step = 0; step < kNarrowRank / 16; step += 2) {
    if (step >= lane16.steps_k) break;
    uint32_t a[2][2][4], pair[2][2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int j = step + n;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        load_vector(pair[n][h], meta + (16 * j + 8 * h) * kPairBytes);
        load_matrices_transposed(a[n][h], lane16.k(k, h) + 16 * j * kChunkTokens);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t (&q)[2] = lane16.q[step + n];
      uint32_t scaled[2], minima[4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t (&two)[2] = pair[n][h];
        scaled[h] = fma_halves(q[h], picked_bytes(two[0], two[1], 0x5410), 0x80008000);
        minima[2 * h] = minima[2 * h + 1] = picked_bytes(two[0], two[1], 0x7632);
      }
      Product::multiply(rest, minima, q[0], q[1]);
      Product::multiply(rest, less, scaled[0], scaled[1]);
#pragma unroll
      for (int b = 0; b < kPairs; ++b) {
        const uint32_t (&x)[4] = a[n][b / 2];
        const int h = b % 2;
        const uint32_t keys[4] = {token_of_pair(x[2 * h], 0), token_of_pair(x[2 * h], 1),
                                  token_of_pair(x[2 * h + 1], 0), token_of_pair(x[2 * h + 1], 1)};
        Product::multiply(s[b], keys, scaled[0], scaled[1]);
      }
    }
  }
#pragma unroll
  for (int b = 0; b < kPairs; ++b) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[b][i] = (s[b][i] + rest[i]) * queries.factor[i % 2];
  }
}

// Adds V of 64 tokens, of which the first `rows` exist: [token][rank], and then their metadata.
// kPaired: rows of the scores are those of score_key_page.
template <class E, Coding kCoding, bool kPaired>
__device__ __forceinline__ void add_value_rows(ByteState<kCoding>& state,
                                               const Lane16<kNarrowRank / 16>& lane16, uint32_t v,
                                               float (&s)[kPairs][4], int rows) {
  using Numbers = ByteNumbers<kCoding>;
  const uint32_t meta = v + lane16.steps_v * 32 * kChunkTokens;
  const int own = threadIdx.x % 32 / 4 * (kPaired ? 2 : 1);
  float worth[kPairs][2], least[kPairs][2];
  uint32_t p[kPairs][2];
#pragma unroll
  for (int b = 0; b < kPairs; ++b) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int token = 16 * b + own + (kPaired ? e : 8 * e);
      const ByteGrid grid = Numbers::grid(meta, token);
      worth[b][e] = grid.scale * state.inverse;
      least[b][e] = fmaf(Numbers::kOfValues, grid.scale, grid.minimum);
      if (rows >= kChunkTokens || token < rows) continue;
      s[b][2 * e] = s[b][2 * e + 1] = -INFINITY;
      worth[b][e] = least[b][e] = 0.f;
    }
  }
  state.weigh_bytes(s, worth, least, p);
  add_byte_values<E, kCoding>(state.o, lane16, v, p);
}

// P: ByteParams.
template <class E, class P>
__global__ void __launch_bounds__(kByteWarps * 32, kBlocksPerSM)
    attend_bytes(const __grid_constant__ P p) {
  constexpr int kParts = P::kParts;
  KVLATHE_DYNAMIC_SHARED(shared);  // rings of the warps | merge buffer
  __shared__ Block<kParts> block;
  __shared__ Runs<kParts> runs[kMaxWarps];
  __shared__ Parked parked_of[1];  // of no use here
  warm_up(p);
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const Crew crew{int(threadIdx.x), int(blockDim.x)};
  auto* buffer = reinterpret_cast<float*>(shared + warps * p.ring_bytes);
  Ring ring{
      {}, uint32_t(kept(shared_address(shared) + warp * p.ring_bytes)), pinned(p.ring_bytes), 0};

  const Planned<kParts> plan(p);
  if (plan.any) warm_up(p, plan.walk.span);
  Producer<P, 16, false> producer(p, plan, runs[warp], ring, parked_of[0]);
  if (threadIdx.x == 0) {
    block.walk = plan.walk, block.share = plan.share, block.begin_start = plan.begin_start,
    block.ending.there = false;
  }
  __syncthreads();
  const bool early = plan.any && p.early;  // as in attend_decode
  if (!early) {
    wait_for_previous_kernel();
    if (plan.some_empty) write_empty<E>(p, crew);
    if (!plan.any) return;
  }
  ByteState<P::kCoding> state;
  state.clear();
  Lane16<kNarrowRank / 16> lane16;
  ByteQueries queries;
  bool coded = false;  // of the run being attended
  const auto start = [&] {
    wait_for_previous_kernel();
    if (plan.some_empty) write_empty<E>(p, crew);
  };
  const auto enter = [&](bool bytes) {
    if (bytes == coded) return;
    coded = bytes;
    if (bytes)
      state.enter_bytes();
    else
      state.leave_bytes();
  };
  const auto ended = [&] {
    enter(false);
    finish_sliced<E>(p, state, buffer, block, crew);
    state.clear();
  };
  const auto take = [&](Turn&, int part, const HeadParams<kParts>& at, uint32_t rows) {
    enter(is_byte(p.part[part].bits));
    if (coded)
      queries.template set<E, P::kKeyPages>(lane16, rows, p.group_size, at.rank_k, at.rank_v,
                                            p.scale_log2);
    else
      lane16.set(rows, p.group_size, at.rank_k, at.rank_v);
  };
  float s[kPairs][4] = {};  // scores of the tile whose K is attended
  bool scored = false;      // whether V is next
  const auto attend = [&](Turn& turn, int now) {
    const uint32_t tile = ring.wait_oldest(turn.bytes);
    if (!coded) {
      const int rows = min(turn.units * kRowTokens, turn.length - now * kRowTokens);
      attend_tile<E>(state, lane16, tile, turn.units, rows, p.scale_log2);
    } else if (scored) {
      add_value_rows<E, P::kCoding, P::kKeyPages>(state, lane16, tile, s,
                                                  turn.length - now * kChunkTokens);
      scored = false;
    } else {
      if constexpr (P::kKeyPages)
        score_key_page<E>(s, lane16, queries, tile);
      else
        score_key_rows<E, P::kCoding>(s, lane16, queries, tile);
      scored = true, turn.unit = now;  // the same tile again
    }
    ring.drop_oldest(turn.bytes);
  };
  attend_in_turns<false>(p, producer, ring, block.walk, early, start, ended, take, attend);
  if (block.ending.there)
    finish_pair<E, true>(p, block.ending, reinterpret_cast<float*>(shared), crew);
}

}  // namespace kvlathe::cuda
