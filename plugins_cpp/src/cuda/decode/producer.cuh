// Keeps one warp's ring full with the tiles of its block's spans, in order. The queries of a run
// come before its tiles.
//
// A load that the stream of tiles must wait for queues behind all bytes on their way, which takes
// microseconds. So page ids are asked for early: 32 tiles ahead within a run, and at the start of a
// run for the run after it.
//
// Where codes are attended registers are scarce, and what the compiler spills is far away: rings
// leave the nearest cache hardly any room. So what is not needed while a tile is attended waits in
// shared memory (Parked), and page ids land there.
#pragma once

#include "cuda/decode/codes.cuh"
#include "cuda/decode/schedule.cuh"
#include "cuda/decode/tile16.cuh"

namespace kvlathe::cuda {

// The units [first, last) of a span that lie in one part, counted from the part's first. In this
// file parts are those of one lane: its slots.
struct Run {
  int first, last, length;  // length: of the part
  template <class P, int kParts>
  __device__ Run(const P& p, const Span<kParts>& span, int part) {
    int before = 0, count = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      if (i < part) before += span.pair.units(p, span.head, i);
      if (i == part) count = span.pair.units(p, span.head, i), length = span.pair.tokens[i];
    }
    first = max(span.first - before, 0);
    last = min(span.last - before, count);
  }
};

// Warps that take the tiles of a span in turn.
template <class P>
__device__ int warps_of() {
  return P::kAlone || P::kTeam ? 1 : int(blockDim.x / 32);
}

// Which tile of a run is this warp's first. Parts are dealt from both ends in turn. So the few
// tiles of a 16-bit tail and the last ones of a quantized part fall to different warps.
__device__ inline int turn_of(int part) {
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  return part % 2 ? warps - 1 - warp : warp;
}

// What the queries of a run take in a ring.
template <class P, int kSlots>
__device__ int query_bytes(const P& p, const HeadParams<kSlots>& head) {
  return most_columns(p) * head.rank_k * 2;
}

// What a producer needs only from run to run. It is in shared memory, one for each warp, and leaves
// registers to the tiles.
template <int kParts>
struct Runs {
  Walk<kParts> walk;                                 // where the run ahead lies, while walk.valid
  int part, unit, last, length;                      // the run ahead
  int now_sequence, now_head, now_part, now_length;  // the run in hand; the length of its part
  int first_sequence, first_head;                    // of the first run
};

// How 16-bit tiles are copied, 512 bytes at a time.
struct Copies {
  int k, v, tokens;         // of a tile
  uint32_t bits_k, bits_v;  // this lane's swizzle
  __device__ void set(int rank_k, int rank_v, int units) {
    k = pinned(units * (rank_k / 16)), v = pinned(units * (rank_v / 16)),
    tokens = units * kRowTokens;
    bits_k = swizzle_bits(rank_k), bits_v = swizzle_bits(rank_v);
  }
};

// Copies 64 rows of `rank` bytes, four times 512 bytes at a time. The swizzle's pattern repeats after one
// or two of these, but at ranks of 96 after three.
__device__ inline void copy_bytes(uint32_t to, const char* from, uint32_t bits, int rank) {
  const int shift = rank == 96 ? 4 : 0;
  bits = bits << 4 | bits >> 28;
#pragma unroll 1
  for (int left = rank; left > 0; left -= 32, to += 2048, from += 2048, bits >>= shift) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t turn = (i ? bits >> 4 * i : bits) & 0x70;
      copy16((to ^ turn) + 512 * i, from + 512 * i, true);
    }
  }
}

// The same of the first `rows` rows; the rest become zeros.
static __device__ __noinline__ void copy_some_bytes(uint32_t to, const char* from, uint32_t bits,
                                                    int rank, int rows) {
  const int shift = rank == 96 ? 4 : 0;
  int valid = rows * (rank / 16) - int(threadIdx.x % 32);
#pragma unroll 1
  for (int left = rank / 8, i = 0; left > 0; --left, to += 512, from += 512, valid -= 32) {
    const uint32_t turn = (i ? bits >> (4 * i - 4) : bits << 4) & 0x70;
    copy16(to ^ turn, from, valid > 0);
    if (++i == 4) i = 0, bits >>= shift;
  }
}

