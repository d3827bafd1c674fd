// Attention of prompt chunks over the paged cache, for Hopper: a persistent grid over a list of
// tiles.
//
// A tile is kPromptRows rows of one lane: the query heads of a token side by side, token after
// token. All heads of a group then share K and V. A block takes tile after tile from the list, the
// longest first, so that no long one is left for the end.
//
// One warpgroup fetches (prompt_fetch.cuh). It brings K and V page by page into swizzled blocks that
// the products read, and runs ahead through a ring of stages, into the next tile too. Sealed pages
// take the way of prompt_codes.cuh.
//
// The others attend 64 rows each (prompt_rows.cuh): S = QK^T, softmax in registers, O += PV with P
// in registers. P V of a stage runs beside the softmax of the next one. They meet nowhere, so the
// exponentials of one run beside the products of another, too. Results do not depend on the order
// of the list.
#pragma once

#include "cuda/prefill/prompt_general.cuh"
#include "cuda/prefill/prompt_rows.cuh"

namespace kvlathe::cuda {

constexpr int kFetchRegisters = 32, kAttendRegisters = 160;
static_assert(kFetchRegisters + kPromptGroups * kAttendRegisters <= 512);

#ifdef KVLATHE_WGMMA

// One warpgroup's rows of a tile. `stage`, and `after`, the end of the last stage, go on from tile
// to tile.
template <class E, int kV, class P>
__device__ __forceinline__ void attend_tile(const P& p, PromptShared& s, uint32_t shared, int slot,
                                            Turn& stage, int& after) {
  constexpr bool kWindows = P::kGeneral;
  PromptTile tile = s.tile[slot];
  tile.head = uniform(tile.head), tile.first = uniform(tile.first), tile.rows = uniform(tile.rows);
  const PromptHead& head = p.head[tile.head];
  const int group = uniform(threadIdx.x / 128) - 1, begin = tile.first + 64 * group,
            last = tile.rows - 1;
  const int row = begin + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const int own[2] = {min(row, last) / p.group_size + 1, min(row + 8, last) / p.group_size + 1};
  // How many tokens of the chunk the first and the last row of the warpgroup see.
  const int least = uniform(min(begin, last) / p.group_size) + 1,
            most = uniform(min(begin + 63, last) / p.group_size) + 1;
  const uint64_t queries =
      describe(shared + slot * p.query_bytes + group * 1024, kPromptRows * 16, kCore);
  const auto give_back = [&](int half, int which) {
    if (threadIdx.x % 32 == 0) arrive(s.empty[half][which]);
  };
  using Rows = PromptRows<E, kV, kWindows>;
  Rows rows;
  rows.clear();
  const int units = stage_units(head);
  after = first_stage(after, units);
  Turn held{-1};        // a stage whose product P V is not asked for yet
  uint32_t values = 0;  // its V
  uint32_t weights[4 * Rows::kSteps] = {};
  // Zero, which the compiler does not know. Through it P moves to other registers after the wait,
  // and not before: products still read those.
  const uint32_t nothing = pinned(0);
  const auto finish = [&] {
    if (held.at < 0) return;
    wait(s.full[kValueHalf][held.at], held.parity);
    fence_for_bulk_copies();
    rows.add(weights, values);
    wait_products<0>();
    pin(weights);
    pin(rows.o);
    give_back(kValueHalf, held.at);
    held.at = -1;
#pragma unroll
    for (uint32_t& weight : weights) weight = 0;
  };
#pragma unroll 1
  for (int part = 0; part < p.parts; ++part) {
    const int before = uniform(s.before[slot][part]), fresh = p.part_of(tile.head, part).fresh,
              keys = keys_of(p, tile, part, before);
    const int limit[2] = {before + fresh * own[0], before + fresh * own[1]};
    const int all = before + fresh * least, some = begin <= last ? before + fresh * most : 0;
    const WindowOf<kWindows> window(p, tile, part, Rows::kKeys,
                                    [&](int other) { return uniform(s.before[slot][other]); });
    int seen[2] = {0, 0}, most_seen = 0;  // where the window of each row, and of the last, begins
    if constexpr (kWindows) {
      seen[0] = window.first(p, own[0] - 1), seen[1] = window.first(p, own[1] - 1);
      most_seen = uniform(max(window.first(p, most - 1), 0));
    }
#pragma unroll 1
    for (int first = window.next(0); first < keys; first = window.next(first + Rows::kKeys)) {
      const int place = place_stage(after, units, p.stage_units);
      after = place + units;
      wait(s.full[kKeyHalf][stage.at], stage.parity);
      if (first < some) {
        const Turn with = held.at < 0 ? stage : held;
        wait(s.full[kValueHalf][with.at], with.parity);
        fence_for_bulk_copies();  // products see what copies wrote
        const uint32_t k = shared + p.stages_at + place * kStageUnit;
        const uint32_t here = k + head.steps_k * kStageUnit;
        float scores[Rows::kScores];
        uint32_t fresh[4 * Rows::kSteps];
        rows.score(scores, queries, k, head.steps_k);
        // P V of the step before runs beside this step's softmax. Before the first step P is zeros,
        // so that the loop has one form.
        rows.add(weights, held.at < 0 ? here : values);
        wait_products<1>();
        pin(scores);
        give_back(kKeyHalf, stage.at);
        if constexpr (P::kScored) {
          if (p.bound != 0.f) {
#pragma unroll
            for (float& score : scores) score = bounded(score, p.bound);
          }
        }
        if (first + Rows::kKeys > all) hide(scores, first, limit);
        if constexpr (kWindows) {
          if (first < most_seen && first + Rows::kKeys > window.sink)
            hide_gap(scores, first, window.sink, seen);
        }
        rows.soften(scores, p.scale_log2, fresh);
        wait_products<0>();
        pin(weights);
        pin(rows.o);
        if (held.at >= 0) give_back(kValueHalf, held.at);
        held = stage, values = here;
#pragma unroll
        for (int i = 0; i < 4 * Rows::kSteps; ++i) weights[i] = fresh[i] | nothing;
      } else {  // none of these rows sees this stage, and what is held must not wait for another
        finish();
        wait(s.full[kValueHalf][stage.at], stage.parity);
        give_back(kKeyHalf, stage.at), give_back(kValueHalf, stage.at);
      }
      stage.next();
    }
  }
  finish();
  write_rows<E, kV>(p, tile, head, rows, row);
  if (threadIdx.x % 32 == 0) arrive(s.queries_done[slot]);
}

template <class E, class P>
__device__ __forceinline__ void attend_tile(const P& p, PromptShared& s, uint32_t shared, int slot,
                                            int steps_v, Turn& stage, int& after) {
  switch (steps_v) {
    case 1: return attend_tile<E, 1>(p, s, shared, slot, stage, after);
    case 2: return attend_tile<E, 2>(p, s, shared, slot, stage, after);
    case 3: return attend_tile<E, 3>(p, s, shared, slot, stage, after);
    case 4: return attend_tile<E, 4>(p, s, shared, slot, stage, after);
    case 5: return attend_tile<E, 5>(p, s, shared, slot, stage, after);
    case 6: return attend_tile<E, 6>(p, s, shared, slot, stage, after);
    case 7: return attend_tile<E, 7>(p, s, shared, slot, stage, after);
    default: return attend_tile<E, 8>(p, s, shared, slot, stage, after);
  }
}

template <class E, class P>
__device__ __forceinline__ void attend(const P& p, PromptShared& s, uint32_t shared) {
  Turn stage;
  int after = 0;  // the last stage's end
  for (int n = 0;; ++n) {
    const int slot = n & 1;
    wait(s.queries_there[slot], n >> 1 & 1);
    fence_for_bulk_copies();  // products see what copies wrote
    const int at = uniform(s.tile[slot].head);
    if (at < 0) return;
    attend_tile<E>(p, s, shared, slot, p.head[at].steps_v, stage, after);
  }
}

#endif

// For other devices this compiles to nothing. The host tells by its shared memory.
// P: PromptParams, GeneralPrompts, NamedPrompts, ScoredPrompts or Float8Prompts.
template <class E, class P>
__global__ void __launch_bounds__(kPromptThreads, 1) attend_prompt(const __grid_constant__ P p) {
#ifdef KVLATHE_WGMMA
  if (p.tiles == kTilesOfCodes && !*p.codes_left) return;
  // Two tiles of queries | buffers of codes | the stages. Blocks begin at multiples of 1024 bytes.
  extern __shared__ __align__(1024) char dynamic[];
  const uint32_t shared =
      (shared_address(dynamic) + kBlockAlignment - 1) & ~uint32_t(kBlockAlignment - 1);
  __shared__ PromptShared s;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 * kPromptStages; ++i)
      init_barrier(s.full[i % 2][i / 2], 128),
          init_barrier(s.empty[i % 2][i / 2], 4 * kPromptGroups);
    for (int i = 0; i < 2; ++i)
      init_barrier(s.queries_there[i], 128 + 1), init_barrier(s.queries_done[i], 4 * kPromptGroups);
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kFetchRegisters));
    Fetcher<E, P>{p, s, shared}.run();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kAttendRegisters));
    attend<E>(p, s, shared);
  }
#endif
}

template <class E>
const void* kernel_of_kind(PromptKind kind) {
  const auto address = [](auto* kernel) { return reinterpret_cast<const void*>(kernel); };
  switch (kind) {
    case PromptKind::kPlain: return address(attend_prompt<E, PromptParams>);
    case PromptKind::kGeneral: return address(attend_prompt<E, GeneralPrompts>);
    case PromptKind::kNamed: return address(attend_prompt<E, NamedPrompts>);
    case PromptKind::kScored: return address(attend_prompt<E, ScoredPrompts>);
    default: return address(attend_prompt<E, Float8Prompts>);
  }
}

}  // namespace kvlathe::cuda
