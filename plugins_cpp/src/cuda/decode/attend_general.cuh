// Decode attention of general calls: K and V of any form, and tokens that a row does not see. It is
// attend_decode (attend_decode.cuh) with other arithmetic. Codes become 16-bit rows in shared
// memory, 16 tokens at a time, and these are attended like 16-bit tiles. So the bytes that cross
// device memory are as few, but each costs more instructions than with attend_codes.cuh.
#pragma once

#include "cuda/decode/finish.cuh"
#include "cuda/decode/producer.cuh"
#include "cuda/forms.cuh"

namespace kvlathe::cuda {

// What a warp's 16 converted tokens take in shared memory.
__host__ __device__ inline int converted_bytes(int rank_k, int rank_v) {
  return kRowTokens * 2 * (rank_k + rank_v);
}

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
  __device__ bool one(int token) const { return token >= begin && token < end; }
};

// Converts 16 tokens of a page that lies at `page`, from `token` on, of which `valid` exist. `to`:
// K [16][rank_k], then V [16][rank_v], in the places of a 16-bit tile. Whole warp.
template <class E, class P>
__device__ __noinline__ void convert_unit(const P& p, int head, int part, uint32_t page, int token,
                                          int valid, uint32_t to) {
  const auto& at = p.head[head];
  const LaneParams& lane = at.lane[part];
#pragma unroll 1
  for (int which = 0; which < 2; ++which) {
    const FormSide& side = p.form[p.part_in(head, part)].side[which];
    const int rank = which ? at.rank_v : at.rank_k, groups = p.groups[head][part][which];
    const FormRows rows{page + (which ? lane.v : 0),
                        page + 16 * (which ? lane.v_meta : lane.k_meta),
                        side,
                        rank,
                        groups,
                        p.page_tokens};
    const Swizzle swizzle(rank);
    convert_form<E>(rows, token, side.by_channel() ? token / side.group : 0, valid,
                    RowsPlace{to, 2 * rank, 16, swizzle.shift, swizzle.mask});
    to += kRowTokens * 2 * rank;
  }
}

// Tokens first .. first + rows - 1 of a part (at most 16), as attend_unit.
template <class E, int kSteps>
__device__ void attend_seen(SoftmaxState<kSteps>& state, const Lane16<kSteps>& lane16, uint32_t k,
                            uint32_t v, int first, int rows, const HiddenTokens& hidden,
                            float scale_log2) {
  float s[4];
  score_unit<E>(s, lane16, k, scale_log2);
  const int row = threadIdx.x % 32 / 4;
  if (row >= rows || hidden.one(first + row)) s[0] = s[1] = -INFINITY;
  if (row + 8 >= rows || hidden.one(first + row + 8)) s[2] = s[3] = -INFINITY;
  add_unit<E>(state, lane16, v, s);
}

// P: GeneralParams of as many parts as a lane may have, or of more.
template <class E, class P>
__global__ void __launch_bounds__(kMaxWarps * 32, kBlocksPerSM)
    attend_general(const __grid_constant__ P p) {
  constexpr int kParts = P::kSlots, kSteps = kMaxRank / 16;
  // Rings of the warps | merge buffer | converted tokens of the warps.
  KVLATHE_DYNAMIC_SHARED(shared);
  __shared__ Block<kParts> block;
  __shared__ Runs<kParts> runs[kMaxWarps];
  __shared__ __align__(8) uint64_t barriers[kMaxWarps][kSlots];
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const Crew crew{int(threadIdx.x), int(blockDim.x)};
  if (threadIdx.x % 32 < kSlots) init_barrier(shared_address(&barriers[warp][threadIdx.x % 32]));
  auto* buffer = reinterpret_cast<float*>(shared + warps * p.ring_bytes);
  const uint32_t converted = shared_address(buffer + p.merge_floats) + warp * p.codes_bytes;
  Ring ring{shared_address(shared) + warp * p.ring_bytes, p.ring_bytes,
            shared_address(barriers[warp])};

  const Planned<kParts> plan(p);
  Producer<P, kGeneral> producer(p, plan, runs[warp], ring);
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
  Lane16<kSteps> lane16;
  HiddenTokens hidden;
  // As in attend_decode. coded: the run's tiles are pages.
  int part = -1, head = 0, unit = 0, last = 0, tokens = 0, units = 0, bytes = 0;
  bool coded = false;
  for (;;) {
    producer.fill(false);
    if (unit >= last) {  // the next run
      if (++part == kParts) {
        finish<E, true>(p, state, buffer, block, crew);
        state.clear();
        part = 0;
      }
      if (!block.walk.valid) break;
      head = block.walk.span.head;
      const auto& at = p.head[head];
      const Run run(p, block.walk.span, part);
      const int room = ring_room(query_bytes(p, at));
      units = producer.units_of(at.lane[part]);
      unit = run.first + turn_of(part) * units, last = run.last, tokens = run.tokens;
      if (unit >= last) continue;
      bytes = producer.room_of(at.lane[part]);
      coded = is_quantized(p.part_of(head, part).bits);
      hidden.load(p.form[p.part_in(head, part)], block.walk.span.sequence);
      lane16.set(ring.wait_oldest(room), p.group_size, at.rank_k, at.rank_v);
      ring.release_oldest<true>(room);
      continue;
    }
    const uint32_t tile = coded ? ring.wait_oldest<true>(bytes) : ring.wait_oldest(bytes);
    const int size = coded ? p.page_tokens : kRowTokens, first = unit * size,
              rows = min(min(units, last - unit) * size, tokens - first);
#pragma unroll 1
    for (int at = 0; at < rows; at += kRowTokens) {
      const int count = min(kRowTokens, rows - at);
      if (hidden.all(first + at, count)) continue;
      const int step = at / kRowTokens;
      uint32_t k = tile + step * lane16.steps_k * 512,
               v = tile + (units * lane16.steps_k + step * lane16.steps_v) * 512;
      if (coded) {
        k = converted, v = converted + lane16.steps_k * 512;
        const int page = at / p.page_tokens;
        __syncwarp();
        convert_unit<E>(p, head, part, tile + page * p.head[head].lane[part].bytes,
                        at - page * p.page_tokens, count, converted);
        __syncwarp();
      }
      attend_seen<E>(state, lane16, k, v, first + at, count, hidden, p.scale_log2);
    }
    ring.release_oldest<true>(bytes);
    unit += warps * units;
  }
  if (block.ending.there)
    finish_pair<E, true>(p, block.ending, reinterpret_cast<float*>(shared), crew);
}

}  // namespace kvlathe::cuda
