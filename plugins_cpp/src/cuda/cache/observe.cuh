// Observed attention: the probabilities that observed rows give to tokens, summed. Two kernels: the state (m, l) of every
// observed row's softmax, and then, for 64 tokens of a lane at a time, the sum of their
// probabilities. A token's score has one writer, so nothing is added atomically.
//
// Few rows leave few blocks for the first kernel. So several blocks may share the tokens of a
// column, each with a state of its own. The second kernel merges them. How many share them is found
// here, by the observed rows of each sequence: those of a decode share also beside a prompt chunk.
//
// Columns are query heads of observed rows. A block multiplies 64 tokens by 64 columns.
#pragma once

#include "common/limits.h"
#include "cuda/forms.cuh"
#include "cuda/warp.cuh"
#include "kvlathe/cache.h"

namespace kvlathe::cuda {

constexpr int kObserveThreads = 128;
constexpr int kObserveWarps = kObserveThreads / 32;
constexpr int kObserveTokens = 16 * kObserveWarps;
constexpr int kObserveColumns = 64;
constexpr int kColumnTiles = kObserveColumns / 8;
constexpr float kNoScore = -1e30f;

// Blocks of one sequence that a GPU should have for the states, and how many share a column's tokens
// at most.
constexpr int kStateBlocks = 128;
constexpr int kMostSplits = 16;

struct ObservePart {
  const int32_t *page_table, *lengths;
  int64_t page_stride, lengths_stride;
  int32_t table_stride;
  int32_t fresh;
  FormSide side;  // of K
};

// K of one lane in one part, and its scores. Offsets are bytes from a page's start.
struct ObserveLane {
  int32_t k, k_meta;
  int32_t scores, positions;  // -1: none
  int32_t groups;             // groups_of; 0: the part does not hold the lane
};

struct ObserveHead {
  int32_t q_offset, rank;
  ObserveLane lane[KVLATHE_MAX_SLOTS];
};

struct ObserveParams {
  static constexpr bool kFloat8 = false, kWide = false;
  char* pool;
  const uint16_t* q;
  int64_t q_stride;
  const int32_t *cu_seqlens_q, *rows, *row_starts, *positions;
  float2* states;  // [heads, rows and spare rows of all sequences, group_size]
  float scale_log2;
  int32_t heads, group_size, page_tokens, parts, tokens;
  int32_t spare;  // rows of states that each sequence has beside those of its rows
  int32_t pitch;  // bytes of a row in shared memory
  ObservePart part[KVLATHE_MAX_SLOTS];
  ObserveHead head[KVLATHE_MAX_HEADS];
};

// The same of a call with floats of 8 bits.
struct ObserveFloat8 : ObserveParams {
  static constexpr bool kFloat8 = true;
};

// The same of a call with ranks above kNarrowRank.
struct ObserveWide : ObserveFloat8 {
  static constexpr bool kWide = true;
};

// Shared memory of a block: keys and queries as rows, then what each column needs, then the states
// of all warps, and codes at the end.
struct ObserveRoom {
  uint32_t keys, queries, limits, states, merge, codes;
  int pitch;

  __device__ ObserveRoom(uint32_t base, int pitch) : keys(base), pitch(pitch) {
    queries = keys + kObserveTokens * pitch;
    limits = queries + kObserveColumns * pitch;
    states = limits + kObserveColumns * 4;
    merge = states + kObserveColumns * 8;
    codes = merge + kObserveWarps * kObserveColumns * 8;
  }
};

inline int observe_room(int pitch, int codes) {
  return (kObserveTokens + kObserveColumns) * pitch +
         kObserveColumns * (4 + 8 + 8 * kObserveWarps) + codes;
}

// The observed rows of one sequence in one lane.
struct ObservedRows {
  const ObserveParams& p;
  const ObserveHead& head;
  int sequence, lane, first, columns, start;
  int splits;  // blocks that share the tokens of a column

