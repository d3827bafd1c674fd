// Decode attention over codes in calls of many pairs. A pair is a (sequence, head). A block has
// several there, and where all warps of a block take one pair after the other (attend_decode.cuh),
// most of their time is what each pair costs beside its pages: codes of its queries in every warp, a
// barrier, and the wait for the slowest.
//
// So here warps attend alone. A warp takes its own share of the row of work, as a block does
// elsewhere, and meets no other warp. It makes the codes of a pair's queries once, and writes
// answers from its registers. A pair that crosses the end of a warp leaves a partial result in
// each, and the warp in which it ends adds them up (alone.cuh).
//
// It is a kernel of its own. With both ways in one, both had too few registers.
#pragma once

#include "cuda/decode/alone.cuh"
#include "cuda/decode/attend_decode.cuh"

namespace kvlathe::cuda {

// What a warp has in shared memory beside its ring and codes. It is one thing, because one address
// takes fewer registers than three.
struct Lone {
  Walk<AloneParams::kSlots> walk;  // the span that it attends
  int first;                       // of all warps, the one in which its first span's pair begins
  Ending ending;                   // its first_block counts warps
  Runs<AloneParams::kSlots> runs;
  uint64_t barriers[kSlots];  // of its ring
  Parked parked;
};

// Touches what a warp needs soon, as in attend_decode: the queries of its first span, and where it
// leaves partial results.
template <int kSteps, int kFill>
__device__ void warm_up_alone(const AloneParams& p, const Span<AloneParams::kSlots>& span) {
  const auto& head = p.head[span.head];
  const auto* q = reinterpret_cast<const char*>(p.q + span.sequence * p.q_stride + head.q_offset);
  const int lane = threadIdx.x % 32, bytes = query_bytes(p, head);
  if (lane * 128 < bytes + 128) prefetch(q + min(lane * 128, bytes - 1));
  if (lane == 31) prefetch(alone_partial<kSteps, kFill>(p, own_warp(), false));
}

// kBits: 8, 4 or 2, of all quantized parts. kFill: as in attend_decode.
template <class E, int kSteps, int kBits, int kFill>
__global__ void __launch_bounds__(kMaxWarps * 32, kBlocksPerSM)
    attend_alone(const __grid_constant__ AloneParams p) {
  constexpr int kParts = AloneParams::kSlots;
  // Rings of the warps | quantized queries of the warps.
  KVLATHE_DYNAMIC_SHARED(shared);
  __shared__ Lone lones[kMaxWarps];
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  Lone& lone = lones[warp];
  if (threadIdx.x % 32 < kSlots) init_barrier(shared_address(&lone.barriers[threadIdx.x % 32]));
  const uint32_t codes = kept(shared_address(shared) + warps * p.ring_bytes + warp * p.codes_bytes);
  Ring ring{{},
            uint32_t(kept(shared_address(shared) + warp * p.ring_bytes)),
            pinned(p.ring_bytes),
            uint32_t(kept(shared_address(lone.barriers)))};

  const AlonePlan<kParts> plan(p);
  if (plan.any) warm_up_alone<kSteps, kFill>(p, plan.walk.span);
  Producer<AloneParams, kBits, true> producer(p, plan, lone.runs, ring, lone.parked);
  if (threadIdx.x % 32 == 0)
    lone.walk = plan.walk, lone.first = plan.first, lone.ending.there = false;
  publish_barriers();
  __syncwarp();
  const auto start = [&] {
    wait_for_previous_kernel();
    if (plan.some_empty) write_empty<E>(p, Crew{int(threadIdx.x), int(blockDim.x)});
  };
  // Whether the ring is filled while the kernel before this one still runs.
  bool early = plan.any && p.early;
  if (!early) {
    start();
    if (!plan.any) return;
  }
  SoftmaxState<kSteps, kFill> state;
  state.clear();
  Slab slab;  // of the run being attended
  const auto ended = [&] {
    end_span<E>(p, state, lone);
    state.clear();
  };
  const auto take = [&](Turn& turn, int part, const HeadParams<kParts>& at, uint32_t queries) {
    if (is_quantized(turn.bits)) {
      slab.set<kBits, kFill>(p, turn.head, part);
      producer.keep(slab);
      quantize_queries<E, kBits, kFill>(codes, queries, p.group_size, at.rank_k, slab.groups,
                                        p.scale_log2);
    } else {
      for (int i = threadIdx.x % 32 * 4; i < query_bytes(p, at); i += 128)
        store_word(codes + i, load_word(queries + i));
    }
  };
  const auto attend = [&](Turn& turn, int now) {
    auto& [unit, last, head, length, units, bytes, bits] = turn;
    if (is_half(bits)) {
      const uint32_t tile = ring.wait_oldest(bytes);
      const int rows = min(units * kRowTokens, length - now * kRowTokens);
      ring.drop_oldest(bytes);
      producer.park(turn);
      state.merge(attend_tile_apart<E, kSteps>(codes, tile, units, rows, p.group_size,
                                               p.head[head].rank_k, p.head[head].rank_v,
                                               p.scale_log2));
      fence_for_bulk_copies();  // which fill the room that was read by ordinary instructions
    } else {
      const uint32_t tile = ring.wait_oldest<true>(bytes);
      const int rows = min(min(units, last - now) * p.page_tokens, length - now * p.page_tokens);
      ring.drop_oldest(bytes);
      producer.park(turn);
      producer.recall(slab);
      if (slab.plain)
        attend_pages<kBits, true>(state, slab, tile, codes, p.page_tokens, rows);
      else
        attend_pages<kBits, false>(state, slab, tile, codes, p.page_tokens, rows);
    }
  };
  attend_in_turns<true>(p, producer, ring, lone.walk, early, start, ended, take, attend);
  if (lone.ending.there) end_pair<E, kSteps, kFill>(p, lone.ending);
}

}  // namespace kvlathe::cuda
