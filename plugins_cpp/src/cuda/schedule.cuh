// The byte-interval schedule: block c takes bytes [c, c + 1) x share of the step's work, rounded up to whole tiles.
//
//   weight    = bytes in units of 512: one layer's work fits 31 bits up to 1 TB
//   work      = sequence 0: head 0: units of part 0, units of part 1, ... | head 1: ... | sequence 1: ...
//   unit      = 16 tokens of one lane; a tile is the few units that a warp takes at once
//   position  = (sequence, head, unit), found from a weight in the prefix sums over sequences and heads
//   span      = the units of one (sequence, head) that one block takes
//
// No sort and no plan kernel. A block's spans are whole pairs but for its first and its last: at most two partial
// results.
#pragma once

#include "params.h"

namespace kvlathe::cuda {

struct Position {
  int sequence, head, unit;
  int start;  // weight at which the pair starts
};

// Tokens of a (sequence, head) pair in each part, and the unit counts that follow.
template <int kParts>
struct Pair {
  int tokens[kParts];

  Pair() = default;
  __device__ Pair(const Params<kParts>& p, int sequence, int head) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      tokens[i] = p.head[head].lane[i].weight ? __ldg(p.part[i].lengths + sequence * p.part[i].lengths_stride) : 0;
    }
  }
  __device__ static int units_of(int tokens) { return (tokens + kUnitTokens - 1) / kUnitTokens; }
  __device__ int units(int part) const { return units_of(tokens[part]); }
  __device__ int units() const {
    int n = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) n += units(i);
    return n;
  }
  __device__ int weight(const HeadParams<kParts>& head) const {
    int n = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) n += units(i) * head.lane[i].weight;
    return n;
  }
  // Weight of the pair before its last tile.
  __device__ int weight_before_last(const HeadParams<kParts>& head) const {
    int before = 0, n = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const LaneParams& lane = head.lane[i];
      if (units(i)) before = n + ((units(i) - 1) & -lane.tile_units) * lane.weight;
      n += units(i) * lane.weight;
    }
    return before;
  }
};

template <int kParts>
struct Span {
  int sequence, head, first, last, total;  // units [first, last) of the pair's `total`, part after part
  Pair<kParts> pair;
};

// Sum of x over the lanes up to this one. Whole warp.
__device__ inline int inclusive_sum(int x) {
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, x, step);
    if (int(threadIdx.x % 32) >= step) x += other;
  }
  return x;
}

// The first tile of a pair that starts `rest` into it or later.
template <int kParts>
__device__ int unit_at(const Pair<kParts>& pair, const HeadParams<kParts>& head, int rest) {
  int unit = 0;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const LaneParams& lane = head.lane[i];
    if (rest <= 0 || !lane.weight) continue;
    const int wanted = ((rest + lane.weight - 1) / lane.weight + lane.tile_units - 1) & -lane.tile_units;
    const int skipped = min(pair.units(i), wanted);
    unit += skipped;
    rest = skipped < wanted ? rest - skipped * lane.weight : 0;
  }
  return unit;
}

// The work of this block. Every warp finds it for itself, so no barrier is needed.
template <int kParts>
struct Plan {
  int share;  // weight a block; at least a tile's, so no block between two others is empty
  bool any;
  bool some_empty;  // some sequence has no tokens in some part
  Position begin, end;

  __device__ explicit Plan(const Params<kParts>& p) {
    const int lane = threadIdx.x % 32;
    int own = 0;
    bool empty = false;
    for (int b = lane; b < p.batch; b += 32) {
      own += weight(p, b);
#pragma unroll
      for (int i = 0; i < kParts; ++i) empty |= __ldg(p.part[i].lengths + b * p.part[i].lengths_stride) == 0;
    }
    some_empty = __any_sync(~0u, empty);
    const int total = __shfl_sync(~0u, inclusive_sum(own), 31);
    share = max(p.least_block_weight, int((unsigned(total) + gridDim.x - 1) / gridDim.x));
    const int from = blockIdx.x * share, to = from + share;
    any = from < total;
    begin = end = {p.batch, 0, 0, 0};
    if (!any) return;
    int before = 0;
    for (int base = 0; base < p.batch && end.sequence == p.batch; base += 32) {
      const int weight_here = base + lane < p.batch ? weight(p, base + lane) : 0;
      const int upto = before + inclusive_sum(weight_here);
      if (begin.sequence == p.batch) begin = find(p, base, upto, weight_here, from);
      end = find(p, base, upto, weight_here, to);
      before = __shfl_sync(~0u, upto, 31);
    }
  }

  // The block that takes the tile starting at weight x.
  __device__ int owner(int x) const { return unsigned(x) / unsigned(share); }

 private:
  __device__ static int weight(const Params<kParts>& p, int sequence) {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      sum += p.part_weight[i] * Pair<kParts>::units_of(__ldg(p.part[i].lengths + sequence * p.part[i].lengths_stride));
    }
    return sum;
  }

  // The first tile that starts at x or later, if one of the warp's 32 sequences from `base` on reaches beyond x.
  __device__ static Position find(const Params<kParts>& p, int base, int upto, int own, int x) {
    const unsigned beyond = __ballot_sync(~0u, upto > x);
    if (!beyond) return {p.batch, 0, 0, 0};
    const int at = __ffs(beyond) - 1, lane = threadIdx.x % 32, sequence = base + at;
    int start = __shfl_sync(~0u, upto - own, at);
    for (int first = 0; first < p.heads; first += 32) {
      const int own_pair =
          first + lane < p.heads ? Pair<kParts>(p, sequence, first + lane).weight(p.head[first + lane]) : 0;
      const int ends = start + inclusive_sum(own_pair);
      if (const unsigned later = __ballot_sync(~0u, ends > x)) {
        const int hit = __ffs(later) - 1, head = first + hit;
        start = __shfl_sync(~0u, ends - own_pair, hit);
        return {sequence, head, unit_at(Pair<kParts>(p, sequence, head), p.head[head], x - start), start};
      }
      start = __shfl_sync(~0u, ends, 31);
    }
    return {sequence + 1, 0, 0, start};
  }
};

// Walks the spans of one block, skipping empty ones.
template <int kParts>
struct SpanWalk {
  const Params<kParts>& p;
  Position end;
  Span<kParts> span;
  bool valid;

  __device__ SpanWalk(const Params<kParts>& p, const Plan<kParts>& plan) : p(p), end(plan.end) {
    span.sequence = plan.begin.sequence;
    span.head = plan.begin.head;
    enter(plan.begin.unit);
    if (valid && span.first >= span.last) next();
  }

  // Enters (span.sequence, span.head) at a unit; clears `valid` past the block's end.
  __device__ void enter(int first) {
    const bool final = span.sequence == end.sequence && span.head == end.head;
    valid = span.sequence < end.sequence || (span.sequence == end.sequence && span.head <= end.head);
    valid = valid && span.sequence < p.batch && !(final && end.unit == 0);
    if (!valid) return;
    span.pair = Pair<kParts>(p, span.sequence, span.head);
    span.total = span.pair.units();
    span.first = first;
    span.last = final ? end.unit : span.total;
  }

  __device__ void next() {
    do {
      if (++span.head == p.heads) {
        span.head = 0;
        ++span.sequence;
      }
      enter(0);
    } while (valid && span.first >= span.last);
  }
};

}  // namespace kvlathe::cuda