  __device__ ObservedRows(const ObserveParams& p, int h, int b)
      : p(p), head(p.head[h]), sequence(b), lane(h), first(p.row_starts[b]) {
    const int rows = p.row_starts[b + 1] - first;
    columns = rows * p.group_size;
    start = p.cu_seqlens_q[b];
    const int room = 1 + p.spare / max(1, rows);
    splits = max(1, min(min(kMostSplits, room), kStateBlocks / max(1, tiles() * p.heads)));
  }
  // Of 64 columns.
  __device__ int tiles() const { return (columns + kObserveColumns - 1) / kObserveColumns; }
  __device__ int length(int part) const {
    return p.part[part].lengths[sequence * p.part[part].lengths_stride];
  }
  __device__ const int32_t* pages(int part) const {
    return p.part[part].page_table + int64_t{sequence} * p.part[part].table_stride;
  }
  __device__ int row_of(int column) const { return p.rows[first + column / p.group_size]; }
  // How many of the step's tokens a column sees.
  __device__ int sees(int column) const { return row_of(column) - start + 1; }
  __device__ float2* state(int column, int split) const {
    const int64_t before = int64_t{p.spare} * (gridDim.z * lane + sequence);
    const int64_t row = int64_t{p.tokens} * lane + first + before;
    return p.states + row * p.group_size + split * columns + column;
  }
};

// Codes and metadata of 64 tokens of a page, from token `within` on, to shared memory.
template <bool kFloat8>
__device__ inline FormRows copy_codes(const ObservePart& part, const ObserveLane& lane, int rank,
                                      int page_tokens, const char* page, int within, uint32_t to) {
  const FormSide& side = part.side;
  const int row = 8 * side.bits;  // bytes of 64 codes of a channel
  const int size = rank * row,
            meta_size = side.meta_size<kFloat8>(lane.groups, rank, kObserveTokens);
  const char *codes = page + lane.k, *meta = page + lane.k_meta;
  if (!side.by_channel()) {
    codes += within * (rank * side.bits / 8);
    meta += within * lane.groups * side.meta_bytes<kFloat8>();
  }
#pragma unroll 1
  for (int i = threadIdx.x * 8; i < size; i += kObserveThreads * 8) {
    int at = i;
    if (side.by_channel())
      at = i / row * (page_tokens * side.bits / 8) + within * side.bits / 8 + i % row;
    shared_at<uint2>(to + i) = *reinterpret_cast<const uint2*>(codes + at);
  }
#pragma unroll 1
  for (int i = threadIdx.x * 8; i < meta_size; i += kObserveThreads * 8)
    shared_at<uint2>(to + size + i) = *reinterpret_cast<const uint2*>(meta + i);
  return {to, to + size, side, rank, lane.groups, kObserveTokens};
}

// K of 64 tokens from `token` on as rows; those from `end` on are zeros or finite. Whole block.
template <class E, bool kFloat8>
__device__ void load_keys(const ObservedRows& o, int part, int token, int end,
                          const ObserveRoom& room) {
  const ObservePart& of = o.p.part[part];
  const ObserveLane& lane = o.head.lane[part];
  const int32_t* pages = o.pages(part);
  const int rank = o.head.rank, own = int(threadIdx.x) / 32 * 16, page_tokens = o.p.page_tokens;
  const RowsPlace to{room.keys + own * room.pitch, room.pitch, 16, 0, 0};
  if (!is_half(of.side.bits)) {
    const int within = token % page_tokens;
    const char* page = o.p.pool + pages[token / page_tokens] * of.page_stride;
    const FormRows rows =
        copy_codes<kFloat8>(of, lane, rank, page_tokens, page, within, room.codes);
    __syncthreads();
    const int group = rows.side.by_channel() ? (within + own) / rows.side.group : 0;
    convert_form<E, kFloat8>(rows, own, group, end - token - own, to);
    return;
  }
  const int first = token + own, row = int(threadIdx.x) % 16, half = int(threadIdx.x) % 32 / 16;
  const bool held = first + row < end;
  const char* from = nullptr;
  if (held)
    from = o.p.pool + pages[first / page_tokens] * of.page_stride + lane.k +
           (first % page_tokens + row) * rank * 2 + half * 16;
#pragma unroll 1
  for (int step = 0; step < rank / 16; ++step) {
    shared_at<uint4>(to.at(row, 2 * step + half)) =
        held ? *reinterpret_cast<const uint4*>(from + 32 * step) : uint4{0, 0, 0, 0};
  }
}

// q of 64 columns from `column` on as rows, zeros past the last column, and what each column sees of
// the step's tokens. Whole block.
__device__ inline void load_queries(const ObservedRows& o, int column, const ObserveRoom& room) {
  const int pieces = o.head.rank / 8;
#pragma unroll 1
  for (int i = threadIdx.x; i < kObserveColumns * pieces; i += kObserveThreads) {
    const int own = i / pieces, piece = i % pieces, at = column + own;
    uint4 x{0, 0, 0, 0};
    if (at < o.columns) {
      const uint16_t* row = o.p.q + o.row_of(at) * o.p.q_stride + o.head.q_offset;
      x = reinterpret_cast<const uint4*>(row + at % o.p.group_size * o.head.rank)[piece];
    }
    shared_at<uint4>(room.queries + own * room.pitch + piece * 16) = x;
  }
  const int own = threadIdx.x;
  if (own < kObserveColumns)
    shared_at<int>(room.limits + own * 4) = column + own < o.columns ? o.sees(column + own) : 0;
}

// A warp's 16 tokens, as the first factor of products. Wide ones stay in shared memory.
template <bool kWide>
struct KeyTile {
  uint32_t a[kNarrowRank / 16][4];
  int steps;

