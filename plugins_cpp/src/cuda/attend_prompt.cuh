// Attention of prompt chunks over the paged 16-bit cache, for Hopper: a persistent grid over a list of tiles.
//
// A tile is kPromptRows rows of one lane: its query heads of a token side by side, token after token, so that all heads of
// a group share K and V. A block takes tile after tile from the list, the longest first. One warpgroup fetches: page by
// page, 16 bytes a copy, straight into the core matrices that the products want; it runs ahead through a ring of stages,
// into the next tile too. The others attend 64 rows each: S = Q K^T, softmax in registers, O += P V with P in registers.
// They meet nowhere, so one's exponentials run beside another's products. Results do not depend on the order of the list.
#pragma once

#include "prompts.h"
#include "wgmma.cuh"

namespace kvlathe::cuda {

constexpr int kPromptThreads = 128 * (kPromptGroups + 1);
constexpr int kPromptStages = 8;  // at most
constexpr int kFetchRegisters = kPromptGroups == 3 ? 32 : 24, kAttendRegisters = kPromptGroups == 3 ? 160 : 240;
#ifndef KVLATHE_PROMPT_PIECES
#define KVLATHE_PROMPT_PIECES 2
#endif
#ifndef KVLATHE_PROMPT_WIDE
#define KVLATHE_PROMPT_WIDE 6
#endif
static_assert(kFetchRegisters + kPromptGroups * kAttendRegisters <= 512);

// A tile being attended: what the fetching warpgroup knows of it. head < 0: there are no more.
struct PromptTile {
  int head, sequence;
  int token;        // the chunk's first, among the step's
  int first, rows;  // row of the tile in its chunk, rows of the chunk
};

struct PromptShared {
  uint64_t full[kPromptStages], empty[kPromptStages], queries_there[2], queries_done[2];
  PromptTile tile[2];
  int before[2][KVLATHE_MAX_PARTS];  // tokens that the tile's sequence had before the step, in each part
  int taken[2];
};

#ifdef KVLATHE_WGMMA

__device__ inline void init_barrier(uint64_t& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}
__device__ inline void arrive(uint64_t& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
// Arrives when the copies that this thread has asked for so far have landed.
__device__ inline void arrive_after_copies(uint64_t& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
__device__ inline void wait(uint64_t& barrier, int parity) { wait_barrier(shared_address(&barrier), parity); }

// The same in all lanes of a warp, and known to the compiler to be: products must not stand in divergent code.
__device__ inline int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// A place in a ring of `count`, and how often it has gone round.
struct Turn {
  int at = 0, parity = 0;
  __device__ void next(int count) {
    if (++at == count) at = 0, parity ^= 1;
  }
};

// Tokens of a part that the tile's last row sees, of `before` that were there before the step.
__device__ inline int keys_of(const PromptParams& p, const PromptTile& tile, int part, int before) {
  if (!(p.head[tile.head].parts >> part & 1)) return 0;
  const int last = min(tile.first + kPromptRows, tile.rows) - 1;
  return before + (p.part[part].fresh ? last / p.group_size + 1 : 0);
}

// -- fetching ------------------------------------------------------------------------------------------------------

// Where a thread's copies go: lane l of a warp takes half l / 8 % 2 of 32 bytes of row l % 8 + l / 16 * 8 among 16.
struct Copier {
  int row, half;
  __device__ Copier() : row(threadIdx.x % 8 + threadIdx.x % 32 / 16 * 8), half(threadIdx.x / 8 % 2) {}

  // 16 rows of `steps` x 32 bytes into core matrices; `from` is this thread's row. Columns of cores are `column` bytes apart.
  __device__ void copy(uint32_t to, int first, int column, const char* from, int steps, bool valid) const {
    to += (first + row) * 16 + half * column, from += half * 16;
    for (int i = 0; i < steps; ++i) copy16(to + 2 * i * column, from + 32 * i, valid);
  }
};

__device__ inline PromptTile tile_of(const PromptParams& p, int taken) {
  PromptTile tile{};
  const int index = taken / p.heads;
  tile.head = index < p.list[kTiles] ? taken % p.heads : -1;
  if (tile.head < 0) return tile;
  tile.sequence = p.list[kListHeader + 2 * index];
  tile.first = p.list[kListHeader + 2 * index + 1];
  tile.token = p.query_starts[tile.sequence];
  tile.rows = (p.query_starts[tile.sequence + 1] - tile.token) * p.group_size;
  return tile;
}

__device__ inline void fetch_queries(const PromptParams& p, const PromptTile& tile, uint32_t to) {
  const Copier copier;
  const PromptHead& head = p.head[tile.head];
  const int rank = head.steps_k * 16;
  for (int first = threadIdx.x / 32 * 16; first < kPromptRows; first += 64) {
    const int row = tile.first + first + copier.row, in = min(row, tile.rows - 1), token = in / p.group_size;
    const uint16_t* from = p.q + (tile.token + token) * p.q_stride + head.q_offset + (in - token * p.group_size) * rank;
    copier.copy(to, first, kPromptRows * 16, reinterpret_cast<const char*>(from), head.steps_k, row < tile.rows);
  }
}

// K and V of kPromptKeys tokens from `first` on. Tokens past `keys` become zeros: what lies there may be NaN.
__device__ inline void fetch_keys(const PromptParams& p, const PromptHead& head, int part, const int32_t* pages, int first,
                                  int keys, uint32_t to) {
  const Copier copier;
#pragma unroll
  for (int i = 0; i < kPromptKeys / 64; ++i) {
    const int rows = threadIdx.x / 32 * 16 + 64 * i, token = first + rows, page = token / p.page_tokens;
    const int64_t id = token < keys ? __ldg(pages + page) : 0;
    const char* from = p.pool + id * p.part[part].page_stride;
    const int row = token - page * p.page_tokens + copier.row;
    const bool valid = token + copier.row < keys;
    copier.copy(to, rows, kPromptKeys * 16, from + head.k[part] + row * head.steps_k * 32, head.steps_k, valid);
    copier.copy(to + p.value_at, rows, kPromptKeys * 16, from + head.v[part] + row * head.steps_v * 32, head.steps_v, valid);
  }
}

__device__ inline void fetch(const PromptParams& p, PromptShared& s, uint32_t shared) {
  Turn stage;
  int taken = threadIdx.x == 0 ? atomicAdd(p.list + kTaken, 1) : 0;
  for (int n = 0;; ++n) {
    const int slot = n & 1;
    if (threadIdx.x == 0) s.taken[slot] = taken;
    asm volatile("bar.sync 1, 128;" ::: "memory");
    const PromptTile tile = tile_of(p, s.taken[slot]);
    if (threadIdx.x == 0 && tile.head >= 0) taken = atomicAdd(p.list + kTaken, 1);
    wait(s.queries_done[slot], (n >> 1 & 1) ^ 1);
    if (threadIdx.x == 0) {
      s.tile[slot] = tile;
      for (int i = 0; i < p.parts; ++i) s.before[slot][i] = p.part[i].lengths[tile.sequence * p.part[i].lengths_stride];
    }
    if (tile.head >= 0) fetch_queries(p, tile, shared + slot * p.query_bytes);
    arrive_after_copies(s.queries_there[slot]);
    if (threadIdx.x == 0) arrive(s.queries_there[slot]);  // releases the tile
    if (tile.head < 0) break;
    const PromptHead& head = p.head[tile.head];
    for (int part = 0; part < p.parts; ++part) {
      const int keys = keys_of(p, tile, part, p.part[part].lengths[tile.sequence * p.part[part].lengths_stride]);
      const int32_t* pages = p.part[part].page_table + int64_t{tile.sequence} * p.part[part].table_stride;
      for (int first = 0; first < keys; first += kPromptKeys) {
        wait(s.empty[stage.at], stage.parity ^ 1);
        fetch_keys(p, head, part, pages, first, keys, shared + 2 * p.query_bytes + stage.at * p.stage_bytes);
        arrive_after_copies(s.full[stage.at]);
        stage.next(p.stages);
      }
    }
  }
  // The last block makes the list as it was, for the next layer.
  if (threadIdx.x == 0 && atomicAdd(p.list + kDone, 1) == int(gridDim.x) - 1) p.list[kTaken] = p.list[kDone] = 0;
}

// -- attending -----------------------------------------------------------------------------------------------------

// The rows of one thread: r and r + 8 of its warp's 16, and of each 8 columns the two from lane % 4 * 2 on.
template <class E, int kV>
struct PromptRows {
  // Scores of as many tokens at once as leave registers for the rest.
  static constexpr int kKeys = kV <= KVLATHE_PROMPT_WIDE ? 128 : 64, kScores = kKeys / 2;
  float out[8 * kV];
  float top[2], sum[2];  // maximum that `out` is relative to, not scaled; this thread's share of the sum

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < 8 * kV; ++i) out[i] = 0.f;
    top[0] = top[1] = -INFINITY, sum[0] = sum[1] = 0.f;
  }

  // Follows the maximum; only where it has grown by more than 2^8, since weights up to that are as exact as below 1.
  __device__ void follow(const float (&s)[kScores], float scale) {
    float now[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kScores; ++i) now[i / 2 % 2] = fmaxf(now[i / 2 % 2], s[i]);
    bool grown = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      now[r] = fmaxf(now[r], __shfl_xor_sync(~0u, now[r], 1));
      now[r] = fmaxf(now[r], __shfl_xor_sync(~0u, now[r], 2));
      grown |= (now[r] - top[r]) * scale > 8.f;
    }
    if (!__any_sync(~0u, grown)) return;
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      now[r] = fmaxf(now[r], top[r]);
      factor[r] = exp2_fast((top[r] - now[r]) * scale);
      top[r] = now[r], sum[r] *= factor[r];
    }
#pragma unroll
    for (int i = 0; i < 8 * kV; ++i) out[i] *= factor[i / 2 % 2];
  }

  // Scores to weights, in the order that the next product takes them from registers.
  template <int kCount>
  __device__ void weigh(const float* s, float scale, uint32_t (&weights)[kCount]) {
    const float shift[2] = {top[0] * scale, top[1] * scale};
#pragma unroll
    for (int i = 0; i < 2 * kCount; i += 2) {
      const int r = i / 2 % 2;
      const float a = exp2_fast(fmaf(s[i], scale, -shift[r])), b = exp2_fast(fmaf(s[i + 1], scale, -shift[r]));
      sum[r] += a + b;
      weights[i / 2] = E::pack(a, b);
    }
  }
};

