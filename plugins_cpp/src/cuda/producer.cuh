// Keeps one warp's ring full with the tiles of its block's spans, in order.
#pragma once

#include "schedule.cuh"
#include "tile16.cuh"

namespace kvlathe::cuda {

// The units [first, last) of a span that lie in one part, counted from the part's first.
struct Run {
  int first, last;
  template <int kParts>
  __device__ Run(const Span<kParts>& span, int part) {
    int before = 0, count = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      if (i < part) before += span.pair.units(i);
      if (i == part) count = span.pair.units(i);
    }
    first = max(span.first - before, 0);
    last = min(span.last - before, count);
  }
};

template <int kParts>
struct Producer {
  const Params<kParts>& p;
  Ring& ring;
  SpanWalk<kParts> walk;
  int part = 0, unit, last, tokens;     // the next tile to fetch, the end of its run, the tokens of the part
  int stride, tile_bytes, tile_tokens;  // stride: units from one tile of this warp to its next
  int copies_k, copies_v;               // of a tile, 512 bytes each
  uint32_t bits_k, bits_v;              // this lane's swizzle

  // Addresses and page ids are worked out 32 tiles at a time, one tile a lane.
  const char* from;     // K of this lane's tile
  int delta_v;          // from there to V
  int taken, later_id;  // how many of the 32 are fetched; the page id of this lane's tile of the next 32

  bool fine;  // one unit a tile

  __device__ Producer(const Params<kParts>& p, const SpanWalk<kParts>& walk, Ring& ring, bool fine)
      : p(p), ring(ring), walk(walk), fine(fine) {
    if (!walk.valid) return;
    enter();
    settle();
  }

  __device__ int page_of(int unit) const {
    return p.units_per_page == 1 ? unit : int(__umulhi(unit, p.units_per_page_magic));
  }
  __device__ int own_unit() const { return unit + int(threadIdx.x % 32) * stride; }

  __device__ int load_id(int own) const {
    const PartParams& at = p.part[part];
    return own < last ? __ldg(at.page_table + int64_t{walk.span.sequence} * at.table_stride + page_of(own)) : 0;
  }

  // Turns page ids of the 32 tiles from `unit` on into addresses, and asks for the page ids of the 32 after them.
  __device__ void locate(int page_id) {
    const HeadParams<kParts>& head = p.head[walk.span.head];
    const LaneParams& lane = head.lane[part];
    const int own = own_unit(), in_page = own - page_of(own) * p.units_per_page;
    from = p.pool + page_id * p.part[part].page_stride + (lane.k + in_page * (head.rank_k * 2 * kUnitTokens));
    delta_v = lane.v - lane.k + in_page * (head.rank_v - head.rank_k) * 2 * kUnitTokens;
    later_id = load_id(own + 32 * stride);
    taken = 0;
  }

  // Takes up a part of a span.
  __device__ void enter() {
    const HeadParams<kParts>& head = p.head[walk.span.head];
    const LaneParams& lane = head.lane[part];
    const Run run(walk.span, part);
    const int units = fine ? 1 : lane.tile_units;
    unit = run.first + int(threadIdx.x / 32) * units;
    last = run.last;
    if (unit >= last) return;
#pragma unroll
    for (int i = 0; i < kParts; ++i) tokens = i == part ? walk.span.pair.tokens[i] : tokens;
    stride = pinned(blockDim.x / 32 * units);
    tile_bytes = pinned(lane.unit_bytes() * units);
    tile_tokens = units * kUnitTokens;
    const int id = load_id(own_unit());
    copies_k = pinned(units * (head.rank_k / 16));
    copies_v = pinned(units * (head.rank_v / 16));
    bits_k = swizzle_bits(head.rank_k);
    bits_v = swizzle_bits(head.rank_v);
    locate(id);
  }

  // Moves on to a part with tiles for this warp.
  __device__ void settle() {
    while (unit >= last) {
      if (++part == kParts) {
        part = 0;
        walk.next();
        if (!walk.valid) return;
      }
      enter();
    }
  }

  __device__ void fill() {
    while (walk.valid) {
      const uint32_t to = ring.place(tile_bytes);
      if (!to) return;
      fetch(to);
      close_copy_group();
      unit += stride;
      if (unit >= last) {
        settle();
      } else if (++taken == 32) {
        locate(later_id);
      }
    }
  }

  __device__ void fetch(uint32_t to) const {
    const int thread = threadIdx.x % 32, rows = tokens - unit * kUnitTokens;
    const char* k =
        reinterpret_cast<const char*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(from), taken)) + thread * 16;
    const char* v = k + __shfl_sync(~0u, delta_v, taken);
    const uint32_t to_k = to + thread * 16, to_v = to_k + copies_k * 512;
    if (rows >= tile_tokens) {
      copy_part<true>(to_k, k, bits_k, copies_k, 0);
      copy_part<true>(to_v, v, bits_v, copies_v, 0);
    } else {  // 16-byte chunks of the rows that exist: a row has copies * 32 / tile_tokens
      copy_part<false>(to_k, k, bits_k, copies_k, rows * (copies_k * 32 / tile_tokens));
      copy_part<false>(to_v, v, bits_v, copies_v, rows * (copies_v * 32 / tile_tokens));
    }
  }
};

}  // namespace kvlathe::cuda
