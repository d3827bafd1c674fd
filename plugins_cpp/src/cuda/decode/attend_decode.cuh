// Decode attention over the paged cache. The grid is persistent; schedule.cuh says which block
// attends what.
//
// Every warp keeps a ring of tiles on their way and a softmax state of its own. The warps of a
// block take the tiles of a span in turn. They meet only where the span ends, because a barrier
// would let the slowest tile hold up all. Where several blocks share a (sequence, head), the block
// in which it ends finishes it.
#pragma once

#include <type_traits>

#include "cuda/decode/attend_codes.cuh"
#include "cuda/decode/finish.cuh"
#include "cuda/decode/turns.cuh"

namespace kvlathe::cuda {

// Touches what the block needs soon. The address translations are then there in time.
template <int kParts>
__device__ void warm_up(const Params<kParts>& p) {
  if (threadIdx.x == 64) prefetch(p.partials + 2 * blockIdx.x);
  if (p.plan) return;
  // Likely the block's own sequence: it is not known yet.
  const int sequence = int(unsigned(blockIdx.x) * unsigned(p.batch) / gridDim.x);
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    if (threadIdx.x == 96 + i)
      prefetch(p.part[i].page_table + int64_t{sequence} * p.part[i].table_stride);
  }
}

// The same for the queries of its first span.
template <int kParts>
__device__ void warm_up(const Params<kParts>& p, const Span<kParts>& span) {
  const HeadParams<kParts>& head = p.head[span.head];
  const auto* q = reinterpret_cast<const char*>(p.q + span.sequence * p.q_stride + head.q_offset);
  const int at = threadIdx.x * 128, bytes = query_bytes(p, head);
  if (at < bytes + 128) prefetch(q + min(at, bytes - 1));
}

// Runs `body` with the bits of a code as a constant: kBits, or `bits` where those are several.
template <int kBits, class Body>
__device__ void with_width(int bits, Body body) {
  if constexpr (kBits != kSeveralWidths && is_quantized(kBits)) {
    body(std::integral_constant<int, kBits>{});
  } else if constexpr (kBits == kSeveralWidths) {
    if (is_byte(bits)) body(std::integral_constant<int, 8>{});
    if (is_nibble(bits)) body(std::integral_constant<int, 4>{});
    if (is_crumb(bits)) body(std::integral_constant<int, 2>{});
  }
}

// A 16-bit tile in a call whose other tiles are quantized. It is a function of its own, so that
// its registers do not count among those of the loop.
template <class E, int kSteps>
__device__ __noinline__ SoftmaxState<kSteps> attend_tile_apart(uint32_t queries, uint32_t tile,
                                                               int units, int rows, int group,
                                                               int rank_k, int rank_v,
                                                               float scale_log2) {
  SoftmaxState<kSteps> state;
  state.clear();
  Lane16<kSteps> lane16;
  lane16.set(queries, group, rank_k, rank_v);
  attend_tile<E>(state, lane16, tile, units, rows, scale_log2);
  return state;
}

