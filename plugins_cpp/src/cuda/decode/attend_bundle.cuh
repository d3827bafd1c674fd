// Decode attention of bundles (bundles.cuh) over 16-bit parts and codes. It is attend_decode
// (attend_decode.cuh) for more columns: the same blocks, warps, rings and spans.
#pragma once

#include "cuda/decode/attend_decode.cuh"
#include "cuda/decode/bundle_codes.cuh"

namespace kvlathe::cuda {

// A 16-bit tile in a call whose other tiles are quantized, for the 8 columns from `column` on, of
// which `columns` exist. It is a function of its own, so that its registers do not count among those
// of the loop.
template <class E, int kSteps>
__device__ __noinline__ SoftmaxState<kSteps> attend_bundle_apart(uint32_t queries, uint32_t tile,
                                                                 int units, int left, int length,
                                                                 int column, int columns, int group,
                                                                 int rank_k, int rank_v,
                                                                 float scale_log2) {
  SoftmaxState<kSteps> state;
  state.clear();
  Lane16<kSteps> lane16;
  lane16.set(queries, columns, rank_k, rank_v);
  UnseenTail unseen;
  unseen.set(length, column + threadIdx.x % 4 * 2, group);
  attend_tile_of_bundle<E>(state, lane16, unseen, tile, units, left, scale_log2);
  return state;
}

// P: Bundled of Params. kBits: 16, or 8, 4 or 2: then P has two tiles of 8 columns.
template <class E, class P, int kSteps, int kBits>
__global__ void __launch_bounds__(kBundledWarps * 32, kBlocksPerSM)
    attend_bundles(const __grid_constant__ P p) {
  constexpr int kParts = P::kSlots, kStates = P::kColumns / kMaxGroup;
  constexpr bool kQuantized = is_quantized(kBits);
  // Rings of the warps | merge buffer | quantized queries of the warps.
  KVLATHE_DYNAMIC_SHARED(shared);
  __shared__ Block<kParts, P::kColumns> block;
  __shared__ Runs<kParts> runs[kMaxWarps];
  __shared__ __align__(8) uint64_t barriers[kMaxWarps][kSlots];
  __shared__ Parked parked_of[kQuantized ? kBundledWarps : 1];
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const Crew crew{int(threadIdx.x), int(blockDim.x)};
  if (kQuantized && threadIdx.x % 32 < kSlots)
    init_barrier(shared_address(&barriers[warp][threadIdx.x % 32]));
  auto* buffer = reinterpret_cast<float*>(shared + warps * p.ring_bytes);
  const uint32_t codes = kept(shared_address(buffer + p.merge_floats) + warp * p.codes_bytes);
  Parked& parked = parked_of[kQuantized ? kept(warp) : 0];
  Ring ring{{},
            uint32_t(kept(shared_address(shared) + warp * p.ring_bytes)),
            pinned(p.ring_bytes),
            uint32_t(kept(shared_address(barriers[warp])))};

  const Planned<kParts> plan(p);
  Producer<P, kBits, kQuantized> producer(p, plan, runs[warp], ring, parked);
  if (threadIdx.x == 0) {
    block.walk = plan.walk, block.share = plan.share, block.begin_start = plan.begin_start,
    block.ending.there = false;
  }
  if (kQuantized) publish_barriers();
  __syncthreads();
  wait_for_previous_kernel();
  if (plan.some_empty) write_empty<E>(p, crew);
  if (!plan.any) return;
  SoftmaxState<kSteps> states[kStates];
  for (auto& state : states) state.clear();
  Slab slab;  // of the run being attended
  Lane16<kSteps> lane16;
  UnseenTail unseen;
  const auto start = [] {};  // nothing is early here
  const auto ended = [&] {
    finish<E, true>(p, states, buffer, block, crew);
    for (auto& state : states) state.clear();
  };
  const auto take = [&](Turn& turn, int part, const auto& at, uint32_t queries) {
    const int columns = columns_of(p, turn.head, rows_in(turn.length));
    if constexpr (kQuantized) {
      if (is_quantized(turn.bits)) {
        slab.set<kBits, 1>(p, turn.head, part);
        producer.keep(slab);
#pragma unroll 1
        for (int t = 0; t < kStates; ++t)
          quantize_queries<E, kBits, 1>(codes + t * codes_bytes(1, at.rank_k, slab.groups.count),
                                        queries + t * kMaxGroup * at.rank_k * 2,
                                        columns - t * kMaxGroup, at.rank_k, slab.groups,
                                        p.scale_log2);
      } else {
        for (int i = threadIdx.x % 32 * 4; i < columns * at.rank_k * 2; i += 128)
          store_word(codes + i, load_word(queries + i));
      }
    } else {
      lane16.set(queries, columns, at.rank_k, at.rank_v);
      unseen.set(turn.length, first_column(p, turn.head) + threadIdx.x % 4 * 2, p.group_size);
    }
  };
  const auto attend = [&](Turn& turn, int now) {
    auto& [unit, last, head, length, units, bytes, bits] = turn;
    const int tokens = tokens_in(length);
    if constexpr (!kQuantized) {
      const uint32_t tile = ring.wait_oldest(bytes);
      attend_tile_of_bundle<E>(states[0], lane16, unseen, tile, units, tokens - now * kRowTokens,
                               p.scale_log2);
      ring.drop_oldest(bytes);
    } else if (is_half(bits)) {
      const uint32_t tile = ring.wait_oldest(bytes);
      ring.drop_oldest(bytes);
      producer.park(turn);
      const int rank_k = p.head[head].rank_k, columns = columns_of(p, head, rows_in(length));
#pragma unroll
      for (int t = 0; t < kStates; ++t)
        states[t].merge(attend_bundle_apart<E, kSteps>(
            codes + t * kMaxGroup * rank_k * 2, tile, units, tokens - now * kRowTokens, length,
            first_column(p, head) + t * kMaxGroup, columns - t * kMaxGroup, p.group_size, rank_k,
            p.head[head].rank_v, p.scale_log2));
      fence_for_bulk_copies();  // which fill the room that was read by ordinary instructions
    } else {
      const uint32_t tile = ring.wait_oldest<true>(bytes);
      const int rows = min(min(units, last - now) * p.page_tokens, tokens - now * p.page_tokens);
      ring.drop_oldest(bytes);
      producer.park(turn);
      producer.recall(slab);
      if (slab.plain)
        attend_pages<kBits, true>(states, slab, tile, codes, p.page_tokens, rows);
      else
        attend_pages<kBits, false>(states, slab, tile, codes, p.page_tokens, rows);
    }
  };
  attend_in_turns<kQuantized>(p, producer, ring, block.walk, false, start, ended, take, attend);
  if (block.ending.there)
    finish_pair<E, true>(p, block.ending, reinterpret_cast<float*>(shared), crew);
}

}  // namespace kvlathe::cuda
