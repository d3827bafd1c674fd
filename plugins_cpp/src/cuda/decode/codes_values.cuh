// P of 64 tokens as codes, and its products with V (attend_codes.cuh).
#pragma once

#include "cuda/decode/codes.cuh"
#include "cuda/decode/softmax_state.cuh"

namespace kvlathe::cuda {

// Turns scores into P as bytes: p[f] is a fragment of them for each fragment of scores, and `step`
// is B, what one byte is worth. Raises m of the state where the scores exceed it too far.
template <int kSteps, int kFill>
__device__ void weigh_codes(SoftmaxState<kSteps, kFill>& state, const float (&s)[kPairs / kFill][4],
                            uint32_t (&p)[kPairs / kFill], float (&step)[2]) {
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
  if (__any_sync(~0u, most[0] > state.m[0] + kSlack || most[1] > state.m[1] + kSlack)) {
    const float m_new[2] = {fmaxf(state.m[0], most[0]), fmaxf(state.m[1], most[1])};
    state.raise_to(m_new);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    step[i] = short_mantissa(exp2_fast(most[i] - state.m[i]) * (1.f / 255.f));
    shift[i] = most[i] - kLog2Levels;
  }
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
    uint32_t x[4];  // the low byte of a float + kMagic is that float, rounded
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __float_as_uint(exp2_fast(s[f][i] - shift[i % 2]) + kMagic);
    p[f] = transposed(__byte_perm(x[0] + (x[2] << 8), x[1] + (x[3] << 8), 0x5410));
  }
}

// P of 64 tokens as second factors of PV, in the order of pairs 0 2 1 3: pairs whose codes lie in
// the same bits of a byte stand together. kFill 2: columns 4 to 7 have the order 2 0 3 1, and each
// product sees the queries of one half of the columns only.
template <int kFill>
struct CodeWeights {
  uint32_t all[kPairs];

  CodeWeights() = default;
  __device__ explicit CodeWeights(const uint32_t (&own)[kPairs / kFill]) {
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
  // Those that one copy of the queries meets. thread: this one's number in its warp.
  __device__ void only(uint32_t (&x)[kPairs], int copy, int thread) const {
#pragma unroll
    for (int p = 0; p < kPairs; ++p) x[p] = kFill == 1 || thread / 16 == copy ? all[p] : 0u;
  }
  // B sum p'. A product with ones gives it in every row, for less than adding across lanes costs.
  __device__ void total(const float (&step)[2], float (&total)[2]) const {
    constexpr uint32_t kOnes = 0x01010101u;
    int32_t sums[4] = {0, 0, 0, 0};
    multiply_unsigned(sums, kOnes, kOnes, kOnes, kOnes, all[0], all[1]);
    multiply_unsigned(sums, kOnes, kOnes, kOnes, kOnes, all[2], all[3]);
    total[0] = step[0] * float(sums[0]);
    total[1] = step[1] * float(sums[1]);
  }
};

// Adds V^T P of 16 channels and 64 tokens. The codes of every other pair stay in the higher bits of
// their bytes, because shifting them down would cost an instruction. They are worth 2^kBits times
// as much there, and add into `highs`. kTurn: the pairs come in the order 2 3 0 1.
template <int kBits, bool kTurn>
__device__ void add_channels(int32_t (&lows)[4], int32_t (&highs)[4], uint32_t v, int v_stride,
                             const uint32_t (&p)[kPairs]) {
  using C = Codes<kBits>;
  uint32_t first[kBits / 2], second[kBits / 2];
  load_vector(first, v);
  load_vector(second, v + 8 * v_stride);
  const auto take = [](const uint32_t (&words)[kBits / 2], int pair) {
    const uint32_t word = C::crumbs ? words[0] >> pair / 2 * 4 : words[pair / C::kIn];
    return word & C::kMask << (C::packed ? pair % 2 * kBits : 0);
  };
  constexpr int kTo = kTurn ? 2 : 0;
  multiply_unsigned(lows, take(first, kTo), take(second, kTo), take(first, 2 - kTo),
                    take(second, 2 - kTo), p[0], p[1]);
  multiply_unsigned(C::packed ? highs : lows, take(first, kTo + 1), take(second, kTo + 1),
                    take(first, 3 - kTo), take(second, 3 - kTo), p[2], p[3]);
}

// o += B (scale sum p' v' + minimum sum p') and l += B sum p', over the tokens of one group of V.
// v, v_meta: where this lane reads.
template <int kBits, bool kPlain, int kSteps, int kFill>
__device__ void add_values(SoftmaxState<kSteps, kFill>& state, const Slab& slab, uint32_t v,
                           int v_stride, uint32_t v_meta, const CodeWeights<kFill>& p,
                           const float (&step)[2]) {
  using C = Codes<kBits>;
  const int meta_stride = kPlain ? 4 : pinned(slab.meta_stride);
  const float worth[2] = {step[0] * (1.f / C::kHigh), step[1] * (1.f / C::kHigh)};  // of a sum
  const float less[2] = {-kMagic * worth[0], -kMagic * worth[1]};
  float total[2];
  p.total(step, total);
  if (slab.thread < 4 / kFill) state.l[0] += total[0], state.l[1] += total[1];
  uint32_t first[kPairs], second[kPairs];
  p.only(first, 0, slab.thread);
  if (kFill == 2) p.only(second, 1, slab.thread);
#pragma unroll
  for (int j = 0; j < kSteps / kFill; ++j) {
    if (j * kFill >= slab.steps_v) break;
    // The sums start at the bits of kMagic, so that they need no conversion to floats.
    int32_t lows[4] = {0, 0, 0, 0}, sums[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits};
    uint32_t meta = v_meta;
    add_channels<kBits, false>(C::packed ? lows : sums, sums, v, v_stride, first);
    if (kFill == 2 && j * kFill + 1 < slab.steps_v) {
      add_channels<kBits, true>(C::packed ? lows : sums, sums, v + 16 * v_stride, v_stride, second);
      if (slab.thread % 4 >= 2) meta += 16 * meta_stride;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 group = meta_at(meta + (i < 2 ? 0 : 8 * meta_stride));
      const float product =
          fmaf(__int_as_float(lows[i] * C::kHigh + sums[i]), worth[i % 2], less[i % 2]);
      state.o[j][i] = fmaf(total[i % 2], group.y, fmaf(product, group.x, state.o[j][i]));
    }
    v += 16 * kFill * v_stride;
    v_meta += 16 * kFill * meta_stride;
  }
}

}  // namespace kvlathe::cuda