// Scores of tokens from limit[r] on do not count.
template <int kScores>
__device__ void hide(float (&s)[kScores], int first, const int (&limit)[2]) {
  const int column = first + threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    if (column + i / 4 * 8 + i % 2 >= limit[i / 2 % 2]) s[i] = -INFINITY;
  }
}

template <class E, int kV>
__device__ void write_rows(const PromptParams& p, const PromptTile& tile, const PromptHead& head,
                           const PromptRows<E, kV>& rows, int row) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = rows.sum[r] + __shfl_xor_sync(~0u, rows.sum[r], 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const float inverse = 1.f / sum;
    const int in = row + 8 * r, token = in / p.group_size;
    if (in >= tile.rows) continue;
    uint16_t* to = p.o + (tile.token + token) * p.o_stride + head.o_offset + (in - token * p.group_size) * 16 * kV;
#pragma unroll
    for (int i = 0; i < 2 * kV; ++i) {
      const uint32_t pair = E::pack(rows.out[4 * i + 2 * r] * inverse, rows.out[4 * i + 2 * r + 1] * inverse);
      *reinterpret_cast<uint32_t*>(to + 8 * i + threadIdx.x % 4 * 2) = pair;
    }
  }
}

// Attends kKeys tokens in shared memory, K at `k` and V at `v`, the first being number `first` of its part. Row r sees those
// below limit[r], which is nothing to ask where `all` rows of the warpgroup see all.
template <class E, int kV>
__device__ void attend_keys(PromptRows<E, kV>& rows, float scale, uint64_t queries, int steps, uint32_t k, uint32_t v, int first,
                            const int (&limit)[2], bool all) {
  using Rows = PromptRows<E, kV>;
  float scores[Rows::kScores];
  const uint64_t keys_at = describe(k, kPromptKeys * 16, kCore), values_at = describe(v, kCore, kPromptKeys * 16);
  begin_products();
  multiply_tiles<E, Rows::kKeys>(scores, queries, keys_at, 0);
#pragma unroll 1
  for (int i = 1; i < steps; ++i)
    multiply_tiles<E, Rows::kKeys>(scores, queries + i * (kPromptRows * 2), keys_at + i * (kPromptKeys * 2), i);
  close_products();
  wait_products();
  pin(scores);
  if (!all) hide(scores, first, limit);
  rows.follow(scores, scale);
  pin(rows.out);
  // In pieces: one is multiplied while the next is weighed.
  constexpr int kPieces = KVLATHE_PROMPT_PIECES, kSteps = Rows::kKeys / 16 / kPieces;
  uint32_t weights[kPieces][4 * kSteps];
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    rows.weigh(scores + piece * 8 * kSteps, scale, weights[piece]);
    pin(weights[piece]);
    begin_products();
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      multiply_rows<E, kV>(rows.out, weights[piece] + 4 * i, values_at + (piece * kSteps + i) * 16);
    close_products();
  }
  wait_products();
  pin(rows.out);
}

