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
constexpr int kPromptStages = 8;  // in use at most
constexpr int kFetchRegisters = 32, kAttendRegisters = 160;
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
__device__ inline bool passed(uint64_t& barrier, int parity) {
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(shared_address(&barrier)), "r"(parity)
               : "memory");
  return done;
}
__device__ inline void wait(uint64_t& barrier, int parity) { wait_barrier(shared_address(&barrier), parity); }

// The same in all lanes of a warp, and known to the compiler to be: products must not stand in divergent code, and their
// descriptions are computed once for the warp.
__device__ inline int uniform(int x) { return int(__reduce_or_sync(~0u, unsigned(x))); }

// A place among the stages' barriers, and how often they have gone round.
struct Turn {
  int at = 0, parity = 0;
  __device__ void next() {
    if (++at == kPromptStages) at = 0, parity ^= 1;
  }
};

// Stages are as large as their lane needs and lie behind each other in shared memory; both sides work out where, in units
// of kStageUnit bytes.
__device__ inline int stage_units(const PromptHead& head) {
  return (head.steps_k + head.steps_v) * (prompt_keys(head.steps_v) / 64);
}
__device__ inline int place_stage(int after, int units, int room) { return after + units <= room ? after : 0; }

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

// K and V of the lane's count of tokens from `first` on. Tokens past `keys` become zeros: what lies there may be NaN.
__device__ inline void fetch_keys(const PromptParams& p, const PromptHead& head, int part, const int32_t* pages, int first,
                                  int keys, uint32_t to) {
  const Copier copier;
  const int count = prompt_keys(head.steps_v), values = count * 32 * head.steps_k;
  for (int i = 0; i < count / 64; ++i) {
    const int rows = threadIdx.x / 32 * 16 + 64 * i, token = first + rows, page = token / p.page_tokens;
    const int64_t id = token < keys ? __ldg(pages + page) : 0;
    const char* from = p.pool + id * p.part[part].page_stride;
    const int row = token - page * p.page_tokens + copier.row;
    const bool valid = token + copier.row < keys;
    copier.copy(to, rows, count * 16, from + head.k[part] + row * head.steps_k * 32, head.steps_k, valid);
    copier.copy(to + values, rows, count * 16, from + head.v[part] + row * head.steps_v * 32, head.steps_v, valid);
  }
}

// What has been asked for, and the barrier that is to hear of it: copies are announced when the next ones are on their way,
// or when there is nothing else to do.
struct Announcer {
  uint64_t* waiting = nullptr;

  template <int kLeft>
  __device__ void announce() {
    if (!waiting) return;
    wait_copy_groups<kLeft>();
    fence_for_bulk_copies();  // what the copies wrote is there for the products, too
    arrive(*waiting);
    waiting = nullptr;
  }
  __device__ void add(uint64_t& barrier) {
    close_copy_group();
    announce<1>();
    waiting = &barrier;
  }
  __device__ void wait_for(uint64_t& barrier, int parity) {
    if (passed(barrier, parity)) return;
    announce<0>();
    wait(barrier, parity);
  }
};

// The stages in use, oldest first: room for another is made by waiting for the oldest ones.
struct Room {
  Turn stage, oldest;
  int used = 0, after = 0;  // stages in use; where the next may begin
  uint64_t begins = 0;      // of stage i: byte i

  // Where `units` more go; afterwards they are in use, as stage.at.
  __device__ int take(PromptShared& s, Announcer& announcer, int units, int room) {
    const int begin = place_stage(after, units, room);
    while (used && !free(begin, units)) {
      announcer.wait_for(s.empty[oldest.at], oldest.parity);
      oldest.next(), --used;
    }
    begins = (begins & ~(uint64_t{255} << 8 * stage.at)) | uint64_t(begin) << 8 * stage.at;
    after = begin + units, ++used;
    return begin;
  }