// kBits: 16 where all parts have 16 bits; 8, 4 or 2 where all quantized parts have that; or
// kSeveralWidths.
// kFill: 2 where quantized parts meet at most 4 query heads (attend_codes.cuh), else 1.
template <class E, int kParts, int kSteps, int kBits, int kFill>
__global__ void __launch_bounds__(most_warps(kBits, kFill) * 32, kBlocksPerSM)
    attend_decode(const __grid_constant__ Params<kParts> p) {
  // Rings of the warps | merge buffer | quantized queries of the warps.
  KVLATHE_DYNAMIC_SHARED(shared);
  constexpr bool kQuantized = is_quantized(kBits);
  __shared__ Block<kParts> block;
  __shared__ Runs<kParts> runs[kMaxWarps];
  __shared__ __align__(8) uint64_t barriers[kMaxWarps][kSlots];
  // Where a block has fewer warps, each has registers enough.
  constexpr bool kParks = kQuantized && most_warps(kBits, kFill) == kMaxWarps;
  __shared__ Parked parked_of[kParks ? kMaxWarps : 1];
  warm_up(p);
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const Crew crew{int(threadIdx.x), int(blockDim.x)};
  if (kQuantized && threadIdx.x % 32 < kSlots)
    init_barrier(shared_address(&barriers[warp][threadIdx.x % 32]));
  auto* buffer = reinterpret_cast<float*>(shared + warps * p.ring_bytes);
  const uint32_t codes = kept(shared_address(buffer + p.merge_floats) + warp * p.codes_bytes);
  Parked& parked = parked_of[kParks ? kept(warp) : 0];
  Ring ring{{},
            uint32_t(kept(shared_address(shared) + warp * p.ring_bytes)),
            pinned(p.ring_bytes),
            uint32_t(kept(shared_address(barriers[warp])))};

  const Planned<kParts> plan(p);
  if (plan.any) warm_up(p, plan.walk.span);
  Producer<Params<kParts>, kBits, kParks> producer(p, plan, runs[warp], ring, parked);
  if (threadIdx.x == 0) {
    block.walk = plan.walk, block.share = plan.share, block.begin_start = plan.begin_start,
    block.ending.there = false;
  }
  if (kQuantized) publish_barriers();
  __syncthreads();
  // Whether the ring is filled while the kernel before this one still runs.
  bool early = plan.any && p.early;
  if (!early) {
    wait_for_previous_kernel();
    if (plan.some_empty) write_empty<E>(p, crew);
    if (!plan.any) return;
  }
  SoftmaxState<kSteps, kFill> state;
  state.clear();
  Slab slab;  // of the run being attended
  Lane16<kSteps> lane16;
  const auto start = [&] {
    wait_for_previous_kernel();
    if (plan.some_empty) write_empty<E>(p, crew);
  };
  const auto ended = [&] {
    finish<E>(p, state, buffer, block, crew);
    state.clear();
  };
  const auto take = [&](Turn& turn, int part, const HeadParams<kParts>& at, uint32_t queries) {
    if (is_quantized(turn.bits)) {
      with_width<kBits>(turn.bits, [&](auto constant) {
        constexpr int kWidth = decltype(constant)::value;
        slab.set<kWidth, kFill>(p, turn.head, part);
        producer.keep(slab);
        quantize_queries<E, kWidth, kFill>(codes, queries, p.group_size, at.rank_k, slab.groups,
                                           p.scale_log2);
      });
    } else if (kQuantized) {
      // In shared memory: few tiles have 16 bits, and registers are scarce.
      for (int i = threadIdx.x % 32 * 4; i < query_bytes(p, at); i += 128)
        store_word(codes + i, load_word(queries + i));
    } else {
      lane16.set(queries, p.group_size, at.rank_k, at.rank_v);
    }
  };
  const auto attend = [&](Turn& turn, int now) {
    auto& [unit, last, head, length, units, bytes, bits] = turn;
    if constexpr (!kQuantized) {
      const uint32_t tile = ring.wait_oldest(bytes);
      const int rows = min(units * kRowTokens, length - now * kRowTokens);
      attend_tile<E>(state, lane16, tile, units, rows, p.scale_log2);
      ring.drop_oldest(bytes);
    } else if (is_half(bits)) {
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
      with_width<kBits>(bits, [&](auto constant) {
        constexpr int kWidth = decltype(constant)::value;
        if (slab.plain) {
          attend_pages<kWidth, true>(state, slab, tile, codes, p.page_tokens, rows);
        } else {
          attend_pages<kWidth, false>(state, slab, tile, codes, p.page_tokens, rows);
        }
      });
    }
  };
  attend_in_turns<kQuantized>(p, producer, ring, block.walk, early, start, ended, take, attend);
  if (block.ending.there) finish_pair<E>(p, block.ending, reinterpret_cast<float*>(shared), crew);
}

}  // namespace kvlathe::cuda