// Copies the first `rows` tokens of a 16-bit tile, K from k on and V from v on, and zeros for the
// rest. Whole warp.
__device__ inline void copy_tile(const Copies& copies, uint32_t to, const char* k, const char* v,
                                 int rows) {
  const int own = threadIdx.x % 32 * 16;
  const uint32_t to_k = to + own, to_v = to_k + copies.k * 512;
  if (rows >= copies.tokens) {
    copy_part<true>(to_k, k + own, copies.bits_k, copies.k, 0);
    copy_part<true>(to_v, v + own, copies.bits_v, copies.v, 0);
  } else {  // the chunks of the rows that exist; a row has copies * 32 / tokens of them
    copy_part<false>(to_k, k + own, copies.bits_k, copies.k,
                     rows * (copies.k * 32 / copies.tokens));
    copy_part<false>(to_v, v + own, copies.bits_v, copies.v,
                     rows * (copies.v * 32 / copies.tokens));
  }
}

// The same in a call whose other tiles are quantized. It is a function of its own, so that its code
// does not stand in the way of the loop.
static __device__ __noinline__ void copy_tile_apart(uint32_t to, const char* k, const char* v,
                                                    int rank_k, int rank_v, int units, int rows) {
  Copies copies;
  copies.set(rank_k, rank_v, units);
  copy_tile(copies, to, k, v, rows);
}

// The same of a wide lane, row by row. in_keys: V is not copied, K's rows hold it.
static __device__ __noinline__ void copy_wide_tile(uint32_t to, const char* k, const char* v,
                                                   int rank_k, int rank_v, int tokens, int rows,
                                                   bool in_keys) {
  const auto copy_side = [tokens, rows](uint32_t to, const char* from, int rank) {
    const Swizzle swizzle(rank);
    const int chunks = rank / 8;
#pragma unroll 1
    for (int row = 0; row < tokens; ++row, to += chunks * 16, from += chunks * 16) {
      const int turn = swizzle(row);
      for (int c = threadIdx.x % 32; c < chunks; c += 32)
        copy16(to + (c ^ turn) * 16, from + c * 16, row < rows);
    }
  };
  copy_side(to, k, rank_k);
  if (!in_keys) copy_side(to + tokens * rank_k * 2, v, rank_v);
}

// The same of a call whose parts all have 16 bits: every two rows lie kRowGap bytes apart
// (attend_wide.cuh). From 9.0 on two rows are one bulk copy, whose end `barrier` tells.
static __device__ __noinline__ void copy_rows(uint32_t to, const char* k, const char* v, int rank_k,
                                              int rank_v, int tokens, int rows, bool in_keys,
                                              uint32_t barrier) {
  const int lane = threadIdx.x % 32, bytes_k = 2 * rank_k, bytes_v = in_keys ? 0 : 2 * rank_v,
            pairs = tokens / 2;
#if __CUDA_ARCH__ >= 900
  if (lane == 0) announce_copies(barrier, min(rows, tokens) * (bytes_k + bytes_v));
  constexpr int kStep = 32;
  const int first = lane;
#else
  constexpr int kStep = 1;
  const int first = 0;
#endif
#pragma unroll 1
  for (int i = first; i < (in_keys ? pairs : tokens); i += kStep) {
    const bool values = i >= pairs;
    const int pair = values ? i - pairs : i, bytes = values ? bytes_v : bytes_k,
              valid = bytes * max(0, min(2, rows - 2 * pair));
    const uint32_t at = to + (values ? pairs * two_rows(rank_k) : 0) + pair * (2 * bytes + kRowGap);
    const char* from = (values ? v : k) + pair * 2 * bytes;
#if __CUDA_ARCH__ >= 900
    if (valid) copy_bulk(at, from, valid, barrier);
    for (int c = valid; c < 2 * bytes; c += 16) shared_at<uint4>(at + c) = {0, 0, 0, 0};
#else
    for (int c = lane * 16; c < 2 * bytes; c += 512) copy16(at + c, from + c, c < valid);
#endif
  }
  __syncwarp();
}

