// Decode attention over rows of bytes: sealed pages whose K and V are [token][rank] in codes of 8
// bits, and a token of each is one group. It is the kernel of 16-bit parts (attend_decode.cuh) with
// rows of half the bytes: they are copied, and lie in shared memory, as 16-bit rows of half the rank
// would, 16 tokens at a time. Codes become halves in registers (byte_numbers.cuh). A token's scale
// leaves the sum of QK^T, and for PV goes into its share, so the products take what the codes are.
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
  __device__ void raise_both(float (&s)[4], float (&worth)[2]) {
    const float before[2] = {m[0], m[1]};
    raise(reinterpret_cast<float (&)[1][4]>(s));
#pragma unroll
    for (int i = 0; i < 2; ++i) rest[i] *= m[i] == before[i] ? 1.f : exp2_fast(before[i] - m[i]);
    float most = fmaxf(worth[0], worth[1]);
#pragma unroll
    for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    if (most <= kMostWorth) return;
    const float by = power_inverse(power_below(most)) * (kMostWorth / 2);
    inverse *= by, worth[0] *= by, worth[1] *= by;
    scale_sums(by);
  }
};

// The queries of a run for products with codes, in lane16, and for this lane's two of them what a
// product is worth in base 2, and the sum of their numbers.
struct ByteQueries {
  float factor[2], sum[2];

  template <class E>
  __device__ void set(Lane16<kNarrowRank / 16>& lane16, uint32_t queries, int group, int rank_k,
                      int rank_v, float scale_log2) {
    const int lane = threadIdx.x % 32, query = lane / 4;
    const uint32_t row = queries + query * rank_k * 2 + lane % 4 * 8;
    const auto over_row = [](float x, auto join) {
      x = join(x, __shfl_xor_sync(~0u, x, 1));
      return join(x, __shfl_xor_sync(~0u, x, 2));
    };
    float own = 0.f, power = 1.f;
#pragma unroll
    for (int j = 0; j < Lane16<kNarrowRank / 16>::kSteps; ++j) {
      lane16.q[j][0] = lane16.q[j][1] = 0;
      if (query < group && j * 16 < rank_k) load_vector(lane16.q[j], row + j * 32);
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
    lane16.k.set(rank_k / 2, lane % 16, lane / 16);
    lane16.v.set(rank_v / 2, lane / 16 * 8 + lane % 8, lane / 8 % 2);
    lane16.steps_k = pinned(rank_k / 32), lane16.steps_v = pinned(rank_v / 32);
  }

 private:
  template <class Body>
  __device__ static void each(Lane16<kNarrowRank / 16>& lane16, Body body) {
#pragma unroll
    for (auto& step : lane16.q) step[0] = body(step[0]), step[1] = body(step[1]);
  }
};

// One unit, of which the first `rows` tokens exist. meta_k, meta_v: where its metadata lie.
template <class E, Coding kCoding>
__device__ __forceinline__ void attend_byte_unit(ByteState<kCoding>& state,
                                                 const Lane16<kNarrowRank / 16>& lane16,
                                                 const ByteQueries& queries, uint32_t k, uint32_t v,
                                                 uint32_t meta_k, uint32_t meta_v, int rows) {
  using Numbers = ByteNumbers<kCoding>;
  using Product = typename HalfOf<E>::type;
  constexpr int kStrips = kNarrowRank / 32;
  float sums[2][4] = {}, s[4], worth[2], least[2];
  uint32_t a[4];
#pragma unroll
  for (int j = 0; j < kStrips; ++j) {
    if (j >= lane16.steps_k) break;
    load_matrices(a, lane16.k(k, j));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t keys[4] = {Numbers::key(a[2 * h], 0), Numbers::key(a[2 * h + 1], 0),
                                Numbers::key(a[2 * h], 1), Numbers::key(a[2 * h + 1], 1)};
      const uint32_t (&q)[2] = lane16.q[2 * j + h];
      Product::multiply(sums[h], keys, q[0], q[1]);
    }
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int row = threadIdx.x % 32 / 4 + 8 * e;
    const bool there = row < rows;
    const ByteGrid of_k = Numbers::grid(meta_k, row), of_v = Numbers::grid(meta_v, row);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float x = (sums[0][2 * e + i] + sums[1][2 * e + i]) * of_k.scale;
      if constexpr (has_minimum(kCoding))
        x = fmaf(queries.sum[i], fmaf(-Numbers::kOfKeys, of_k.scale, of_k.minimum), x);
      s[2 * e + i] = there ? x * queries.factor[i] : -INFINITY;
    }
    worth[e] = there ? of_v.scale * state.inverse : 0.f;
    least[e] = there ? fmaf(Numbers::kOfValues, of_v.scale, of_v.minimum) : 0.f;
  }
  const bool above = fmaxf(s[0], s[2]) > state.m[0] + kSlack ||
                     fmaxf(s[1], s[3]) > state.m[1] + kSlack ||
                     fmaxf(worth[0], worth[1]) > kMostWorth;
  if (__any_sync(~0u, above)) state.raise_both(s, worth);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    s[i] = exp2_fast(s[i] - state.m[i % 2]);
    state.l[i % 2] += s[i];
    if constexpr (has_minimum(kCoding))
      state.rest[i % 2] = fmaf(s[i], least[i / 2], state.rest[i % 2]);
    s[i] *= worth[i / 2];
  }
  const uint32_t p0 = transposed(Half::pack(s[0], s[1])), p1 = transposed(Half::pack(s[2], s[3]));
