// A 16-bit tile of one lane: K [token][rank_k], then V [token][rank_v]. It is attended in units of
// 16 tokens, which are the M of the first product and the inner dimension of the second:
//
//   S [16 tokens x 8 heads]  = K [16 x rank_k] Q^T [rank_k x 8]
//   O [rank_v x 8 heads]    += V^T [rank_v x 16 tokens] P [16 tokens x 8 heads]
//
// Rows are swizzled in chunks of 16 bytes (ring.cuh), so that matrix loads meet no bank twice.
#pragma once

#include "cuda/decode/bundles.cuh"
#include "cuda/decode/softmax_state.cuh"

namespace kvlathe::cuda {

// Starts `count` copies of 512 bytes that are contiguous in the pool. `to`, `from` and the swizzle
// bits are this lane's. kFull false: chunks from `valid` on become zeros and are not read, because
// unused rows of a page may hold NaN.
template <bool kFull>
__device__ void copy_part(uint32_t to, const char* from, uint32_t bits, int count, int valid) {
#pragma unroll
  for (int i = 0; i < kMostCopies; ++i) {
    if (i >= count) break;
    const uint32_t turn = (i ? bits >> (4 * i - 4) : bits << 4) & 0x70;
    copy16((to ^ turn) + 512 * i, from + 512 * i, kFull || int(threadIdx.x % 32) + 32 * i < valid);
  }
}

// Where in a unit this lane's row for load_matrices lies, in each step of 16 channels. The swizzle
// repeats after four steps: step j is at [j % 4] + 128 (j / 4).
struct MatrixRows {
  int at[4];

  __device__ void set(int rank, int row, int column) {
    const Swizzle swizzle(rank);
    const int first = row * rank * 2 + (column ^ swizzle(row)) * 16;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      at[j] = pinned((first ^ (32 * j & swizzle.mask * 16)) + (32 * j & ~(swizzle.mask * 16)));
  }
  __device__ uint32_t operator()(uint32_t unit, int j) const {
    return unit + at[j % 4] + 128 * (j / 4);
  }
};

// How this lane reads the tiles of one (sequence, head): its queries as fragments of the second
// factor, the rows that it loads, and the sizes. Query heads past the group are zeros.
template <int kSteps_>
struct Lane16 {
  static constexpr int kSteps = kSteps_;
  uint32_t q[kSteps][2];
  MatrixRows k, v;
  int steps_k, steps_v;

  __device__ uint2 query(int j) const { return {q[j][0], q[j][1]}; }

  // `queries`: shared, [group][rank_k].
  __device__ void set(uint32_t queries, int group, int rank_k, int rank_v) {
    const int lane = threadIdx.x % 32, query = lane / 4;
    const uint32_t row = queries + query * rank_k * 2 + lane % 4 * 4;
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      const bool there = query < group && j * 16 < rank_k;
      q[j][0] = there ? load_word(row + j * 32) : 0u;
      q[j][1] = there ? load_word(row + j * 32 + 16) : 0u;
    }
    k.set(rank_k, lane % 16, lane / 16);
    v.set(rank_v, lane / 16 * 8 + lane % 8, lane / 8 % 2);
    steps_k = pinned(rank_k / 16);
    steps_v = pinned(rank_v / 16);
  }
};

// The same of wide lanes: queries stay in shared memory, 8 bytes of this lane each 32 (keep_queries
// of fragments.cuh). in_keys: V is the beginning of K's rows.
template <int kSteps_>
struct WideLane16 {
  static constexpr int kSteps = kSteps_;
  uint32_t queries;
  MatrixRows k, v;
  int steps_k, steps_v;

  __device__ uint2 query(int j) const {
    uint32_t x[2];
    load_vector(x, queries + 32 * j);
    return {x[0], x[1]};
  }
  __device__ void set(uint32_t own, int rank_k, int rank_v, bool in_keys) {
    const int lane = threadIdx.x % 32;
    queries = own;
    k.set(rank_k, lane % 16, lane / 16);
    v.set(in_keys ? rank_k : rank_v, lane / 16 * 8 + lane % 8, lane / 8 % 2);
    steps_k = rank_k / 16, steps_v = rank_v / 16;
  }
};

// Scores of one unit, in base 2.
template <class E, class Lane>
__device__ void score_unit(float (&s)[4], const Lane& lane16, uint32_t k, float scale_log2) {
  uint32_t a[4];
  s[0] = s[1] = s[2] = s[3] = 0.f;
#pragma unroll
  for (int j = 0; j < Lane::kSteps; ++j) {
    if (j >= lane16.steps_k) break;
    load_matrices(a, lane16.k(k, j));
    const uint2 q = lane16.query(j);
    E::multiply(s, a, q.x, q.y);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) s[i] *= scale_log2;
}

// Adds V of one unit, whose scores are s (-inf where masked).
template <class E, int kSteps, class Lane>
__device__ void add_unit(SoftmaxState<kSteps>& state, const Lane& lane16, uint32_t v,
                         float (&s)[4]) {
  uint32_t a[4];
  state.weigh(s);
  const uint32_t p0 = transposed(E::pack(s[0], s[1])), p1 = transposed(E::pack(s[2], s[3]));
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    if (j >= lane16.steps_v) break;
    load_matrices_transposed(a, lane16.v(v, j));
    E::multiply(state.o[j], a, p0, p1);
  }
}

// One unit, of which the first `rows` tokens exist.
template <class E, int kSteps>
__device__ void attend_unit(SoftmaxState<kSteps>& state, const Lane16<kSteps>& lane16, uint32_t k,
                            uint32_t v, int rows, float scale_log2) {
  float s[4];
  score_unit<E>(s, lane16, k, scale_log2);
  if (rows < kRowTokens) {
    const int row = threadIdx.x % 32 / 4;
    if (row >= rows) s[0] = s[1] = -INFINITY;
    if (row + 8 >= rows) s[2] = s[3] = -INFINITY;
  }
  add_unit<E>(state, lane16, v, s);
}

// `rows` tokens of a tile that has room for `units` units.
template <class E, int kSteps>
__device__ void attend_tile(SoftmaxState<kSteps>& state, const Lane16<kSteps>& lane16,
                            uint32_t tile, int units, int rows, float scale_log2) {
  uint32_t k = tile, v = tile + units * lane16.steps_k * 512;
  for (; rows > 0; rows -= kRowTokens) {
    attend_unit<E>(state, lane16, k, v, rows, scale_log2);
    k += lane16.steps_k * 512;
    v += lane16.steps_v * 512;
  }
}

// The same for a bundle. left: tokens of the part from the tile's first one on.
template <class E, int kSteps>
__device__ void attend_tile_of_bundle(SoftmaxState<kSteps>& state, const Lane16<kSteps>& lane16,
                                      const UnseenTail& unseen, uint32_t tile, int units, int left,
                                      float scale_log2) {
  uint32_t k = tile, v = tile + units * lane16.steps_k * 512;
  const int own = threadIdx.x % 32 / 4;
#pragma unroll 1
  for (int unit = 0; unit < units && left > 0; ++unit, left -= kRowTokens) {
    float s[4];
    score_unit<E>(s, lane16, k, scale_log2);
    if (left < kRowTokens + KVLATHE_MAX_BUNDLE) {
#pragma unroll
      for (int i = 0; i < 4; ++i) unseen.hide(s[i], i % 2, own + i / 2 * 8, left);
    }
    add_unit<E>(state, lane16, v, s);
    k += lane16.steps_k * 512;
    v += lane16.steps_v * 512;
  }
}

}  // namespace kvlathe::cuda