// Where the tile placed last lies, for warps that attend it without a ring of their own: behind the
// barriers, by their number.
constexpr int kPlaces = kSlots * 8;
__device__ inline void put_place(const Ring& ring, uint32_t at, int room) {
  if (threadIdx.x % 32) return;
  store_word(ring.newest_barrier() + kPlaces, at);
  store_word(ring.newest_barrier() + kPlaces + 4, uint32_t(room));
}

// What a producer knows of the run in hand. The same in all lanes. FeedState is what changes from tile
// to tile, and is parked each time. The rest is set once a run, by take(), which parks it. Flags are
// whole words here and below, because words load together.
struct FeedState {
  int unit = 0;         // the next tile to fetch
  int taken = 0;        // how many of the 32 addresses that are known are fetched
  int next_room;        // what the next thing takes in the ring: the queries, or a tile
  int queries_due = 0;  // the next thing is the queries
};
struct Feed : FeedState {
  int last = 0;    // the end of the run; nothing is left to fetch where `unit` is not below
  int tile_room;   // of a tile in the ring
  int tile_bytes;  // of a tile in the pool, or of a quantized page
  int stride;      // units from one tile of this warp to its next
  int tile_pages;  // quantized; 0 of a 16-bit run
  int pieces, piece_bytes;  // quantized: pieces of a page's K, which are set apart in the tile
  int fine;                 // one unit a tile
};

// The run being attended. The same in all lanes.
struct Turn {
  int unit = 0, last = 0;    // the next tile, the end
  int head = 0, length = 0;  // length: of the part
  int units = 0, bytes = 0;  // of a tile
  int bits = 0;              // of a number
};

// What a warp needs from tile to tile, but not while it attends one. The feed is not beside the turn:
// it is written within fill(), and a wide load of a turn may take its neighbour's last word.
struct alignas(16) Parked {
  Feed feed;
  Ring ring;
  Turn turn;
  SlabSizes sizes;  // of the run being attended; general calls have no use for it
  int later_ids[32], ahead_ids[32];
};

// A page id of each lane that is asked for long before it is needed. In registers, or in shared
// memory.
template <bool kParks>
struct PageIds {
  int id;
  __device__ explicit PageIds(int*) {}
  __device__ void set(int value) { id = value; }
  __device__ void ask(const int32_t* from, bool valid) { id = valid ? __ldg(from) : 0; }
  __device__ int get() const { return id; }
};
template <>
struct PageIds<true> {
  int* ids;
  __device__ explicit PageIds(int* ids) : ids(ids) {}
  __device__ int& own() const { return ids[threadIdx.x % 32]; }
  __device__ void set(int value) { own() = value; }
  // It is there when the copy group that is closed next has ended. A lane that has nothing to ask for
  // leaves what it has: a copy of zeros might land after the copy that is asked for next.
  __device__ void ask(const int32_t* from, bool valid) {
    if (valid) copy4(&own(), from);
  }
  __device__ int get() const { return own(); }
};

// kBits: as in attend_decode. kParks: ring, feed and turn wait in shared memory while a tile is
// attended.
template <class P, int kBits, bool kParks>
struct Producer : Feed {
  static constexpr int kParts = P::kSlots;
  static constexpr bool kQuantized = is_quantized(kBits),
                        kPieces = is_byte(kBits) || kBits == kSeveralWidths;
  const P& p;
  Ring& ring;
  Runs<kParts>& runs;
  Parked& parked;  // where kParks
  Copies copies;   // where all parts are 16 bit

  // Addresses are worked out for 32 tiles at a time, or for 32 quantized pages: one for each lane.
  const char* from;           // where this lane's tile or page begins; 16 bit: its K
  int delta_v;                // 16 bit: from there to V
  bool second_half = false;   // of a tile in halves: K is fetched, and V is next
  PageIds<kParks> later_ids;  // of what is this lane's after the 32
  PageIds<kParks> ahead_ids;  // of what is this lane's in the run ahead