  __device__ KeyTile(const ObserveRoom& room, int rank) : steps(rank / 16) {
    const int lane = int(threadIdx.x) % 32, row = int(threadIdx.x) / 32 * 16 + lane / 4;
    const uint32_t at = room.keys + row * room.pitch + lane % 4 * 4;
#pragma unroll
    for (int step = 0; step < kNarrowRank / 16; ++step) {
      if (step >= steps) break;
      a[step][0] = load_word(at + 32 * step),
      a[step][1] = load_word(at + 8 * room.pitch + 32 * step);
      a[step][2] = load_word(at + 32 * step + 16);
      a[step][3] = load_word(at + 8 * room.pitch + 32 * step + 16);
    }
  }
  // Products with columns 8 n .. 8 n + 7. This thread gets tokens t / 4 and t / 4 + 8 for columns
  // 2 (t % 4) and the next one.
  template <class E>
  __device__ void multiply(float (&d)[4], const ObserveRoom& room, int n) const {
    const int lane = int(threadIdx.x) % 32;
    const uint32_t at = room.queries + (8 * n + lane / 4) * room.pitch + lane % 4 * 4;
    d[0] = d[1] = d[2] = d[3] = 0;
#pragma unroll
    for (int step = 0; step < kNarrowRank / 16; ++step) {
      if (step >= steps) break;
      multiply_tiles<E>(d, a[step], load_word(at + 32 * step), load_word(at + 32 * step + 16));
    }
  }
};

template <>
struct KeyTile<true> {
  uint32_t at;
  int steps;

  __device__ KeyTile(const ObserveRoom& room, int rank) : steps(rank / 16) {
    const int lane = int(threadIdx.x) % 32, row = int(threadIdx.x) / 32 * 16 + lane / 4;
    at = room.keys + row * room.pitch + lane % 4 * 4;
  }
  template <class E>
  __device__ void multiply(float (&d)[4], const ObserveRoom& room, int n) const {
    const int lane = int(threadIdx.x) % 32;
    uint32_t k = at, q = room.queries + (8 * n + lane / 4) * room.pitch + lane % 4 * 4;
    d[0] = d[1] = d[2] = d[3] = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step, k += 32, q += 32) {
      const uint32_t a[4] = {load_word(k), load_word(k + 8 * room.pitch), load_word(k + 16),
                             load_word(k + 8 * room.pitch + 16)};
      multiply_tiles<E>(d, a, load_word(q), load_word(q + 16));
    }
  }
};