 private:
  __device__ bool free(int begin, int units) const {
    const int first = int(begins >> 8 * oldest.at & 255);
    if (used == kPromptStages) return false;
    // In use are [first, after), or, where that has gone round, all but [after, first).
    return first < after ? begin == after || units <= first : begin == after && begin + units <= first;
  }
};

__device__ inline void fetch(const PromptParams& p, PromptShared& s, uint32_t shared) {
  Room room;
  Announcer announcer;
  int taken = threadIdx.x == 0 ? atomicAdd(p.list + kTaken, 1) : 0;
  for (int n = 0;; ++n) {
    const int slot = n & 1;
    if (threadIdx.x == 0) s.taken[slot] = taken;
    asm volatile("bar.sync 1, 128;" ::: "memory");
    const PromptTile tile = tile_of(p, s.taken[slot]);
    if (threadIdx.x == 0 && tile.head >= 0) taken = atomicAdd(p.list + kTaken, 1);
    announcer.wait_for(s.queries_done[slot], (n >> 1 & 1) ^ 1);
    if (threadIdx.x == 0) {
      s.tile[slot] = tile;
      for (int i = 0; i < p.parts; ++i) s.before[slot][i] = p.part[i].lengths[tile.sequence * p.part[i].lengths_stride];
    }
    if (tile.head >= 0) fetch_queries(p, tile, shared + slot * p.query_bytes);
    announcer.add(s.queries_there[slot]);
    if (tile.head < 0) break;
    const PromptHead& head = p.head[tile.head];
    for (int part = 0; part < p.parts; ++part) {
      const int keys = keys_of(p, tile, part, p.part[part].lengths[tile.sequence * p.part[part].lengths_stride]);
      const int32_t* pages = p.part[part].page_table + int64_t{tile.sequence} * p.part[part].table_stride;
      for (int first = 0; first < keys; first += prompt_keys(head.steps_v)) {
        const int begin = room.take(s, announcer, stage_units(head), p.stage_units);
        fetch_keys(p, head, part, pages, first, keys, shared + 2 * p.query_bytes + begin * kStageUnit);
        announcer.add(s.full[room.stage.at]);
        room.stage.next();
      }
    }
  }
  announcer.announce<0>();
  // The last block makes the list as it was, for the next layer.
  if (threadIdx.x == 0 && atomicAdd(p.list + kDone, 1) == int(gridDim.x) - 1) p.list[kTaken] = p.list[kDone] = 0;
}

// -- attending -----------------------------------------------------------------------------------------------------