// One warpgroup's rows of a tile.
template <class E, int kV>
__device__ void attend_tile(const PromptParams& p, PromptShared& s, uint32_t shared, int slot, Turn& stage) {
  PromptTile tile = s.tile[slot];
  tile.head = uniform(tile.head), tile.first = uniform(tile.first), tile.rows = uniform(tile.rows);
  const PromptHead& head = p.head[tile.head];
  const int group = uniform(threadIdx.x / 128) - 1, begin = tile.first + 64 * group, last = tile.rows - 1;
  const int row = begin + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const bool any = begin <= last;
  const int own[2] = {min(row, last) / p.group_size + 1, min(row + 8, last) / p.group_size + 1};
  const int least = min(begin, last) / p.group_size + 1, most = min(begin + 63, last) / p.group_size + 1;
  const bool speaker = threadIdx.x % 32 == 0;
  const uint64_t queries = describe(shared + slot * p.query_bytes + group * 1024, kPromptRows * 16, kCore);
  PromptRows<E, kV> rows;
  rows.clear();
#pragma unroll 1
  for (int part = 0; part < p.parts; ++part) {
    const int before = uniform(s.before[slot][part]), fresh = p.part[part].fresh, keys = keys_of(p, tile, part, before);
    const int limit[2] = {before + fresh * own[0], before + fresh * own[1]}, end = before + fresh * most;
#pragma unroll 1
    for (int first = 0; first < keys; first += kPromptKeys) {
      wait(s.full[stage.at], stage.parity);
      fence_for_bulk_copies();  // what the copies wrote is there for the products, too
      uint32_t k = shared + 2 * p.query_bytes + stage.at * p.stage_bytes;
#pragma unroll 1
      for (int at = first; at < first + kPromptKeys; at += rows.kKeys, k += rows.kKeys * 16) {
        if (!any || at >= end) break;
        attend_keys<E, kV>(rows, p.scale_log2, queries, head.steps_k, k, k + p.value_at, at, limit,
                           at + rows.kKeys <= before + fresh * least);
      }
      if (speaker) arrive(s.empty[stage.at]);
      stage.next(p.stages);
    }
  }
  write_rows<E, kV>(p, tile, head, rows, row);
  if (speaker) arrive(s.queries_done[slot]);
}

