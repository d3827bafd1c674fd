// Keeps one warp's ring full with the tiles of its block's spans, in order; the queries of a run come before its tiles.
//
// A global load that the stream of tiles has to wait for queues behind all bytes in flight, microseconds of them. So
// page ids are asked for early: 32 tiles ahead within a run, and at the start of a run for the run after it.
#pragma once

#include "schedule.cuh"
#include "tile16.cuh"

namespace kvlathe::cuda {

// The units [first, last) of a span that lie in one part, counted from the part's first.
struct Run {
  int first, last, tokens;  // tokens: of the part
  template <int kParts>
  __device__ Run(const Params<kParts>& p, const Span<kParts>& span, int part) {
    int before = 0, count = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      if (i < part) before += span.pair.units(p, i);
      if (i == part) count = span.pair.units(p, i), tokens = span.pair.tokens[i];
    }
    first = max(span.first - before, 0);
    last = min(span.last - before, count);
  }
};

// What one run's queries take in a ring.
template <int kParts>
__device__ int query_bytes(const Params<kParts>& p, const HeadParams<kParts>& head) {
  return p.group_size * head.rank_k * 2;
}

// What a producer needs only from run to run; one a warp, in shared memory, to leave registers to the tiles.
template <int kParts>
struct Runs {
  Walk<kParts> walk;                     // where the run ahead lies, while walk.valid
  int part, unit, last, tokens;          // the run ahead
  int now_sequence, now_head, now_part;  // the run in hand
};

// kQuantized: parts may be quantized.
template <int kParts, bool kQuantized>
struct Producer {
  const Params<kParts>& p;
  Ring& ring;
  Runs<kParts>& runs;
  bool fine;  // one unit a tile

  // The run in hand.
  bool any = false, queries_due = false, bulk;  // bulk: it is quantized
  int unit, last, tokens;                       // the next tile to fetch, the end of the run, the tokens of the part
  int tile_room, tile_bytes;                    // in the ring, in the pool
  int stride, tile_tokens;                      // stride: units from one tile of this warp to its next
  int copies_k, copies_v;                       // 16 bit: of a tile, 512 bytes each
  int pieces, piece_bytes;                      // quantized: of K, that are set apart in the tile
  uint32_t bits_k, bits_v;                      // 16 bit: this lane's swizzle

  // Addresses and page ids are worked out 32 tiles at a time, one tile a lane.
  const char* from;     // this lane's tile; 16 bit: its K
  int delta_v;          // 16 bit: from there to V
  int taken, later_id;  // how many of the 32 are fetched; the page id of this lane's tile of the next 32
  int ahead_id;         // the page id of this lane's tile of the run ahead

  __device__ Producer(const Params<kParts>& p, const Walk<kParts>& walk, Runs<kParts>& runs, Ring& ring, bool fine)
      : p(p), ring(ring), runs(runs), fine(fine) {
    Runs<kParts> ahead{walk, -1};
    look_ahead(ahead);
    take();
  }

  __device__ int units_of(const LaneParams& lane) const { return fine ? 1 : lane.tile_units; }
  // What a tile takes in a ring.
  __device__ int room_of(const LaneParams& lane) const {
    return ring_room(fine ? lane.tile_bytes / lane.tile_units : lane.tile_bytes);
  }
  __device__ int page_of(int part, int unit) const {
    const PartParams& at = p.part[part];
    return at.units_per_page == 1 ? unit : int(__umulhi(unit, at.units_per_page_magic));
  }
  __device__ int load_id(int part, int sequence, int own, int last) const {
    const PartParams& at = p.part[part];
    return own < last ? __ldg(at.page_table + int64_t{sequence} * at.table_stride + page_of(part, own)) : 0;
  }

  // Finds the run after `ahead` with tiles for this warp and asks for its first page ids. Whole warp.
  __device__ void look_ahead(Runs<kParts>& ahead) {
    Walk<kParts>& walk = ahead.walk;
    int step = 0;
    if (walk.valid) {
      do {
        if (++ahead.part == kParts) {
          ahead.part = 0;
          walk.next(p);
          if (!walk.valid) break;
        }
        const Run run(p, walk.span, ahead.part);
        const int units = units_of(p.head[walk.span.head].lane[ahead.part]);
        ahead.unit = run.first + int(threadIdx.x / 32) * units;
        ahead.last = run.last;
        ahead.tokens = run.tokens;
        step = blockDim.x / 32 * units;
      } while (ahead.unit >= ahead.last);
    }
    if (walk.valid) {
      ahead_id = load_id(ahead.part, walk.span.sequence, ahead.unit + int(threadIdx.x % 32) * step, ahead.last);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) runs = ahead;
    __syncwarp();
  }

