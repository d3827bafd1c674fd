// Decode attention of general calls: K and V of any form, tokens that a row does not see, and many
// parts. It is attend_decode (attend_decode.cuh) with other arithmetic. Codes become 16-bit numbers in
// registers, as fragments of the same products as those of 16-bit tiles (fragments.cuh). So the bytes
// that cross device memory are as few, but each costs more instructions than with attend_codes.cuh.
#pragma once

#include "cuda/decode/finish.cuh"
#include "cuda/decode/fragment_scores.cuh"
#include "cuda/decode/fragment_values.cuh"
#include "cuda/decode/producer.cuh"

namespace kvlathe::cuda {

// Tokens begin .. end - 1 of a part, which a row does not see.
struct HiddenTokens {
  int begin, end;

  __device__ void load(const GeneralPart& form, int sequence) {
    begin = end = 0;
    if (!form.hidden) return;
    begin = __ldg(form.hidden + sequence * form.hidden_stride);
    end = __ldg(form.hidden + sequence * form.hidden_stride + 1);
  }
  __device__ bool all(int first, int count) const { return first >= begin && first + count <= end; }
  __device__ bool any(int first, int count) const { return first < end && begin < first + count; }
  __device__ bool one(int token) const { return token >= begin && token < end; }
};

// The same of the rows of a bundle, for this lane's two columns of a fragment.
struct BundleHides {
  HiddenTokens of[2];
  UnseenTail unseen;
  int tokens;  // of the part

  // column: the first of the two. length: of the first row, which is row `sequence` of the call.
  __device__ void load(const GeneralPart& form, int sequence, int length, int column, int group) {
    unseen.set(length, column, group);
    tokens = tokens_in(length);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      of[i].load(form, sequence + min((column + i) / group, rows_in(length) - 1));
  }
  __device__ bool all(int, int) const { return false; }
  __device__ bool any(int first, int count) const {
    return first + count + KVLATHE_MAX_BUNDLE > tokens || of[0].any(first, count) ||
           of[1].any(first, count);
  }
};

// Where K and V of a lane lie in pages that hold codes, and how they are read.
struct CodedLane {
  FormRows keys, values;  // of a page at 0

  template <class P>
  __device__ void set(const P& p, int head, int part) {
    const auto& at = p.head[head];
    const LaneParams& lane = at.lane[part];
    const auto& side = p.form[p.part_in(head, part)].side;
    const auto& groups = p.groups[head][part];
    keys = {0, 16u * lane.k_meta, side[0], at.rank_k, groups[0], p.page_tokens};
    if constexpr (P::kWide) {
      // Of K's channels as many are added up as the sums have room for, which are V's and more.
      if (!lane.v) return void(values = keys);
    }
    values = {uint32_t(lane.v), 16u * lane.v_meta, side[1], at.rank_v, groups[1], p.page_tokens};
  }
  __device__ static FormRows in(FormRows rows, uint32_t page) {
    rows.codes += page, rows.meta += page;
    return rows;
  }
};

template <class P>
__device__ inline void bound_scores(float (&s)[4], const P& p) {
  if constexpr (P::kScored) {
    for (int i = 0; i < 4 && p.bound != 0.f; ++i) s[i] = bounded(s[i], p.bound);
  }
}

// Hides the scores of tokens that do not exist, or that the row does not see. Rows g and g + 8 of the
// fragment are tokens own and own + later of those from `first` on, of which `count` exist.
__device__ inline void hide_unseen(float (&s)[4], int first, int count, int own, int later,
                                   const HiddenTokens& hidden) {
  if (own >= count || hidden.one(first + own)) s[0] = s[1] = -INFINITY;
  own += later;
  if (own >= count || hidden.one(first + own)) s[2] = s[3] = -INFINITY;
}
__device__ inline void hide_unseen(float (&s)[4], int first, int, int own, int later,
                                   const BundleHides& hides) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = own + i / 2 * later;
    if (hides.of[i % 2].one(first + token)) s[i] = kUnseen;
    hides.unseen.hide(s[i], i % 2, token, hides.tokens - first);
  }
}