// The softmax of one column: the largest score in base 2, and the sum relative to it.
struct ColumnState {
  float m = kNoScore, l = 0;

  __device__ void take(float score) {
    const float larger = fmaxf(m, score);
    l = l * exp2f(m - larger) + exp2f(score - larger);
    m = larger;
  }
  __device__ void merge(float other_m, float other_l) {
    const float larger = fmaxf(m, other_m);
    l = l * exp2f(m - larger) + other_l * exp2f(other_m - larger);
    m = larger;
  }
};

// Block (columns and splits, lane, sequence).
// P: ObserveParams, ObserveFloat8 or ObserveWide.
template <class E, class P>
__global__ void __launch_bounds__(kObserveThreads) observe_states(const __grid_constant__ P p) {
  const ObservedRows o(p, blockIdx.y, blockIdx.z);
  const int split = int(blockIdx.x) % o.splits;
  const int column = int(blockIdx.x) / o.splits * kObserveColumns;
  if (column >= o.columns) return;
  const int count = min(o.columns - column, kObserveColumns);
  const ObserveRoom room(dynamic_shared(), p.pitch);
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const int last = o.sees(column + count - 1);
  load_queries(o, column, room);
  ColumnState own[kColumnTiles][2];
#pragma unroll 1
  for (int part = 0; part < p.parts; ++part) {
    if (!o.head.lane[part].groups) continue;
    const bool fresh = p.part[part].fresh;
    const int length = o.length(part), end = length + (fresh ? last : 0);
#pragma unroll 1
    for (int token = split * kObserveTokens; token < end; token += o.splits * kObserveTokens) {
      __syncthreads();
      load_keys<E, P::kFloat8>(o, part, token, end, room);
      __syncthreads();
      const KeyTile<P::kWide> keys(room, o.head.rank);
      const int place = token + 16 * warp + lane / 4;
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        if (8 * n >= count) break;
        float d[4];
        keys.template multiply<E>(d, room, n);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int own_column = 8 * n + lane % 4 * 2 + i % 2;
          const int limit =
              length + (fresh ? shared_at<const int>(room.limits + own_column * 4) : 0);
          if (place + i / 2 * 8 < limit) own[n][i % 2].take(d[i] * p.scale_log2);
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ColumnState& state = own[n][i];
      for (int mask = 4; mask < 32; mask *= 2) {
        const float m = from_lane_xor(state.m, mask), l = from_lane_xor(state.l, mask);
        state.merge(m, l);
      }
      const int own_column = 8 * n + lane % 4 * 2 + i;
      if (lane < 4)
        shared_at<float2>(room.merge + (warp * kObserveColumns + own_column) * 8) = {state.m,
                                                                                     state.l};
    }
  }
  __syncthreads();
  const int at = threadIdx.x;
  if (at >= kObserveColumns || column + at >= o.columns) return;
  ColumnState whole;
  for (int i = 0; i < kObserveWarps; ++i) {
    const float2 other = shared_at<const float2>(room.merge + (i * kObserveColumns + at) * 8);
    whole.merge(other.x, other.y);
  }
  *o.state(column + at, split) = {whole.m, whole.l};
}

// The largest score of a column, and 1 over its sum.
__device__ inline float2 merged_state(const ObservedRows& o, int column) {
  ColumnState whole;
#pragma unroll 1
  for (int split = 0; split < o.splits; ++split) {
    const float2 other = *o.state(column, split);
    whole.merge(other.x, other.y);
  }
  return {whole.m, 1 / whole.l};
}

