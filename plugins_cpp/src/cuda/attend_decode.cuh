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

// What the quantized tiles of a run are like; one a warp, in shared memory, to leave registers to the tiles.
struct Page {
  int k_meta, v, v_meta;  // offsets from a tile's start
  int row_bytes, v_stride, meta_stride, steps_k, steps_v, group_shift;
  Groups groups;

  template <int kBits, class P>
  __device__ static Page of(const P& p, int head, int part) {
    const auto& at = p.head[head];
    const auto& lane = at.lane[part];
    Page x{};
    x.group_shift = p.part[part].groups_v;
    const int gaps = lane.tile_bytes - lane.bytes;
    x.k_meta = lane.k_meta * 16 + gaps, x.v = lane.v + gaps, x.v_meta = lane.v_meta * 16 + gaps;
    x.row_bytes = at.rank_k * kBits / 8;
    x.v_stride = p.page_tokens * kBits / 8;
    x.meta_stride = p.page_tokens >> x.group_shift << 2;
    x.steps_k = at.rank_k / 16, x.steps_v = at.rank_v / 16;
    x.groups.set(x.steps_k, lane.groups_k);
    return x;
  }

  // A tile whose first `rows` tokens exist.
  template <int kBits, int kSteps>
  __device__ void attend(SoftmaxState<kSteps>& state, uint32_t tile, uint32_t codes, int rows) const {
    using C = Codes<kBits>;
    const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 / C::kIn;
#pragma unroll 1
    for (int first = 0; first < rows; first += kChunkTokens) {
      const int token = first + C::first_token(row);
      Chunk chunk;
      chunk.k = tile + token * row_bytes + column * 4 + (kBits == 8 ? token / kPieceTokens * kPieceGap : 0);
      chunk.k_meta = tile + k_meta + token * groups.count * 4;
      chunk.v = tile + v + row * v_stride + first * kBits / 8 + column * 16;
      chunk.v_meta = tile + v_meta + row * meta_stride + (first >> group_shift) * 4;
      chunk.row_bytes = row_bytes, chunk.v_stride = v_stride, chunk.meta_stride = meta_stride;
      chunk.groups = groups, chunk.steps_k = steps_k, chunk.steps_v = steps_v, chunk.split = group_shift == 5;
      attend_chunk<kBits>(state, chunk, codes, rows - first);
    }
  }
};

// Runs `body` with the width as a constant: kBits, or what `bits` says where kBits is 0.
template <int kBits, class Body>
__device__ void with_width(int bits, Body body) {
  if constexpr (kBits == 8 || kBits == 4 || kBits == 2) {
    body(std::integral_constant<int, kBits>{});
  } else if constexpr (kBits == 0) {
    if (bits == 8) body(std::integral_constant<int, 8>{});
    if (bits == 4) body(std::integral_constant<int, 4>{});
    if (bits == 2) body(std::integral_constant<int, 2>{});
  }
}

// kBits: 16 if all parts are; 8, 4 or 2 if that is what parts below 16 have; 0 for any.
template <class E, int kParts, int kSteps, int kBits>
__global__ void __launch_bounds__(kMaxWarps * 32, kBlocksPerSM)
    attend_decode(const __grid_constant__ Params<kParts> p) {
  extern __shared__ __align__(128) char shared[];  // [warps] rings | merge buffer | [warps] quantized queries
  __shared__ Block<kParts> block;
  __shared__ Runs<kParts> runs[kMaxWarps];
  __shared__ Page pages[kMaxWarps];
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
  SoftmaxState<kSteps> state;
  state.clear();
  Lane16<kSteps> lane16;
  int part = -1, head = 0, unit = 0, last = 0, tokens = 0, stride = 0, bytes = 0;  // the run being attended
  // One loop with one copy of the producer in it: code that does not fit the instruction caches costs more than turns.
  for (;;) {
    producer.fill();
    if (unit >= last) {  // the next run
      if (++part == kParts) {
        finish<E>(p, state, buffer, block);
        state.clear();
        part = 0;
      }
      if (!block.walk.valid) break;
      head = block.walk.span.head;
      const HeadParams<kParts>& at = p.head[head];
      const Run run(p, block.walk.span, part);
      const int units = producer.units_of(at.lane[part]), room = ring_room(query_bytes(p, at));
      unit = run.first + warp * units, last = run.last, tokens = run.tokens;
      if (unit >= last) continue;
      stride = pinned(warps * units);
      bytes = pinned(producer.room_of(at.lane[part]));
      const uint32_t queries = ring.wait_oldest(room);
      if (kBits == 16 || p.part[part].bits == 16) {
        if (kQuantized) {  // kept for each tile: few tiles are 16 bit where others are not
          for (int i = threadIdx.x % 32 * 4; i < query_bytes(p, at); i += 128)
            store_word(codes + i, load_word(queries + i));
        } else {
          lane16.set(queries, p.group_size, at.rank_k, at.rank_v);
        }
      } else {
        with_width<kBits>(p.part[part].bits, [&](auto width) {
          constexpr int kWidth = decltype(width)::value;
          const Page page = Page::of<kWidth>(p, head, part);
          if (threadIdx.x % 32 == 0) pages[warp] = page;
          quantize_queries<E, kWidth, kSteps>(codes, queries, p.group_size, at.rank_k, page.groups, p.scale_log2);
        });
      }
      ring.release_oldest<kQuantized>(room);
      continue;
    }
    if (kBits == 16 || p.part[part].bits == 16) {
      if (kQuantized) lane16.set(codes, p.group_size, p.head[head].rank_k, p.head[head].rank_v);
      const uint32_t tile = ring.wait_oldest(bytes);
      const int units = producer.units_of(p.head[head].lane[part]);
      attend_tile<E>(state, lane16, tile, units, min(units * kRowTokens, tokens - unit * kRowTokens), p.scale_log2);
      ring.release_oldest<kQuantized>(bytes);
    } else {
      with_width<kBits>(p.part[part].bits, [&](auto width) {
        const uint32_t tile = ring.wait_oldest<true>(bytes);
        pages[warp].template attend<decltype(width)::value>(state, tile, codes,
                                                            min(tokens - unit * p.page_tokens, p.page_tokens));
        ring.release_oldest(bytes);
      });
    }
    unit += stride;
  }
  finish_shared_pairs<E>(p, buffer, block);
}

}  // namespace kvlathe::cuda