// `rows` tokens of a tile of 16-bit rows, from token `first` of the part on.
// Whatever it needs is loaded anew, so that pages of codes have the registers.
template <class E, class P, class Head, class Hidden, int kSteps>
__device__ __forceinline__ void attend_units(const P& p, SoftmaxState<kSteps>& state,
                                             const Head& head, int columns, uint32_t queries,
                                             uint32_t tile, int units, int first, int rows,
                                             const Hidden& hidden, bool in_keys) {
  std::conditional_t<P::kWide, WideLane16<P::kRank / 16>, Lane16<kSteps>> lane16;
  if constexpr (P::kWide)
    lane16.set(own_queries(queries, head.rank_k), head.rank_k, head.rank_v, in_keys);
  else
    lane16.set(queries, columns, head.rank_k, head.rank_v);
  const bool apart = !P::kWide || !in_keys;
  uint32_t k = tile, v = apart ? tile + units * lane16.steps_k * 512 : tile;
#pragma unroll 1
  for (int at = 0; at < rows; at += kRowTokens, k += lane16.steps_k * 512,
           v += (apart ? lane16.steps_v : lane16.steps_k) * 512) {
    const int count = min(kRowTokens, rows - at);
    if (hidden.all(first + at, count)) continue;
    float s[4];
    score_unit<E>(s, lane16, k, p.scale_log2);
    bound_scores(s, p);
    hide_unseen(s, first + at, count, threadIdx.x % 32 / 4, 8, hidden);
    add_unit<E>(state, lane16, v, s);
  }
}

// The same of pages of codes, `bytes` and 1 << shift tokens each.
template <class E, class P, class Hidden, int kSteps>
__device__ __forceinline__ void attend_pages(const P& p, SoftmaxState<kSteps>& state,
                                             const CodedLane& codes, uint32_t kept, uint32_t tile,
                                             int bytes, int shift, int first, int rows,
                                             const Hidden& hidden) {
  const Order tokens = order_of_tokens(codes.keys.side);
  const uint32_t queries = own_queries(kept, codes.keys.rank),
                 grids = kept + kept_queries_bytes(codes.keys.rank);
#pragma unroll 1
  for (int at = 0; at < rows; at += kChunkTokens) {
    const int count = min(kChunkTokens, rows - at);
    if (hidden.all(first + at, count)) continue;
    const int page = at >> shift, token = at - (page << shift);
    const uint32_t from = tile + page * bytes;
    Scores s;
    score_codes<E, P::kFloat8>(s, CodedLane::in(codes.keys, from), queries, token, tokens,
                               p.scale_log2);
    const bool some = count < kChunkTokens || hidden.any(first + at, count);
#pragma unroll
    for (int b = 0; b < kChunkUnits; ++b) {
      const int own = b / 2 * kStrip + tokens.of(b % 2, threadIdx.x % 32 / 4, 0);
      bound_scores(s[b], p);
      if (some) hide_unseen(s[b], first + at, count, own, tokens.later(), hidden);
    }
    add_codes<E, P::kFloat8>(state, CodedLane::in(codes.values, from), grids, token, count, tokens,
                             s);
  }
}

// The order that the channels of a state's sums are in.
struct SumsOrder {
  Order now = kPlainOrder;

  template <int kSteps>
  __device__ void enter(SoftmaxState<kSteps>& state, uint32_t scratch, Order order) {
    if (now != order) reorder(state.o, scratch, now, order);
    now = order;
  }
};