template <class E>
__device__ void attend(const PromptParams& p, PromptShared& s, uint32_t shared) {
  Turn stage;
  for (int n = 0;; ++n) {
    const int slot = n & 1;
    wait(s.queries_there[slot], n >> 1 & 1);
    const int head = uniform(s.tile[slot].head);
    if (head < 0) return;
    switch (p.head[head].steps_v) {
      case 1: attend_tile<E, 1>(p, s, shared, slot, stage); break;
      case 2: attend_tile<E, 2>(p, s, shared, slot, stage); break;
      case 3: attend_tile<E, 3>(p, s, shared, slot, stage); break;
      case 4: attend_tile<E, 4>(p, s, shared, slot, stage); break;
      case 5: attend_tile<E, 5>(p, s, shared, slot, stage); break;
      case 6: attend_tile<E, 6>(p, s, shared, slot, stage); break;
      case 7: attend_tile<E, 7>(p, s, shared, slot, stage); break;
      default: attend_tile<E, 8>(p, s, shared, slot, stage);
    }
  }
}

#endif

// Where the library is compiled for another device this is empty, which its host sees by its shared memory.
template <class E>
__global__ void __launch_bounds__(kPromptThreads, 1) attend_prompt(const __grid_constant__ PromptParams p) {
#ifdef KVLATHE_WGMMA
  extern __shared__ __align__(128) char dynamic[];  // two tiles of queries, then the stages
  __shared__ PromptShared s;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kPromptStages; ++i) init_barrier(s.full[i], 128), init_barrier(s.empty[i], 4 * kPromptGroups);
    for (int i = 0; i < 2; ++i) init_barrier(s.queries_there[i], 129), init_barrier(s.queries_done[i], 4 * kPromptGroups);
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kFetchRegisters));
    fetch(p, s, shared_address(dynamic));
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kAttendRegisters));
    attend<E>(p, s, shared_address(dynamic));
  }
#endif
}

}  // namespace kvlathe::cuda
