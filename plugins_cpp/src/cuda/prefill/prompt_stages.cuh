// Shared memory of attend_prompt's warpgroups: the tiles being attended, barriers, and stages of
// K | V in shared memory.
#pragma once

#include "common/windows.h"
#include "cuda/prefill/prompt_room.cuh"
#include "cuda/prefill/wgmma.cuh"

namespace kvlathe::cuda {

// How K or V of a stage lies in shared memory: blocks of 16, 32 or 64 ranks, the largest that divide
// the rank. A block is [kStageTokens][its ranks], swizzled as products want it. A row of it is what
// one request to the second cache may bring: had each 16 bytes a place of their own, each would be
// a request.
__host__ __device__ constexpr int block_steps(int steps) {
  return steps % 4 == 0 ? 4 : steps % 2 == 0 ? 2 : 1;
}
// Where 16 bytes lie: piece `piece` (8 ranks) of token `row`, with blocks of `width` x 16 ranks.
__host__ __device__ constexpr int piece_at(int width, int row, int piece) {
  const int pieces = 2 * width, shift = width == 4 ? 0 : width == 2 ? 1 : 2;
  return piece / pieces * (width * kStageUnit) + row * (32 * width) +
         (piece % pieces ^ (row >> shift & pieces - 1)) * 16;
}

// A tile being attended. head < 0: there are no more.
struct PromptTile {
  int head, sequence;
  int token;        // the chunk's first, among the step's
  int first, rows;  // row of the tile in its chunk, rows of the chunk
};

struct PromptShared {
  uint64_t full[2][kPromptStages], empty[2][kPromptStages], queries_there[2], queries_done[2];
  PromptTile tile[2];
  // Tokens that the tile's sequence had in each part of the lane before the step.
  int before[2][KVLATHE_MAX_SLOTS];
  int taken[2];
};

#ifdef KVLATHE_WGMMA

__device__ inline void init_barrier(uint64_t& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(arrivals)
               : "memory");
}
__device__ inline void arrive(uint64_t& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}
template <int kCount>
__device__ inline void arrive(uint64_t& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
               "n"(kCount)
               : "memory");
}
// Arrives when the asynchronous copies that this thread has asked for have landed.
__device__ inline void arrive_after_copies(uint64_t& barrier) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier))
      : "memory");
}
__device__ inline void wait(uint64_t& barrier, int parity) {
  wait_barrier(shared_address(&barrier), parity);
}

// Tells the compiler that x is the same in all lanes of a warp. Products must not stand in
// divergent code, and their descriptors are then computed once for the warp.
__device__ inline int uniform(int x) { return int(__reduce_or_sync(~0u, unsigned(x))); }

// Tokens of a part that the last row of the tile sees, where `before` were there before the step.
template <class P>
__device__ inline int keys_of(const P& p, const PromptTile& tile, int part, int before) {
  if (!(p.head[tile.head].parts >> part & 1)) return 0;
  const int last = min(tile.first + kPromptRows, tile.rows) - 1;
  return before + (p.part_of(tile.head, part).fresh ? last / p.group_size + 1 : 0);
}

__device__ inline int page_of(const PromptParams& p, int token) {
  return int(__umulhi(unsigned(token), p.page_magic));
}

// What the windows of one part hide from a tile. Rows see places of the part in the sink, and from
// first() of their token on. before(i): tokens of part i before the step.
struct TileWindow {
  int sink, recent, exact;
  int offset;  // tokens of the lane in front of the part
  int place;   // of the chunk's first token among all of the lane
  Gap stages;  // that no row sees: both ends are multiples of a stage's tokens

  template <class P, class Before>
  __device__ TileWindow(const P& p, const PromptTile& tile, int part, int stage, Before before) {
    const kvlathe_window& window = p.window_of(tile.head, part);
    const int sealed = window.sealed < 0 ? 0 : before(window.sealed);
    recent = window.recent, exact = window.exact;
    offset = part == window.fresh ? sealed : 0, place = sealed + before(window.fresh);
    sink = max(window.sink - offset, 0);
    stages = hidden_stages(sink, first(p, tile.first / p.group_size), stage);
  }
  // The first place of the part after the sink that token `own` of the chunk sees.
  __device__ int first(const PromptParams& p, int own) const {
    const int at = place + own;
    return first_seen(at, page_of(p, at) * p.page_tokens, recent, exact) - offset;
  }
  // The stage at or after the one at `token` that some row sees.
  __device__ int next(int token) const { return token == stages.begin ? stages.end : token; }
};

// The same of a lane without one.
struct NoWindow {
  template <class Before>
  __device__ NoWindow(const PromptParams&, const PromptTile&, int, int, Before) {}
  __device__ int next(int token) const { return token; }
};

template <bool kWindows>
using WindowOf = std::conditional_t<kWindows, TileWindow, NoWindow>;

#endif

}  // namespace kvlathe::cuda