// P: GeneralParams of as many parts as a lane may have, or of more; ScoredParams and what is derived
// from them.
template <class E, class P>
__global__ void __launch_bounds__(general_warps<P>() * 32, P::kBlocks)
    attend_general(const __grid_constant__ P p) {
  constexpr int kParts = P::kSlots, kSteps = P::kRankV / 16;
  // Rings of the warps | merge buffer | kept queries of the warps.
  KVLATHE_DYNAMIC_SHARED(shared);
  __shared__ Block<kParts, P::kColumns> block;
  __shared__ Runs<kParts> runs[kMaxWarps];
  __shared__ __align__(8) uint64_t barriers[kMaxWarps][kSlots];
  __shared__ Parked parked_of[general_warps<P>()];
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const Crew crew{int(threadIdx.x), int(blockDim.x)};
  if (threadIdx.x % 32 < kSlots) init_barrier(shared_address(&barriers[warp][threadIdx.x % 32]));
  auto* buffer = reinterpret_cast<float*>(shared + warps * p.ring_bytes);
  const uint32_t kept = shared_address(buffer + p.merge_floats) + warp * p.codes_bytes;
  Parked& parked = parked_of[warp];
  Ring ring{{},
            shared_address(shared) + warp * p.ring_bytes,
            p.ring_bytes,
            shared_address(barriers[warp])};

  const Planned<kParts> plan(p);
  Producer<P, kGeneral, true> producer(p, plan, runs[warp], ring, parked);
  if (threadIdx.x == 0) {
    block.walk = plan.walk, block.share = plan.share, block.begin_start = plan.begin_start,
    block.ending.there = false;
  }
  publish_barriers();
  __syncthreads();
  wait_for_previous_kernel();
  if (plan.some_empty) write_empty<E>(p, crew);
  if (!plan.any) return;
  SoftmaxState<kSteps> state;
  state.clear();
  CodedLane codes;
  std::conditional_t<P::kBundled, BundleHides, HiddenTokens> hidden;
  SumsOrder sums;
  Turn turn;
  int part = -1;    // of the run being attended
  int in_item = 0;  // with bundles: columns of the item of work
  const auto columns = [&] { return P::kBundled ? in_item : p.group_size; };
  producer.park(turn);
  for (;;) {  // as in attend_decode
    producer.take_up();
    producer.fill(false);
    producer.recall(turn);
    auto& [unit, last, head, length, units, bytes, bits] = turn;
    if (unit >= last) {  // the next run
      if (++part == kParts) {
        producer.park(turn);
        sums.enter(state, kept, kPlainOrder);
        finish<E, true>(p, state, buffer, block, crew);
        state.clear();
        part = 0;
        producer.take_up();
      }
      if (!block.walk.valid) break;
      head = block.walk.span.head;
      const auto& at = p.head[head];
      const Run run(p, block.walk.span, part);
      const int room = ring_room(query_bytes(p, at));
      units = producer.units_of(at.lane[part]);
      unit = run.first + turn_of(part) * units, last = run.last;
      length = tokens_of<P>(run.length);
      if (unit < last) {
        bytes = producer.room_of(at.lane[part]);
        bits = p.part_of(head, part).bits;
        const auto& form = p.form[p.part_in(head, part)];
        if constexpr (P::kBundled) {
          in_item = columns_of(p, head, rows_in(run.length));
          hidden.load(form, block.walk.span.sequence, run.length,
                      first_column(p, head) + threadIdx.x % 4 * 2, p.group_size);
        } else {
          hidden.load(form, block.walk.span.sequence);
        }
        const uint32_t queries = ring.wait_oldest(room);
        if (is_quantized(bits)) {
          codes.set(p, head, part);
          sums.enter(state, kept, order_of_sums(codes.values.side));
          keep_queries(kept, queries, columns(), at.rank_k, order_of_queries(codes.keys.side));
        } else {
          sums.enter(state, kept, kPlainOrder);
          if constexpr (P::kWide)
            keep_queries(kept, queries, columns(), at.rank_k, kPlainOrder);
          else
            keep_plain_queries(kept, queries, columns(), at.rank_k);
        }
        fence_for_bulk_copies();  // which fill the queries' room next
        ring.drop_oldest(room);
      }
      producer.park(turn);
      continue;
    }
    const bool coded = is_quantized(bits);
    const uint32_t tile = coded ? ring.wait_oldest<true>(bytes) : ring.wait_oldest(bytes);
    const int size = coded ? p.page_tokens : kRowTokens, first = unit * size,
              rows = min(min(units, last - unit) * size, length - first);
    unit += warps * units;
    ring.drop_oldest(bytes);
    producer.park(turn);
    if (coded)
      attend_pages<E>(p, state, codes, kept, tile, p.head[head].lane[part].bytes,
                      p.part_of(head, part).unit_shift, first, rows, hidden);
    else
      attend_units<E>(p, state, p.head[head], columns(), kept, tile, units, first, rows, hidden,
                      P::kWide && p.head[head].lane[part].v == p.head[head].lane[part].k);
    fence_for_bulk_copies();  // which fill the room that was read by ordinary instructions
  }
  if (block.ending.there)
    finish_pair<E, true>(p, block.ending, reinterpret_cast<float*>(shared), crew);
}

}  // namespace kvlathe::cuda
