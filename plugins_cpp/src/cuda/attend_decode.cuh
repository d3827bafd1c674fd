// Decode attention over the paged cache: a persistent grid on the byte-interval schedule (schedule.cuh).
//
// Each warp keeps its own ring of tiles in flight and its own softmax state; a block's warps take the tiles of a span
// in turn and meet only where the span ends. A pair that several blocks share is finished by the block that arrives
// last.
#pragma once

#include <type_traits>

#include "codes.cuh"
#include "finish.cuh"
#include "producer.cuh"

namespace kvlathe::cuda {

// Touches what the block will need soon, so that address translations are there by then: a sequence that is likely its
// own.
template <int kParts>
__device__ void warm_up(const Params<kParts>& p) {
  const int sequence = int(unsigned(blockIdx.x) * unsigned(p.batch) / gridDim.x);
  if (threadIdx.x == 32) prefetch(p.arrivals + sequence * p.heads);
  if (threadIdx.x == 64) prefetch(p.partials + 2 * blockIdx.x);
  if (threadIdx.x == 96) prefetch(p.q + sequence * p.q_stride);
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    if (threadIdx.x == 127) prefetch(p.part[i].page_table + int64_t{sequence} * p.part[i].table_stride);
  }
}

// The tiles of one run of 16-bit units that are this warp's: units from `unit` on.
template <class E, int kSteps, class P, class Feed>
__device__ void attend_run16(SoftmaxState<kSteps>& state, const P& p, Feed& feed, Ring& ring, uint32_t queries,
                             int head, int part, int unit, int last, int tokens) {
  const auto& lane = p.head[head].lane[part];
  const int query_room = ring_room(query_bytes(p, p.head[head]));
  const int units = pinned(feed.units_of(lane)), bytes = pinned(lane.bytes * units), stride = blockDim.x / 32 * units;
  Lane16<kSteps> lane16;
  lane16.set(queries, p.group_size, p.head[head].rank_k, p.head[head].rank_v);
  ring.release_oldest(query_room);
  int rows = tokens - unit * kRowTokens;
  for (; unit < last; unit += stride, rows -= stride * kRowTokens) {
    feed.fill();
    const uint32_t tile = ring.wait_oldest(bytes);
    attend_tile<E>(state, lane16, tile, units, min(units * kRowTokens, rows), p.scale_log2);
    ring.release_oldest(bytes);
  }
}

// Likewise of quantized pages.
template <class E, int kBits, int kSteps, class P, class Feed>
__device__ void attend_run_codes(SoftmaxState<kSteps>& state, const P& p, Feed& feed, Ring& ring, uint32_t codes,
                                 uint32_t queries, int head, int part, int unit, int last, int tokens) {
  using C = Codes<kBits>;
  const auto& at = p.head[head];
  const auto& lane = at.lane[part];
  const int thread = threadIdx.x % 32, room = ring_room(lane.bytes), stride = blockDim.x / 32;
  quantize_queries<E, kBits>(codes, queries, p.group_size, at.rank_k, lane.groups_k, p.scale_log2);
  ring.release_oldest(ring_room(query_bytes(p, at)));
  Chunk chunk;
  chunk.row_bytes = at.rank_k * kBits / 8;
  chunk.groups_k = lane.groups_k;
  chunk.v_stride = p.page_tokens * kBits / 8;
  chunk.meta_stride = p.page_tokens >> p.part[part].groups_v << 2;
  chunk.steps_k = at.rank_k / 16;
  chunk.steps_v = at.rank_v / 16;
  chunk.split = p.part[part].groups_v == 5;
  const int token = C::first_token(thread / 4);
  const int k = token * chunk.row_bytes + thread % 4 / C::kIn * 4;
  const int k_meta = lane.k_meta * 16 + token * chunk.groups_k * 4;
  const int v = lane.v + thread / 4 * chunk.v_stride + thread % 4 / C::kIn * 16;
  const int v_meta = lane.v_meta * 16 + thread / 4 * chunk.meta_stride;
  for (; unit < last; unit += stride) {
    feed.fill();
    const uint32_t tile = ring.template wait_oldest<true>(room);
    const int rows = min(tokens - unit * p.page_tokens, p.page_tokens);
    for (int first = 0; first < rows; first += kChunkTokens) {
      chunk.k = tile + k + first * chunk.row_bytes;
      chunk.k_meta = tile + k_meta + first * chunk.groups_k * 4;
      chunk.v = tile + v + first * kBits / 8;
      chunk.v_meta = tile + v_meta + (first >> p.part[part].groups_v) * 4;
      attend_chunk<kBits>(state, chunk, codes, rows - first);
    }
    ring.release_oldest(room);
  }
}

