// The byte-interval schedule: block c takes bytes [c, c + 1) x share of the step's work, rounded up to whole tiles.
//
//   weight    = bytes in units of 128: one layer's work fits 31 bits up to 256 GB
//   work      = sequence 0: head 0: units of part 0, units of part 1, ... | head 1: ... | sequence 1: ...
//   unit      = 16 tokens of one 16-bit lane, a page of a quantized one; a tile is the units that a warp takes at once
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
  __device__ static int units_of(const PartParams& part, int tokens) {
    return (tokens + (1 << part.unit_shift) - 1) >> part.unit_shift;
  }
  __device__ int units(const Params<kParts>& p, int part) const { return units_of(p.part[part], tokens[part]); }
  __device__ int units(const Params<kParts>& p) const {
    int n = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) n += units(p, i);
    return n;
  }
  __device__ int weight(const Params<kParts>& p, int head) const {
    int n = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) n += units(p, i) * p.head[head].lane[i].weight;
    return n;
  }
};

template <int kParts>
struct Span {
  int sequence, head, first, last, total;  // units [first, last) of the pair's `total`, part after part
  Pair<kParts> pair;
};

// Sum of x over the lanes up to this one, in each kWidth lanes. Whole warp.
template <int kWidth = 32>
__device__ inline int inclusive_sum(int x) {
#pragma unroll
  for (int step = 1; step < kWidth; step *= 2) {
    const int other = __shfl_up_sync(~0u, x, step, kWidth);
    if (int(threadIdx.x % kWidth) >= step) x += other;
  }
  return x;
}

// The first tile of a pair that starts `rest` into it or later.
template <int kParts>
__device__ int unit_at(const Params<kParts>& p, const Pair<kParts>& pair, int head, int rest) {
  int unit = 0;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const LaneParams& lane = p.head[head].lane[i];
    if (rest <= 0 || !lane.weight) continue;
    const int wanted =
        (int(unsigned(rest + lane.weight - 1) / lane.weight) + lane.tile_units - 1) & -int(lane.tile_units);
    const int skipped = min(pair.units(p, i), wanted);
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
#pragma unroll 1
    for (int b = lane; b < p.batch; b += 32) own += weight(p, b, empty);
    some_empty = __any_sync(~0u, empty);
    for (int step = 16; step; step /= 2) own += __shfl_xor_sync(~0u, own, step);
    share = max(p.least_block_weight, int((unsigned(own) + gridDim.x - 1) / gridDim.x));
    const int from = blockIdx.x * share, to = from + share;
    any = from < own;
    begin = end = {p.batch, 0, 0, 0};
    if (!any) return;
    int before = 0;
    for (int base = 0; base < p.batch && end.sequence == p.batch; base += 32) {
      const int here = base + lane < p.batch ? weight(p, base + lane, empty) : 0, upto = before + inclusive_sum(here);
      if (begin.sequence == p.batch) enter(p, begin, base, upto, here, from);
      enter(p, end, base, upto, here, to);
      before = __shfl_sync(~0u, upto, 31);
    }
    descend(p, from, to);
  }

 private:
  __device__ static int weight(const Params<kParts>& p, int sequence, bool& empty) {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int tokens = __ldg(p.part[i].lengths + sequence * p.part[i].lengths_stride);
      empty |= tokens == 0;
      sum += p.part_weight[i] * Pair<kParts>::units_of(p.part[i], tokens);
    }
    return sum;
  }

  // Finds the sequence that reaches beyond x, if it is one of the warp's 32 from `base` on.
  __device__ static void enter(const Params<kParts>& p, Position& at, int base, int upto, int own, int x) {
    const unsigned beyond = __ballot_sync(~0u, upto > x);
    if (!beyond) return;
    at.sequence = base + __ffs(beyond) - 1;
    at.start = __shfl_sync(~0u, upto - own, __ffs(beyond) - 1);
  }

  // Finds heads and units: one half of the warp looks for the begin, the other for the end.
  __device__ void descend(const Params<kParts>& p, int from, int to) {
    const int lane = threadIdx.x % 32, side = lane / 16, x = side ? to : from;
    const int sequence = min(side ? end.sequence : begin.sequence, p.batch - 1);
    int start = side ? end.start : begin.start, head = -1;
    for (int first = 0; first < p.heads; first += 16) {
      const int h = first + lane % 16, own = h < p.heads ? Pair<kParts>(p, sequence, h).weight(p, h) : 0;
      const int ends = start + inclusive_sum<16>(own);
      const unsigned later = __ballot_sync(~0u, ends > x) >> 16 * side & 0xffff;
      const int hit = later ? __ffs(later) - 1 : 15;
      const int next = __shfl_sync(~0u, later ? ends - own : ends, hit, 16);
      if (head < 0) start = next, head = later ? first + hit : -1;
      if (__all_sync(~0u, head >= 0)) break;
    }
    head = max(head, 0);  // an end beyond all work has none
    const int unit = unit_at(p, Pair<kParts>(p, sequence, head), head, x - start);
    begin = {begin.sequence, __shfl_sync(~0u, head, 0), __shfl_sync(~0u, unit, 0), __shfl_sync(~0u, start, 0)};
    if (end.sequence == p.batch) return;
    end = {end.sequence, __shfl_sync(~0u, head, 16), __shfl_sync(~0u, unit, 16), __shfl_sync(~0u, start, 16)};
  }
};

// A place in the spans of one block, empty ones skipped. Plain data: it waits in shared memory between its few uses.
template <int kParts>
struct Walk {
  Position end;
  Span<kParts> span;
  bool valid;

  __device__ static Walk start(const Params<kParts>& p, const Plan<kParts>& plan) {
    Walk walk;
    walk.end = plan.end;
    walk.span.sequence = plan.begin.sequence;
    walk.span.head = plan.begin.head;
    walk.enter(p, plan.begin.unit);
    if (walk.valid && walk.span.first >= walk.span.last) walk.next(p);
    return walk;
  }

  // Enters (span.sequence, span.head) at a unit; clears `valid` past the block's end.
  __device__ void enter(const Params<kParts>& p, int first) {
    const bool final = span.sequence == end.sequence && span.head == end.head;
    valid = span.sequence < end.sequence || (span.sequence == end.sequence && span.head <= end.head);
    valid = valid && span.sequence < p.batch && !(final && end.unit == 0);
    if (!valid) return;
    span.pair = Pair<kParts>(p, span.sequence, span.head);
    span.total = span.pair.units(p);
    span.first = first;
    span.last = final ? end.unit : span.total;
  }

  __device__ void next(const Params<kParts>& p) {
    do {
      if (++span.head == p.heads) {
        span.head = 0;
        ++span.sequence;
      }
      enter(p, 0);
    } while (valid && span.first >= span.last);
  }
};

}  // namespace kvlathe::cuda