  // Makes the run ahead the one in hand.
  __device__ void take() {
    Runs<kParts> ahead = runs;
    any = ahead.walk.valid;
    if (!any) return;
    ahead.now_sequence = ahead.walk.span.sequence, ahead.now_head = ahead.walk.span.head, ahead.now_part = ahead.part;
    unit = ahead.unit, last = ahead.last, tokens = ahead.tokens;
    queries_due = true;
    const HeadParams<kParts>& at = p.head[ahead.now_head];
    const LaneParams& lane = at.lane[ahead.part];
    const int units = units_of(lane), id = ahead_id;
    bulk = kQuantized && p.part[ahead.part].bits < 16;
    stride = pinned(blockDim.x / 32 * units);
    tile_bytes = pinned(lane.bytes * units);
    tile_room = pinned(room_of(lane));
    tile_tokens = units << p.part[ahead.part].unit_shift;
    if (bulk) {
      pieces = p.part[ahead.part].bits == 8 ? p.page_tokens / kPieceTokens : 0;
      piece_bytes = kPieceTokens * at.rank_k;
    } else {
      copies_k = pinned(units * (at.rank_k / 16));
      copies_v = pinned(units * (at.rank_v / 16));
      bits_k = swizzle_bits(at.rank_k);
      bits_v = swizzle_bits(at.rank_v);
    }
    locate(id, ahead.now_sequence, ahead.now_head, ahead.now_part);
    look_ahead(ahead);
  }

  // Turns page ids of the 32 tiles from `unit` on into addresses, and asks for the page ids of the 32 after them.
  __device__ void locate(int page_id, int sequence, int head, int part) {
    const HeadParams<kParts>& at = p.head[head];
    const LaneParams& lane = at.lane[part];
    const int own = unit + int(threadIdx.x % 32) * stride;
    from = p.pool + page_id * p.part[part].page_stride + lane.k;
    if (!bulk) {
      const int in_page = own - page_of(part, own) * p.part[part].units_per_page;
      from += in_page * (at.rank_k * 2 * kRowTokens);
      delta_v = lane.v - lane.k + in_page * (at.rank_v - at.rank_k) * 2 * kRowTokens;
    }
    later_id = load_id(part, sequence, own + 32 * stride, last);
    taken = 0;
  }

  __device__ void fill() {
    while (any) {
      const int room = queries_due ? ring_room(query_bytes(p, p.head[runs.now_head])) : tile_room;
      const uint32_t to = ring.place(room);
      if (!to) return;
      if (queries_due) {
        fetch_queries(to, query_bytes(p, p.head[runs.now_head]));
        close_copy_group();
        queries_due = false;
        continue;
      }
      fetch(to);
      close_copy_group();
      unit += stride;
      if (unit >= last) {
        take();
      } else if (++taken == 32) {
        locate(later_id, runs.now_sequence, runs.now_head, runs.now_part);
      }
    }
  }

  __device__ void fetch_queries(uint32_t to, int bytes) const {
    const auto* q =
        reinterpret_cast<const char*>(p.q + runs.now_sequence * p.q_stride + p.head[runs.now_head].q_offset);
    for (int at = threadIdx.x % 32 * 16; at < bytes; at += 512) copy16(to + at, q + at, true);
  }

  __device__ void fetch(uint32_t to) const {
    const int thread = threadIdx.x % 32, rows = tokens - unit * kRowTokens;
    const char* tile = reinterpret_cast<const char*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(from), taken));
    if (bulk) {
      const uint32_t barrier = ring.newest_barrier();
      announce_copies(barrier, tile_bytes);
      copy_pieces(to, tile, pieces, piece_bytes, kPieceGap, barrier);
      const int done = pieces * piece_bytes;
      copy_pieces(to + done + pieces * kPieceGap, tile + done, 1, tile_bytes - done, 0, barrier);
      return;
    }
    const char* k = tile + thread * 16;
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
