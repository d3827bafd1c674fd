// The division of work among blocks. Decode is bound by the bytes it reads, and ranks and lengths differ. So
// all work stands in one row, and block c takes bytes [c, c + 1) x share of it, rounded up to whole
// tiles.
//
//   weight    bytes in units of 128: 31 bits hold a layer's work up to 256 GB
//   work      sequence 0: head 0: units of slot 0, units of slot 1, ... | head 1: ...
//             | sequence 1: ...
//   unit      16 tokens of a 16-bit lane, or a page of a quantized one
//   tile      the units that a warp takes at once
//   position  (sequence, head, unit), found from a weight in prefix sums over sequences and heads
//   span      the units of one (sequence, head) that one block takes
//
// Nothing is sorted. All spans of a block but its first and its last are whole pairs, so it leaves
// at most two partial results. A block finds its work by itself, or one launch has planned all
// calls of a step before (plan.cu).
#pragma once

#include "cuda/decode/bundles.cuh"

namespace kvlathe::cuda {

struct Position {
  int sequence, head, unit;
};

__device__ inline int length_of(const PartParams& part, int sequence) {
  return __ldg(part.lengths + sequence * part.lengths_stride);
}

// Tokens of a sequence in each part. Nothing where lanes name their parts: these are many. P: Params,
// or what the plan kernel knows of them.
template <int kParts>
struct Lengths {
  int tokens[kParts];

  Lengths() = default;
  template <class P>
  __device__ Lengths(const P& p, int sequence) {
    if constexpr (!P::kNamed) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) tokens[i] = length_of(p.part[i], sequence);
    }
  }
};

// Tokens of a pair, a (sequence, head), in each slot, and the numbers of units that follow.
template <int kParts>
struct Pair {
  int tokens[kParts];

  Pair() = default;
  template <class P>
  __device__ Pair(const P& p, const Lengths<kParts>& lengths, int sequence, int head) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const bool held = p.head[head].lane[i].weight;
      if constexpr (P::kNamed)
        tokens[i] = held ? length_of(p.part_of(head, i), sequence) : 0;
      else
        tokens[i] = held ? lengths.tokens[i] : 0;
      if constexpr (P::kBundled) {  // they stay lengths
        if (columns_of(p, head, rows_in(tokens[i])) < 1) tokens[i] = tokens[i] < 0 ? -1 : 0;
      }
    }
  }
  // Of a call with bundles: the columns of the pair's tile.
  template <class P>
  __device__ int columns(const P& p, int head) const {
    int rows = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) rows = max(rows, rows_in(tokens[i]));
    return columns_of(p, head, rows);
  }
  __device__ static int units_of(const PartParams& part, int tokens) {
    return (tokens + (1 << part.unit_shift) - 1) >> part.unit_shift;
  }
  template <class P>
  __device__ int units(const P& p, int head, int slot) const {
    return units_of(p.part_of(head, slot), tokens_of<P>(tokens[slot]));
  }
  template <class P>
  __device__ int units(const P& p, int head) const {
    int n = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) n += units(p, head, i);
    return n;
  }
  template <class P>
  __device__ int weight(const P& p, int head) const {
    int n = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) n += units(p, head, i) * p.head[head].lane[i].weight;
    return n;
  }
};

template <int kParts>
struct Span {
  int sequence, head;
  int first, last, total;  // units [first, last) of the pair's `total`, slot after slot
  Pair<kParts> pair;
};

// The sum of x over the lanes up to this one, within kWidth lanes. Whole warp.
template <int kWidth = 32>
__device__ inline int inclusive_sum(int x) {
#pragma unroll
  for (int step = 1; step < kWidth; step *= 2) {
    const int other = __shfl_up_sync(~0u, x, step, kWidth);
    if (int(threadIdx.x % kWidth) >= step) x += other;
  }
  return x;
}

// The first unit of the first tile that starts `rest` or more into a pair. Weights are counted slot
// after slot.
template <int kParts, class P>
__device__ int unit_at(const P& p, const Pair<kParts>& pair, int head, int rest) {
  int unit = 0;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const auto& lane = p.head[head].lane[i];
    if (rest <= 0 || !lane.weight) continue;
    const int wanted = (int(unsigned(rest + lane.weight - 1) / lane.weight) + lane.tile_units - 1) &
                       -int(lane.tile_units);
    const int skipped = min(pair.units(p, head, i), wanted);
    unit += skipped;
    rest = skipped < wanted ? rest - skipped * lane.weight : 0;
  }
  return unit;
}

// A place among the spans of one block; empty ones are skipped. It is plain data, because it waits
// in shared memory between its few uses.
template <int kParts>
struct Walk {
  Position end;
  Span<kParts> span;
  // Of the span's sequence. They are kept, because a load would queue behind all bytes on their
  // way.
  Lengths<kParts> lengths;
  bool valid;