  __device__ Producer(const P& p, const Planned<kParts>& plan, Runs<kParts>& runs, Ring& ring,
                      Parked& parked)
      : p(p),
        ring(ring),
        runs(runs),
        parked(parked),
        later_ids(parked.later_ids),
        ahead_ids(parked.ahead_ids) {
    fine = plan.share < kFineShare;
    Runs<kParts> ahead{plan.walk, -1};
    look_ahead(ahead, &plan);
    if (threadIdx.x % 32 == 0) {
      runs.first_sequence = runs.walk.span.sequence, runs.first_head = runs.walk.span.head;
      if (kParks) parked.ring = ring;
    }
    __syncwarp();
    if (kParks) {  // for the first page ids: nothing came after them
      close_copy_group();
      wait_copy_groups<0>();
    }
    take();
  }

  // Leaves ring, feed and turn in shared memory, if this producer parks. Whole warp.
  __device__ void park(const Turn& turn) {
    if constexpr (kParks) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        static_cast<RingState&>(parked.ring) = ring;
        static_cast<FeedState&>(parked.feed) = *this;
        parked.turn = turn;
      }
    }
  }
  // Takes ring and feed up again. From here on fill() may overwrite what the ring has dropped: all
  // lanes have read it. So it is called in each turn of a loop, also where nothing is parked.
  __device__ void take_up() {
    __syncwarp();
    if constexpr (kParks) {
      ring = parked.ring;
      static_cast<Feed&>(*this) = parked.feed;
    }
  }
  __device__ void recall(Turn& turn) const {
    if constexpr (kParks) turn = parked.turn;
  }
  // The sizes of the run being attended.
  __device__ void keep(const SlabSizes& sizes) const {
    if (kParks && threadIdx.x % 32 == 0) parked.sizes = sizes;
  }
  __device__ void recall(SlabSizes& sizes) const {
    if constexpr (kParks) sizes = parked.sizes;
  }

  __device__ int units_of(const LaneParams& lane) const { return fine ? 1 : lane.tile_units; }
  // What a tile takes in a ring.
  __device__ int room_of(const LaneParams& lane) const {
    return ring_room(fine ? lane.tile_bytes / lane.tile_units : lane.tile_bytes);
  }
  // Whether a part has rows of bytes, which are copied as 16-bit rows of half the rank.
  __device__ bool in_bytes(int head, int part) const {
    return P::kByteRows && is_byte(p.part_of(head, part).bits);
  }
  __device__ int page_of(int head, int part, int unit) const {
    const PartParams& at = p.part_of(head, part);
    return at.units_per_page == 1 ? unit : int(__umulhi(unit, at.units_per_page_magic));
  }
  // Asks for the page id of unit `own` of a part, if it is below `last`.
  __device__ void ask(PageIds<kParks>& ids, int head, int part, int sequence, int own,
                      int last) const {
    const PartParams& at = p.part_of(head, part);
    const bool valid = own < last;
    ids.ask(at.page_table + int64_t{sequence} * at.table_stride +
                (valid ? page_of(head, part, own) : 0),
            valid);
  }

  // log2 of the pages of a tile, each of which takes a lane.
  __device__ int lanes_of(int head, int part, const LaneParams& lane) const {
    return kQuantized && is_quantized(p.part_of(head, part).bits) && units_of(lane) == 2;
  }
  // This lane's unit, counted from `first` on.
  __device__ static int own_unit(int first, int stride, int lanes) {
    const int lane = threadIdx.x % 32;
    return first + (lane >> lanes) * stride + (lane & lanes);
  }

  // Finds the next run after `ahead` that has tiles for this warp, and asks for its first page ids.
  // `plan` may know some of them. Whole warp.
  __device__ void look_ahead(Runs<kParts>& ahead, const Planned<kParts>* plan = nullptr) {
    Walk<kParts>& walk = ahead.walk;
    int step = 0, lanes = 0;
    if (walk.valid) {
      do {
        if (++ahead.part == kParts) {
          ahead.part = 0;
          walk.next(p);
          if (!walk.valid) break;
        }
        const Run run(p, walk.span, ahead.part);
        const LaneParams& lane = p.head[walk.span.head].lane[ahead.part];
        const int units = units_of(lane);
        lanes = lanes_of(walk.span.head, ahead.part, lane);
        ahead.unit = run.first + (P::kAlone || P::kTeam ? 0 : turn_of(ahead.part)) * units;
        ahead.last = run.last;
        ahead.length = run.length;
        step = warps_of<P>() * units;
      } while (ahead.unit >= ahead.last);
    }
    if (walk.valid) {
      const int own = own_unit(ahead.unit, step, lanes);
      bool known = false;
      if (plan && plan->is_first(walk.span, ahead.part)) {
        const int id = plan->id_of(page_of(walk.span.head, ahead.part, own), known);
        if (known) ahead_ids.set(id);
      }
      if (!known) ask(ahead_ids, walk.span.head, ahead.part, walk.span.sequence, own, ahead.last);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) runs = ahead;
    __syncwarp();
  }

  // Makes the run ahead the one in hand.
  __device__ void take() {
    Runs<kParts> ahead = runs;
    if (!ahead.walk.valid) {
      unit = last = 0;
    } else {
      ahead.now_sequence = ahead.walk.span.sequence, ahead.now_head = ahead.walk.span.head,
      ahead.now_part = ahead.part;
      ahead.now_length = ahead.length;
      unit = ahead.unit, last = ahead.last;
      queries_due = !P::kPlain;
      next_room = P::kPlain ? 0 : ring_room(query_bytes(p, p.head[ahead.now_head]));
      const auto& at = p.head[ahead.now_head];
      const LaneParams& lane = at.lane[ahead.part];
      const int units = units_of(lane), bits = p.part_of(ahead.now_head, ahead.part).bits;
      const bool bulk = kQuantized && is_quantized(bits);
      stride = pinned(warps_of<P>() * units);
      tile_bytes = pinned(bulk ? lane.bytes : lane.bytes * units);
      tile_room = pinned(room_of(lane));
      if (P::kPlain) next_room = tile_room;
      tile_pages = bulk ? units : 0;
      if (bulk) {
        pieces = kPieces && is_byte(bits) ? p.page_tokens / kPieceTokens : 0;
        piece_bytes = kPieceTokens * at.rank_k;
      }
      const int halved = in_bytes(ahead.now_head, ahead.part);
      if (P::kKeyPages && halved)
        copies.set(kChunkTokens / 2, at.rank_v / 2, 1);
      else if (!kQuantized && !P::kPlain)
        copies.set(at.rank_k >> halved, at.rank_v >> halved, units);
      // The page ids are in the copy group of the queries of the run that ends here, and a tile's
      // group came after it. On GPUs without bulk copies this waits for tiles, too.
      if constexpr (kParks) wait_copy_groups<1>();
      locate(ahead_ids.get(), ahead.now_sequence, ahead.now_head, ahead.now_part);
      look_ahead(ahead);
      if (P::kPlain) close_copy_group();  // of the page ids: no queries follow
    }
    if constexpr (kParks) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) parked.feed = *this;
    }
  }

  // Turns the page ids of the next 32 into addresses, and asks for those of the 32 after them.
  __device__ void locate(int page_id, int sequence, int head, int part) {
    const auto& at = p.head[head];
    const LaneParams& lane = at.lane[part];
    const int lanes = lanes_of(head, part, lane), own = own_unit(unit, stride, lanes);
    from = p.pool + page_id * p.part_of(head, part).page_stride + lane.k;
    if (!tile_pages && !in_bytes(head, part)) {
      const int in_page = own - page_of(head, part, own) * p.part_of(head, part).units_per_page;
      from += in_page * (at.rank_k * 2 * kRowTokens);
      delta_v = lane.v - lane.k + in_page * (at.rank_v - at.rank_k) * 2 * kRowTokens;
    }
    ask(later_ids, head, part, sequence, own + (32 >> lanes) * stride, last);
    taken = 0;
  }

  // Whether the kernel before this one writes nothing of the next tile: with KVLATHE_APPENDED it
  // writes the last row of a 16-bit part at most.
  __device__ bool steady() const {
    return tile_pages || in_bytes(runs.now_head, runs.now_part) ||
           (!kQuantized && runs.now_length - unit * kRowTokens > copies.tokens);
  }

  // Asks for all that the ring has room for. If `early`, only for steady tiles of the first run:
  // its queries are not there yet.
  __device__ void fill(bool early) {
    while (unit < last) {
      if (early && (queries_due ? ring.tiles != 0 : !steady())) return;
      const uint32_t to = ring.place(next_room);
      if (!to) return;
      if (queries_due) {
        if (!early) fetch_queries(to, query_bytes(p, p.head[runs.now_head]));
        close_copy_group();
        queries_due = false;
        next_room = tile_room;
        continue;
      }
      fetch(to);
      close_copy_group();
      if (in_bytes(runs.now_head, runs.now_part)) {
        second_half = !second_half;
        if (second_half) continue;
      }
      unit += stride;
      if (unit >= last) {
        take();
      } else if (taken == 32) {
        // The page ids were asked for 16 tiles ago or more, each of which closed a copy group.
        if constexpr (kParks) wait_copy_groups<kMostTiles>();
        locate(later_ids.get(), runs.now_sequence, runs.now_head, runs.now_part);
      }
    }
  }

  // Fetches the queries of the first run, for which an early fill has left room.
  __device__ void fetch_first_queries() const {
    if (P::kBundled || !ring.tiles) return;
    const auto& head = p.head[runs.first_head];
    const auto* q =
        reinterpret_cast<const uint4*>(p.q + runs.first_sequence * p.q_stride + head.q_offset);
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < query_bytes(p, head) / 16; i += 32)
      shared_at<uint4>(ring.base + 16 * i) = __ldcg(q + i);
    __syncwarp();
  }

  __device__ void fetch_queries(uint32_t to, int bytes) const {
    if constexpr (P::kBundled) return fetch_bundle(to);
    const auto* q = reinterpret_cast<const char*>(p.q + runs.now_sequence * p.q_stride +
                                                  p.head[runs.now_head].q_offset);
#pragma unroll 1
    for (int at = threadIdx.x % 32 * 16; at < bytes; at += 512) copy16(to + at, q + at, true);
  }

  // Fetches the queries of a bundle's tile. Those of a row lie side by side in q.
  __device__ void fetch_bundle(uint32_t to) const {
    const auto& head = p.head[runs.now_head];
    const int of_column = head.rank_k * 2, of_row = p.group_size * of_column,
              first = first_column(p, runs.now_head) * of_column,
              bytes = columns_of(p, runs.now_head, rows_in(runs.now_length)) * of_column;
    const auto* q =
        reinterpret_cast<const char*>(p.q + runs.now_sequence * p.q_stride + head.q_offset);
#pragma unroll 1
    for (int at = threadIdx.x % 32 * 16; at < bytes; at += 512) {
      const int row = (first + at) / of_row;
      copy16(to + at, q + row * p.q_stride * 2 + (first + at - row * of_row), true);
    }
  }

  // Fetches the pages of a tile. Each lane copies the page it holds, if that is one of them.
  __device__ void fetch_pages(uint32_t to) {
    const uint32_t barrier = ring.newest_barrier();
    const int pages = min(tile_pages, last - unit), own = int(threadIdx.x % 32) - taken;
    if (own == 0) announce_copies(barrier, pages * tile_bytes);
    const int gaps = kPieces ? pieces * kPieceGap : 0;
    const auto start_of = [&](int page) {
      return reinterpret_cast<const char*>(
          __shfl_sync(~0u, reinterpret_cast<uint64_t>(from), taken + page));
    };
#if __CUDA_ARCH__ >= 900
    if (!kPieces || !pieces) {
      if (own >= 0 && own < pages) copy_bulk(to + own * tile_bytes, from, tile_bytes, barrier);
    } else {
      // A lane copies one piece of K, and one lane all that follows K.
      const int piece = threadIdx.x % 32, at = piece * piece_bytes;
#pragma unroll 1
      for (int page = 0; page < pages; ++page, to += tile_bytes + gaps) {
        const char* start = start_of(page);
        if (piece <= pieces)
          copy_bulk(to + at + piece * kPieceGap, start + at,
                    piece < pieces ? piece_bytes : tile_bytes - at, barrier);
      }
    }
#else
    for (int page = 0; page < pages; ++page, to += tile_bytes + gaps) {
      const char* start = start_of(page);
      for (int at = threadIdx.x % 32 * 16; at < tile_bytes; at += 512) {
        const int before = kPieces ? min(at / max(piece_bytes, 1), pieces) : 0;  // pieces before it
        copy16(to + at + before * kPieceGap, start + at, true);
      }
    }
#endif
    taken += tile_pages;
  }

  __device__ void fetch(uint32_t to) {
    if (!P::kPlain && tile_pages) return fetch_pages(to);
    const char* k =
        reinterpret_cast<const char*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(from), taken));
    if constexpr (P::kByteRows) {
      if (in_bytes(runs.now_head, runs.now_part)) return fetch_half(to, k);
    }
    const char* v = k + __shfl_sync(~0u, delta_v, taken);
    const int rows = tokens_of<P>(runs.now_length) - unit * kRowTokens;
    if constexpr (kQuantized || P::kPlain) {
      const auto& head = p.head[runs.now_head];
      const LaneParams& lane = head.lane[runs.now_part];
      if constexpr (P::kTeam) put_place(ring, to, next_room);
      if constexpr (P::kPlain)
        copy_rows(to, k, v, head.rank_k, head.rank_v, units_of(lane) * kRowTokens, rows,
                  lane.v == lane.k, ring.newest_barrier());
      else if constexpr (P::kWide)
        copy_wide_tile(to, k, v, head.rank_k, head.rank_v, units_of(lane) * kRowTokens, rows,
                       lane.v == lane.k);
      else
        copy_tile_apart(to, k, v, head.rank_k, head.rank_v, units_of(lane), rows);
    } else {
      copy_tile(copies, to, k, v, rows);
    }
    ++taken;
  }

  // Fetches a half of a tile of rows of bytes: K or V of 64 tokens of a page, and then its metadata.
  // Rows of tokens that do not exist become zeros.
  __device__ void fetch_half(uint32_t to, const char* page) {
    const auto& head = p.head[runs.now_head];
    const PartParams& part = p.part_of(runs.now_head, runs.now_part);
    const LaneParams& lane = head.lane[runs.now_part];
    const bool by_channel = P::kKeyPages && !second_half;
    const int rank = second_half ? head.rank_v : head.rank_k, own = threadIdx.x % 32 * 16;
    const int first =
        (unit - page_of(runs.now_head, runs.now_part, unit) * part.units_per_page) * kChunkTokens;
    const char* from = page + (second_half ? lane.v - lane.k : 0) + first * rank + own;
    const int rows = runs.now_length - unit * kChunkTokens;
    if (by_channel || rows >= kChunkTokens)
      copy_bytes(to + own, from, second_half ? copies.bits_v : copies.bits_k, rank);
    else
      copy_some_bytes(to + own, from, second_half ? copies.bits_v : copies.bits_k, rank, rows);
    const int bytes = by_channel ? rank * kPairBytes : kChunkTokens * P::kMetaBytes;
    if (own < bytes)
      copy16(to + rank * kChunkTokens + own,
             page + 16 * (second_half ? lane.v_meta : lane.k_meta) + first * P::kMetaBytes + own,
             true);
    taken += second_half;
  }
};

}  // namespace kvlathe::cuda
