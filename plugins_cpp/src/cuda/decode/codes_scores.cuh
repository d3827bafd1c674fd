// Scores of 64 tokens of codes (attend_codes.cuh).
#pragma once

#include "cuda/decode/codes.cuh"

namespace kvlathe::cuda {

// Adds QK^T of kTaken steps of 16 channels to `sums`. k: where this lane's first row lies; q: where
// the queries of the steps start. thread: this one's number in its warp.
template <int kBits, int kTaken, int kFill>
__device__ void add_products(int32_t (&sums)[kPairs / kFill][4], uint32_t k, int row_bytes,
                             uint32_t q, int thread) {
  using C = Codes<kBits>;
  constexpr int kFragments = kPairs / kFill;
  constexpr int kShare = C::kIn / kTaken;  // lane columns that share a word
  constexpr int kTogether = kTaken < 2 ? 1 : 2;
  uint32_t b[kTaken / kTogether][kFill * kTogether];
#pragma unroll
  for (int i = 0; i < kTaken / kTogether; ++i)
    load_vector(b[i], q + (i * 32 + thread) * kFill * kTogether * 4);
  if constexpr (is_byte(kBits)) {
#pragma unroll
    for (int p = 0; p < kPairs; p += 2) {
      uint32_t a[4];
      load_matrices(a, k + C::token(0, p) * row_bytes);
      multiply_signed(sums[p % kFragments], a[0], a[1], b[0][p / kFragments]);
      multiply_signed(sums[(p + 1) % kFragments], a[2], a[3], b[0][p / kFragments]);
    }
  } else {
    const int t = thread % 4, shift = t % kShare * kTaken * kBits;
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
                          low >> (i + 1) * kBits & C::kMask, high >> (i + 1) * kBits & C::kMask,
                          b[i / 2][2 * copy], b[i / 2][2 * copy + 1]);
        }
      }
    }
  }
}

// S in base 2. s[f][2 e + i] is of row g of block e of this lane's pair in fragment f, and of its
// query i.
template <int kBits, int kFill>
__device__ void find_scores(float (&s)[kPairs / kFill][4], const Slab& slab, const Chunk& chunk,
                            uint32_t codes) {
  using C = Codes<kBits>;
  constexpr int kFragments = kPairs / kFill;
  const int row_bytes = pinned(slab.row_bytes), count = slab.groups.count;
  uint32_t k = chunk.k, q = codes;
  const uint32_t constants =
      codes + (slab.steps_k + count) * 128 * kFill + slab.thread % (4 / kFill) * 16;
#pragma unroll
  for (int f = 0; f < kFragments; ++f) s[f][0] = s[f][1] = s[f][2] = s[f][3] = 0.f;
#pragma unroll 1
  for (int g = 0; g < count; ++g) {
    int32_t sums[kFragments][4];
#pragma unroll
    for (int f = 0; f < kFragments; ++f)
      sums[f][0] = sums[f][1] = sums[f][2] = sums[f][3] = kMagicBits;
    const int steps = slab.groups.steps(g);
    uint32_t at = k;
    const auto take = [&](auto taken) {
      add_products<kBits, decltype(taken)::value, kFill>(sums, at, row_bytes, q, slab.thread);
      at += decltype(taken)::value * C::kStepBytes, q += decltype(taken)::value * 128 * kFill;
    };
    int rest = steps;
#pragma unroll 1
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

}  // namespace kvlathe::cuda