  template <class P>
  __device__ static Walk start(const P& p, const Position& begin, const Position& end) {
    Walk walk;
    walk.end = end;
    walk.span.sequence = begin.sequence;
    walk.span.head = begin.head;
    if (begin.sequence < p.batch) walk.lengths = Lengths<kParts>(p, begin.sequence);
    walk.enter(p, begin.unit);
    if (walk.valid && walk.span.first >= walk.span.last) walk.next(p);
    return walk;
  }

  // Enters (span.sequence, span.head) at a unit; clears `valid` past the block's end.
  template <class P>
  __device__ void enter(const P& p, int first) {
    const bool final = span.sequence == end.sequence && span.head == end.head;
    valid =
        span.sequence < end.sequence || (span.sequence == end.sequence && span.head <= end.head);
    valid = valid && span.sequence < p.batch && !(final && end.unit == 0);
    if (!valid) return;
    span.pair = Pair<kParts>(p, lengths, span.sequence, span.head);
    span.total = span.pair.units(p, span.head);
    span.first = first;
    span.last = final ? end.unit : span.total;
  }

  // What comes after a pair of a call with bundles: tiles that there are, and the next bundle.
  template <class P>
  __device__ void skip(const P& p) {
    const int length = P::kNamed ? length_of(p.part[0], span.sequence) : lengths.tokens[0];
    const int rows = max(1, rows_in(length)), tile = span.head % p.tiles;
    if (tile && columns_of(p, span.head, rows) < 1) span.head += p.tiles - tile;
    if (span.head == p.heads) span.sequence += rows - 1;
  }

  template <class P>
  __device__ void next(const P& p) {
    do {
      ++span.head;
      if constexpr (P::kBundled) skip(p);
      if (span.head == p.heads) {
        span.head = 0;
        if (++span.sequence < p.batch) lengths = Lengths<kParts>(p, span.sequence);
      }
      enter(p, 0);
    } while (valid && span.first >= span.last);
  }
};

// The work of one block. Every warp finds it for itself, so that no barrier is needed.
template <int kParts>
struct Plan {
  int share;        // weight of a block: at least a tile's, so none between two others is empty
  int begin_start;  // weight at which the first span's pair starts
  bool any;
  bool some_empty;    // some sequence has no tokens in some part
  Walk<kParts> walk;  // at the block's first span

  Plan() = default;
  template <class P>
  __device__ Plan(const P& p, int block, int blocks) {
    const int lane = threadIdx.x % 32;
    // `stop`: past the last sequence with work. The rows of prompt chunks have none here and come
    // last, and a walk over thousands of them would take longer than the work.
    int own = 0, stop = 0;
    bool empty = false;
#pragma unroll 1
    for (int b = lane; b < p.batch; b += 32) {
      const int here = weight(p, b, empty);
      own += here;
      if (here) stop = b + 1;
    }
    some_empty = __any_sync(~0u, empty);
    for (int step = 16; step; step /= 2) {
      own += __shfl_xor_sync(~0u, own, step);
      stop = max(stop, __shfl_xor_sync(~0u, stop, step));
    }
    if (own / blocks < kSpareShare) blocks -= p.spare_blocks;
    share = max(p.least_block_weight, int((unsigned(own) + blocks - 1) / unsigned(blocks)));
    const int from = block * share, to = from + share;
    any = from < own;
    walk.valid = false;
    if (!any) return;
    Start begin{stop, 0}, end{stop, 0};
    int before = 0;
    for (int base = 0; base < stop && end.sequence == stop; base += 32) {
      const int here = base + lane < stop ? weight(p, base + lane, empty) : 0,
                upto = before + inclusive_sum(here);
      if (begin.sequence == stop) begin.enter(base, upto, here, from);
      if (end.sequence == stop) end.enter(base, upto, here, to);
      before = __shfl_sync(~0u, upto, 31);
    }
    descend(p, begin, end, from, to, stop);
  }

 private:
  struct Start {
    int sequence, weight;  // weight: at which the sequence starts

    // Finds the sequence that reaches beyond x, if it is one of the warp's 32 from `base` on.
    __device__ void enter(int base, int upto, int own, int x) {
      const unsigned beyond = __ballot_sync(~0u, upto > x);
      if (!beyond) return;
      sequence = base + __ffs(beyond) - 1;
      weight = __shfl_sync(~0u, upto - own, __ffs(beyond) - 1);
    }
  };