#pragma unroll
  for (int j = 0; j < kStrips; ++j) {
    if (j >= lane16.steps_v) break;
    load_matrices_transposed(a, lane16.v(v, j));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t values[4] = {Numbers::value(a[h], 0), Numbers::value(a[h], 1),
                                  Numbers::value(a[2 + h], 0), Numbers::value(a[2 + h], 1)};
      Product::multiply(state.o[2 * j + h], values, p0, p1);
    }
  }
}

// `rows` tokens of a tile of `units` units: K | V | metadata of K | metadata of V.
template <class E, Coding kCoding>
__device__ __forceinline__ void attend_byte_tile(ByteState<kCoding>& state,
                                                 const Lane16<kNarrowRank / 16>& lane16,
                                                 const ByteQueries& queries, uint32_t tile,
                                                 int units, int rows) {
  constexpr int kMeta = kRowTokens * ByteNumbers<kCoding>::kMetaBytes;
  uint32_t k = tile, v = k + units * lane16.steps_k * 512,
           meta_k = v + units * lane16.steps_v * 512;
#pragma unroll 1
  for (; rows > 0; rows -= kRowTokens) {
    attend_byte_unit<E>(state, lane16, queries, k, v, meta_k, meta_k + units * kMeta, rows);
    k += lane16.steps_k * 512, v += lane16.steps_v * 512, meta_k += kMeta;
  }
}

template <class E, Coding kCoding>
__global__ void __launch_bounds__(kByteWarps * 32, kBlocksPerSM)
    attend_bytes(const __grid_constant__ ByteParams<kCoding> p) {
  using P = ByteParams<kCoding>;
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
  ByteState<kCoding> state;
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
    finish<E>(p, state, buffer, block, crew);
    state.clear();
  };
  const auto take = [&](Turn&, int part, const HeadParams<kParts>& at, uint32_t rows) {
    enter(is_byte(p.part[part].bits));
    if (coded)
      queries.set<E>(lane16, rows, p.group_size, at.rank_k, at.rank_v, p.scale_log2);
    else
      lane16.set(rows, p.group_size, at.rank_k, at.rank_v);
  };
  const auto attend = [&](Turn& turn, int now) {
    const uint32_t tile = ring.wait_oldest(turn.bytes);
    const int rows = min(turn.units * kRowTokens, turn.length - now * kRowTokens);
    if (coded)
      attend_byte_tile<E>(state, lane16, queries, tile, turn.units, rows);
    else
      attend_tile<E>(state, lane16, tile, turn.units, rows, p.scale_log2);
    ring.drop_oldest(turn.bytes);
  };
  attend_in_turns<false>(p, producer, ring, block.walk, early, start, ended, take, attend);
  if (block.ending.there)
    finish_pair<E, true>(p, block.ending, reinterpret_cast<float*>(shared), crew);
}

}  // namespace kvlathe::cuda