// kBits: 16 if all parts are; 8, 4 or 2 if that is what parts below 16 have; 0 for any.
template <class E, int kParts, int kSteps, int kBits>
__global__ void __launch_bounds__(kMaxWarps * 32, kBlocksPerSM)
    attend_decode(const __grid_constant__ Params<kParts> p) {
  extern __shared__ __align__(128) char shared[];  // [warps] rings | merge buffer | [warps] quantized queries
  __shared__ Block<kParts> block;
  __shared__ Runs<kParts> runs[kMaxWarps];
  __shared__ __align__(8) uint64_t barriers[kMaxWarps][kSlots];
  constexpr bool kQuantized = kBits < 16;
  warm_up(p);
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  if (kQuantized && threadIdx.x % 32 < kSlots) init_barrier(shared_address(&barriers[warp][threadIdx.x % 32]));
  auto* buffer = reinterpret_cast<float*>(shared + warps * p.ring_bytes);
  const uint32_t codes = shared_address(buffer + p.merge_floats) + warp * p.codes_bytes;
  Ring ring{uint32_t(pinned(shared_address(shared) + warp * p.ring_bytes)), pinned(p.ring_bytes),
            shared_address(barriers[warp])};

  const Plan<kParts> plan(p);
  const Walk<kParts> walk = Walk<kParts>::start(p, plan);
  Producer<kParts, kQuantized> producer(p, walk, runs[warp], ring, plan.share < kFineShare);
  if (threadIdx.x == 0) {
    block.walk = walk, block.share = plan.share, block.begin_start = plan.begin.start, block.end_start = plan.end.start;
    block.unfinished[0].there = block.unfinished[1].there = false;
  }
  if (kQuantized) publish_barriers();
  __syncthreads();
  wait_for_previous_kernel();
  if (plan.some_empty) write_empty<E>(p);
  if (!plan.any) return;
  producer.fill();
  SoftmaxState<kSteps> state;
  while (block.walk.valid) {
    state.clear();
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      const int head = block.walk.span.head;
      const Run run(p, block.walk.span, part);
      const int unit = run.first + warp * producer.units_of(p.head[head].lane[part]);
      if (unit >= run.last) continue;
      producer.fill();
      const uint32_t queries = ring.wait_oldest(ring_room(query_bytes(p, p.head[head])));
      const int bits = kBits == 16 ? 16 : p.part[part].bits;
      const auto codes_run = [&](auto width) {
        attend_run_codes<E, decltype(width)::value>(state, p, producer, ring, codes, queries, head, part, unit, run.last,
                                                    run.tokens);
      };
      if (bits == 16) {
        attend_run16<E>(state, p, producer, ring, queries, head, part, unit, run.last, run.tokens);
      } else if constexpr (kBits == 8 || kBits == 4 || kBits == 2) {
        codes_run(std::integral_constant<int, kBits>{});
      } else if constexpr (kBits == 0) {
        if (bits == 8) codes_run(std::integral_constant<int, 8>{});
        if (bits == 4) codes_run(std::integral_constant<int, 4>{});
        if (bits == 2) codes_run(std::integral_constant<int, 2>{});
      }
    }
    producer.fill();
    finish<E>(p, state, buffer, block);
  }
  finish_shared_pairs<E>(p, buffer, block);
}

}  // namespace kvlathe::cuda