  template <class P>
  __device__ static int weight(const P& p, int sequence, bool& empty) {
    int sum = 0;
    if constexpr (P::kBundled) {  // a row that goes with one before it is no empty one
      if (length_of(p.part[0], sequence) < 0) return 0;
    }
    if constexpr (P::kNamed) {
#pragma unroll 1
      for (int i = 0; i < p.parts; ++i) {
        const int length = length_of(p.part[i], sequence);
        empty |= tokens_of<P>(length) == 0;
        sum += weight_of(p, i, length) * Pair<kParts>::units_of(p.part[i], tokens_of<P>(length));
      }
      return sum;
    }
    const Lengths<kParts> lengths(p, sequence);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      empty |= tokens_of<P>(lengths.tokens[i]) == 0;
      sum += weight_of(p, i, lengths.tokens[i]) *
             Pair<kParts>::units_of(p.part[i], tokens_of<P>(lengths.tokens[i]));
    }
    return sum;
  }

  // Of a unit of a part in all heads. With bundles part_weight is that of one tile.
  template <class P>
  __device__ static int weight_of(const P& p, int part, int length) {
    if constexpr (P::kBundled)
      return p.part_weight[part] *
             ((rows_in(length) * p.group_size + P::kColumns - 1) / P::kColumns);
    return p.part_weight[part];
  }

  // Finds heads and units. One half of the warp looks for the begin, the other for the end.
  template <class P>
  __device__ void descend(const P& p, const Start& begin, const Start& end, int from, int to,
                          int stop) {
    const int lane = threadIdx.x % 32, side = lane / 16, x = side ? to : from;
    const int sequence = min(side ? end.sequence : begin.sequence, stop - 1);
    const Lengths<kParts> lengths(p, sequence);
    int start = side ? end.weight : begin.weight, head = -1;
    for (int first = 0; first < p.heads; first += 16) {
      const int h = first + lane % 16,
                own = h < p.heads ? Pair<kParts>(p, lengths, sequence, h).weight(p, h) : 0;
      const int ends = start + inclusive_sum<16>(own);
      const unsigned later = __ballot_sync(~0u, ends > x) >> 16 * side & 0xffff;
      const int hit = later ? __ffs(later) - 1 : 15;
      const int next = __shfl_sync(~0u, later ? ends - own : ends, hit, 16);
      if (head < 0) start = next, head = later ? first + hit : -1;
      if (__all_sync(~0u, head >= 0)) break;
    }
    head = max(head, 0);  // an end beyond all work has none
    const int unit = unit_at(p, Pair<kParts>(p, lengths, sequence, head), head, x - start);
    begin_start = __shfl_sync(~0u, start, 0);
    Position last{stop, 0, 0};
    if (end.sequence < stop)
      last = {end.sequence, __shfl_sync(~0u, head, 16), __shfl_sync(~0u, unit, 16)};
    walk = Walk<kParts>::start(
        p, {begin.sequence, __shfl_sync(~0u, head, 0), __shfl_sync(~0u, unit, 0)}, last);
  }
};

// What the plan kernel leaves for one block of one call: its Plan, and the first page ids that it
// needs. A warp reads both in one round of loads. Nothing else stands between the start of a block
// and its first tile.
constexpr int kPlannedIds = 64;
struct alignas(16) PlanHeader {
  uint32_t tag;  // Params::plan_tag of the call that it was made for
  int32_t slot;  // of the first span's first unit
  int32_t first_page;
  Plan<KVLATHE_MAX_SLOTS> plan;
};
struct alignas(128) PlanRecord {
  PlanHeader header;
  // Of pages first_page, first_page + 1, ... of that sequence and slot.
  alignas(128) int32_t ids[kPlannedIds];
};

// The plan of this block: what the plan kernel left for it, or what is found here without that.
template <int kParts>
struct Planned : Plan<kParts> {
  int slot = -1;           // of the known page ids; -1: there are none
  int first_page, ids[2];  // lane t has those of pages first_page + t and first_page + 32 + t

  template <class P>
  __device__ explicit Planned(const P& p) {
    if (p.plan) {
      const PlanRecord& record = p.plan[blockIdx.x];
      const int lane = threadIdx.x % 32, low = __ldcg(record.ids + lane),
                high = __ldcg(record.ids + 32 + lane);
      const PlanHeader header = record.header;
      if (header.tag == p.plan_tag) {
        take(header.plan);
        slot = header.slot, first_page = header.first_page, ids[0] = low, ids[1] = high;
        return;
      }
    }
    static_cast<Plan<kParts>&>(*this) = Plan<kParts>(p, int(blockIdx.x), int(gridDim.x));
  }

  __device__ bool is_first(const Span<kParts>& span, int of_slot) const {
    return of_slot == slot && span.head == this->walk.span.head &&
           span.sequence == this->walk.span.sequence;
  }
  // The id of a page of that sequence and slot. `known`: whether this lane's is. Whole warp.
  __device__ int id_of(int page, bool& known) const {
    const int i = page - first_page;
    known = i >= 0 && i < kPlannedIds;
    const int low = __shfl_sync(~0u, ids[0], i & 31), high = __shfl_sync(~0u, ids[1], i & 31);
    return i < 32 ? low : high;
  }

 private:
  __device__ void take(const Plan<KVLATHE_MAX_SLOTS>& from) {
    this->share = from.share, this->begin_start = from.begin_start;
    this->any = from.any, this->some_empty = from.some_empty;
    Walk<kParts>& walk = this->walk;
    const Span<KVLATHE_MAX_SLOTS>& span = from.walk.span;
    walk.end = from.walk.end, walk.valid = from.walk.valid;
    walk.span = {span.sequence, span.head, span.first, span.last, span.total, {}};
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      walk.lengths.tokens[i] = from.walk.lengths.tokens[i];
      walk.span.pair.tokens[i] = span.pair.tokens[i];
    }
  }
};

}  // namespace kvlathe::cuda