// What all columns give this thread's two tokens, summed over a part of the columns.
template <class E, bool kFloat8, bool kWide>
__device__ void add_columns(float (&sums)[2], const ObservedRows& o, int part, int token, int end,
                            const ObserveRoom& room) {
  const ObserveParams& p = o.p;
  const bool fresh = p.part[part].fresh;
  const int lane = int(threadIdx.x) % 32, length = o.length(part);
  const int place = token + int(threadIdx.x) / 32 * 16 + lane / 4;
  __syncthreads();
  load_keys<E, kFloat8>(o, part, token, end, room);
  __syncthreads();
  const KeyTile<kWide> keys(room, o.head.rank);
#pragma unroll 1
  for (int column = 0; column < o.columns; column += kObserveColumns) {
    const int count = min(o.columns - column, kObserveColumns);
    if (fresh && token >= length + o.sees(column + count - 1)) continue;
    __syncthreads();
    load_queries(o, column, room);
    const int own = threadIdx.x;
    if (own < kObserveColumns) {
      // A column that is not there gives nothing.
      const float2 state = own < count ? merged_state(o, column + own) : float2{0, 0};
      shared_at<float2>(room.states + own * 8) = state;
    }
    __syncthreads();
#pragma unroll 1
    for (int n = 0; 8 * n < count; ++n) {
      float d[4];
      keys.template multiply<E>(d, room, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int own_column = 8 * n + lane % 4 * 2 + i % 2;
        const int limit = length + (fresh ? shared_at<const int>(room.limits + own_column * 4) : 0);
        const float2 state = shared_at<const float2>(room.states + own_column * 8);
        if (place + i / 2 * 8 < limit)
          sums[i / 2] += exp2f(d[i] * p.scale_log2 - state.x) * state.y;
      }
    }
  }
}

// Block (tiles of 64 tokens, lane, sequence). Tokens before the step's own change only where a row is
// observed.
template <class E, class P>
__global__ void __launch_bounds__(kObserveThreads) observe_tokens(const __grid_constant__ P p) {
  const ObservedRows o(p, blockIdx.y, blockIdx.z);
  const int fresh_tokens = p.cu_seqlens_q[o.sequence + 1] - o.start;
  if (!fresh_tokens) return;
  const ObserveRoom room(dynamic_shared(), p.pitch);
  const int lane = int(threadIdx.x) % 32;
#pragma unroll 1
  for (int part = 0; part < p.parts; ++part) {
    const ObserveLane& of = o.head.lane[part];
    if (!of.groups || of.scores < 0) continue;
    const int length = o.length(part), end = length + (p.part[part].fresh ? fresh_tokens : 0);
    const int first = o.columns ? 0 : length / kObserveTokens;
#pragma unroll 1
    for (int tile = first + int(blockIdx.x); tile * kObserveTokens < end; tile += int(gridDim.x)) {
      const int token = tile * kObserveTokens;
      float sums[2] = {0, 0};
      if (o.columns) add_columns<E, P::kFloat8, P::kWide>(sums, o, part, token, end, room);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        for (int mask = 1; mask < 4; mask *= 2) sums[i] += from_lane_xor(sums[i], mask);
        const int place = token + int(threadIdx.x) / 32 * 16 + lane / 4 + 8 * i;
        if (lane % 4 || place >= end || (place < length && !o.columns)) continue;
        const int within = place % p.page_tokens;
        char* page = p.pool + o.pages(part)[place / p.page_tokens] * p.part[part].page_stride;
        float* score = reinterpret_cast<float*>(page + of.scores) + within;
        *score = place < length ? *score + sums[i] : sums[i];
        if (place >= length && of.positions >= 0)
          reinterpret_cast<int32_t*>(page + of.positions)[within] =
              p.positions[o.start + place - length];
      }
    }
  }
}

}  // namespace kvlathe::cuda