// The rows of one thread: r and r + 8 of its warp's 16, and of each 8 columns the two from lane % 4 * 2 on.
template <class E, int kV>
struct PromptRows {
  // Scores of as many tokens at once as leave registers for the rest.
  static constexpr int kKeys = prompt_keys(kV), kScores = kKeys / 2, kSteps = kKeys / 16;
  // Whether there are registers for scores, weights and the output at once.
  static constexpr bool kBoth = kV <= 4 || kKeys == 64;
  float out[8 * kV];
  float top[2], sum[2];  // maximum that `out` is relative to, not scaled; this thread's share of the sum

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < 8 * kV; ++i) out[i] = 0.f;
    top[0] = top[1] = -INFINITY, sum[0] = sum[1] = 0.f;
  }

  // Asks for scores = queries x keys.
  __device__ void score(float (&scores)[kScores], uint64_t queries, uint64_t keys, int steps) {
    multiply_tiles<E, kKeys>(scores, queries, keys, 0);
#pragma unroll 1
    for (int i = 1; i < steps; ++i)
      multiply_tiles<E, kKeys>(scores, queries + i * (kPromptRows * 2), keys + i * (kKeys * 2), i);
    close_products();
  }

  // Asks for out += weights x values.
  __device__ void add(uint32_t (&weights)[4 * kSteps], uint64_t values) {
    pin(weights);
    pin(out);
    begin_products();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) multiply_rows<E, kV>(out, weights + 4 * i, values + i * 16);
    close_products();
  }

  // Makes `out` relative to the largest scores yet.
  __device__ void follow(const float (&s)[kScores], float scale) {
    float now[2] = {top[0], top[1]}, factor[2];
#pragma unroll
    for (int i = 0; i < kScores; ++i) now[i / 2 % 2] = fmaxf(now[i / 2 % 2], s[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      now[r] = fmaxf(now[r], __shfl_xor_sync(~0u, now[r], 1));
      now[r] = fmaxf(now[r], __shfl_xor_sync(~0u, now[r], 2));
      factor[r] = exp2_fast((top[r] - now[r]) * scale);
      top[r] = now[r], sum[r] *= factor[r];
    }
#pragma unroll
    for (int i = 0; i < 8 * kV; ++i) out[i] *= factor[i / 2 % 2];
  }

  // Scores to weights, in the order that the next product takes them from registers; adds them up.
  __device__ void weigh(const float (&s)[kScores], float scale, uint32_t (&weights)[4 * kSteps], float (&added)[2]) const {
    const float shift[2] = {top[0] * scale, top[1] * scale};
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const int r = i / 2 % 2;
      const float a = exp2_fast(fmaf(s[i], scale, -shift[r])), b = exp2_fast(fmaf(s[i + 1], scale, -shift[r]));
      sums[2 * r] += a, sums[2 * r + 1] += b;
      weights[i / 2] = E::pack(a, b);
    }
    added[0] = sums[0] + sums[1], added[1] = sums[2] + sums[3];
  }

  // Weights relative to the maximum of the steps before: as exact as below 1 while they add up to no more than 2^8. Where
  // they do, as at first and where scores jump, the maximum is followed and they are computed again. That saves looking for
  // the maximum of each step.
  __device__ void soften(const float (&s)[kScores], float scale, uint32_t (&weights)[4 * kSteps]) {
    float added[2];
    weigh(s, scale, weights, added);
    if (__any_sync(~0u, !(added[0] <= 256.f && added[1] <= 256.f))) {
      follow(s, scale);
      weigh(s, scale, weights, added);
    }
    sum[0] += added[0], sum[1] += added[1];
  }

  // The same where scores cannot be kept beside weights.
  __device__ void soften_eagerly(const float (&s)[kScores], float scale, uint32_t (&weights)[4 * kSteps]) {
    float some[4] = {s[0], s[1], s[2], s[3]}, added[2];
#pragma unroll
    for (int i = 4; i < kScores; ++i) some[i % 4] = fmaxf(some[i % 4], s[i]);
    const float over0 = (fmaxf(some[0], some[1]) - top[0]) * scale, over1 = (fmaxf(some[2], some[3]) - top[1]) * scale;
    if (__any_sync(~0u, !(over0 <= 8.f && over1 <= 8.f))) follow(s, scale);
    weigh(s, scale, weights, added);
    sum[0] += added[0], sum[1] += added[1];
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

// One warpgroup's rows of a tile. `stage` and `after` (the last stage's end) go on from tile to tile.
template <class E, int kV>
__device__ __forceinline__ void attend_tile(const PromptParams& p, PromptShared& s, uint32_t shared, int slot, Turn& stage,
                                            int& after) {
  PromptTile tile = s.tile[slot];
  tile.head = uniform(tile.head), tile.first = uniform(tile.first), tile.rows = uniform(tile.rows);
  const PromptHead& head = p.head[tile.head];
  const int group = uniform(threadIdx.x / 128) - 1, begin = tile.first + 64 * group, last = tile.rows - 1;
  const int row = begin + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const int own[2] = {min(row, last) / p.group_size + 1, min(row + 8, last) / p.group_size + 1};
  // Tokens of the chunk that the first and the last of the warpgroup's rows see.
  const int least = uniform(min(begin, last) / p.group_size) + 1, most = uniform(min(begin + 63, last) / p.group_size) + 1;
  const uint64_t queries = describe(shared + slot * p.query_bytes + group * 1024, kPromptRows * 16, kCore);
  const auto give_back = [&](int which) {
    if (threadIdx.x % 32 == 0) arrive(s.empty[which]);
  };
  using Rows = PromptRows<E, kV>;
  Rows rows;
  rows.clear();
  const int units = stage_units(head);
  int held = -1;  // a stage whose weights are still to be multiplied with its values
  uint64_t values = 0;
  uint32_t weights[4 * Rows::kSteps] = {};
#pragma unroll 1
  for (int part = 0; part < p.parts; ++part) {
    const int before = uniform(s.before[slot][part]), fresh = p.part[part].fresh, keys = keys_of(p, tile, part, before);
    const int limit[2] = {before + fresh * own[0], before + fresh * own[1]};
    const int all = before + fresh * least, some = begin <= last ? before + fresh * most : 0;
#pragma unroll 1
    for (int first = 0; first < keys; first += Rows::kKeys) {
      const int place = place_stage(after, units, p.stage_units);
      after = place + units;
      wait(s.full[stage.at], stage.parity);
      if (first < some) {
        const uint32_t k = shared + 2 * p.query_bytes + place * kStageUnit;
        const uint64_t keys_at = describe(k, Rows::kKeys * 16, kCore);
        const uint64_t here = describe(k + head.steps_k * (Rows::kKeys * 32), kCore, Rows::kKeys * 16);
        float scores[Rows::kScores];
        // The products of the step before come with this step's scores; before the first they are with zeros.
        if (Rows::kBoth) rows.add(weights, held < 0 ? here : values);
        else begin_products();
        rows.score(scores, queries, keys_at, head.steps_k);
        wait_products<0>();
        pin(scores);
        pin(rows.out);
        if (Rows::kBoth && held >= 0) give_back(held);
        held = stage.at, values = here;
        if (first + Rows::kKeys > all) hide(scores, first, limit);
        if (Rows::kBoth) {
          rows.soften(scores, p.scale_log2, weights);
        } else {
          rows.soften_eagerly(scores, p.scale_log2, weights);
          rows.add(weights, here);
          wait_products<0>();
          pin(rows.out);
          give_back(stage.at);
        }
      } else {
        give_back(stage.at);
      }
      stage.next();
    }
  }
  if (Rows::kBoth && held >= 0) {
    rows.add(weights, values);
    wait_products<0>();
    pin(rows.out);
    give_back(held);
  }
  write_rows<E, kV>(p, tile, head, rows, row);
  if (threadIdx.x % 32 == 0) arrive(s.queries_done[slot]);
}

template <class E>
__device__ __forceinline__ void attend(const PromptParams& p, PromptShared& s, uint32_t shared) {
  Turn stage;
  int after = 0;  // the last stage's end
  for (int n = 0;; ++n) {
    const int slot = n & 1;
    wait(s.queries_there[slot], n >> 1 & 1);
    const int head = uniform(s.tile[slot].head);
    if (head < 0) return;
    switch (p.head[head].steps_v) {
      case 1: attend_tile<E, 1>(p, s, shared, slot, stage, after); break;
      case 2: attend_tile<E, 2>(p, s, shared, slot, stage, after); break;
      case 3: attend_tile<E, 3>(p, s, shared, slot, stage, after); break;
      case 4: attend_tile<E, 4>(p, s, shared, slot, stage, after); break;
      case 5: attend_tile<E, 5>(p, s, shared, slot, stage, after); break;
      case 6: attend_tile<E, 6>(p, s, shared, slot, stage, after); break;
      case 7: attend_tile<E, 7>(p, s, shared, slot, stage, after); break;
      default: attend_tile<E, 8>(p, s, shared, slot, stage, after);
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
    for (int i = 0; i < 2; ++i) init_barrier(s.queries_there[i], 128), init_barrier(s.queries_done[i], 4 * kPromptGroups);
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
