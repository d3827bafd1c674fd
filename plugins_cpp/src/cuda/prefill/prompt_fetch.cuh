// The fetching warpgroup of attend_prompt. It takes tile after tile from the list and fills stages,
// ahead of those who attend.
#pragma once

#include "cuda/prefill/prompt_codes.cuh"

namespace kvlathe::cuda {

#ifdef KVLATHE_WGMMA

// Copies 16 rows of kSteps x 32 bytes, which lie one behind the other, into the blocks of a stage.
// `to`: the first row in the first block. Whole warp. Neighbours bring neighbouring bytes to
// neighbouring places, so that a row of a block is one request. Rows from `valid` on become zeros.
//
// With constant offsets and no branch between them a copy is one instruction.
template <int kSteps>
__device__ __forceinline__ void copy_rows(uint32_t to, const char* from, int valid, int lane) {
  constexpr int kPitch = 32 * kSteps, kWidth = block_steps(kSteps), kPieces = 2 * kWidth,
                kRows = 32 / kPieces, kBlocks = kSteps / kWidth;
  lane = pinned(lane);  // or offsets of every case are kept in registers, which there are few of
  const int row = lane / kPieces, piece = lane % kPieces;
  // The swizzle of rows `row` and row + 4 differs where a row has eight pieces.
  const uint32_t at[2] = {to + piece_at(kWidth, row, piece),
                          to + piece_at(kWidth, row + kRows, piece) - kRows * 32 * kWidth};
  from += row * kPitch + piece * 16;
#pragma unroll
  for (int i = 0; i < 16 / kRows; ++i)
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
      copy16(at[i % 2] + i * kRows * (32 * kWidth) + block * (kWidth * kStageUnit),
             from + i * kRows * kPitch + block * (32 * kWidth), row + i * kRows < valid);
}
__device__ __forceinline__ void copy_rows(uint32_t to, const char* from, int steps, int valid,
                                          int lane) {
  switch (steps) {
    case 1: return copy_rows<1>(to, from, valid, lane);
    case 2: return copy_rows<2>(to, from, valid, lane);
    case 3: return copy_rows<3>(to, from, valid, lane);
    case 4: return copy_rows<4>(to, from, valid, lane);
    case 5: return copy_rows<5>(to, from, valid, lane);
    case 6: return copy_rows<6>(to, from, valid, lane);
    case 7: return copy_rows<7>(to, from, valid, lane);
    default: return copy_rows<8>(to, from, valid, lane);
  }
}

__device__ inline PromptTile tile_of(const PromptParams& p, int taken) {
  PromptTile tile{};
  const int index = taken / p.heads;
  tile.head = index < p.list[kTiles] ? taken % p.heads : -1;
  if (tile.head < 0) return tile;
  tile.sequence = p.list[kListHeader + 2 * index];
  tile.first = p.list[kListHeader + 2 * index + 1];
  tile.token = p.cu_seqlens_q[tile.sequence];
  tile.rows = (p.cu_seqlens_q[tile.sequence + 1] - tile.token) * p.group_size;
  return tile;
}

// Lane t of a warp takes half t / 8 % 2 of 32 bytes of row t % 8 + t / 16 * 8 among 16.
__device__ inline void fetch_queries(const PromptParams& p, const PromptTile& tile, uint32_t to) {
  const PromptHead& head = p.head[tile.head];
  const int rank = head.steps_k * 16, half = threadIdx.x / 8 % 2,
            own = threadIdx.x % 8 + threadIdx.x % 32 / 16 * 8;
  for (int first = threadIdx.x / 32 * 16; first < kPromptRows; first += 64) {
    const int row = tile.first + first + own, in = min(row, tile.rows - 1),
              token = in / p.group_size;
    const auto from =
        reinterpret_cast<const char*>(p.q + (tile.token + token) * p.q_stride + head.q_offset +
                                      (in - token * p.group_size) * rank);
    const uint32_t at = to + (first + own) * 16 + half * (kPromptRows * 16);
    for (int i = 0; i < head.steps_k; ++i)
      copy16(at + 2 * i * (kPromptRows * 16), from + half * 16 + 32 * i, row < tile.rows);
  }
}

// Where elements of a lane lie in pages: those of a 16-bit part, or copies of sealed ones.
struct Elements {
  const char* pages;
  int64_t stride;
  int32_t k, v;  // bytes from a page's start
};

__device__ inline Elements elements_of(const PromptParams& p, const PromptHead& head, int part,
                                       const PromptPart& from) {
  return {p.pool, from.page_stride, head.k[part], head.v[part]};
}
__device__ inline Elements copies_of(const PromptParams& p, const PromptHead& head) {
  const int row = 32 * p.page_tokens, k = head.steps_before * row;
  return {p.copies, p.copy_stride, k, k + head.steps_k * row};
}

// Copies 64 rows of `steps` x 32 bytes, K or V of one stage, from token `first` on. Whole warp.
// Tokens past `keys` become zeros, because what lies there may be NaN. `from`: the first row of
// page 0; `page`: this lane's of the pages of the stage, that of the 16 tokens from 16 lane on.
__device__ inline void fetch_half(const PromptParams& p, const char* from, int64_t stride,
                                  int32_t page, int first, int keys, int steps, uint32_t to,
                                  int lane) {
#pragma unroll 1
  for (int rows = 0; rows < kStageTokens; rows += 16) {
    const int token = first + rows, row = token - page_of(p, token) * p.page_tokens;
    copy_rows(to + rows * (32 * block_steps(steps)),
              from + __shfl_sync(~0u, page, rows / 16) * stride + row * steps * 32, steps,
              keys - token, lane);
  }
}

// Fetches one part of a tile of a general call (prompt_general.cuh).
template <class Fetcher>
__device__ void fetch_general(Fetcher& fetcher, const PromptTile& tile, int part);

// P: as of attend_prompt (attend_prompt.cuh).
template <class E, class P>
struct Fetcher {
  using Element = E;
  static constexpr bool kFloat8 = P::kFloat8;
  const P& p;
  PromptShared& s;
  const uint32_t shared;
  Room room{};

  const int lane = pinned(threadIdx.x % 32), warp = kept(threadIdx.x / 32);

  __device__ void meet() const { asm volatile("bar.sync 1, 128;" ::: "memory"); }

  // Waits until half of the stage taken last may be written.
  __device__ void wait_for(int half) const {
    room.wait_for(half, [&](int which, Turn turn) { wait(s.empty[which][turn.at], turn.parity); });
  }

  // The address of room for the next stage of a lane. It may not be free yet.
  __device__ uint32_t take_stage(const PromptHead& head) {
    return shared + p.stages_at + room.take(head, p.stage_units) * kStageUnit;
  }

  // Fills a stage of elements. page_at(token): the id of its page. Two warps take turns to bring
  // keys, two to bring values, so that their waiting overlaps.
  template <class PageAt>
  __device__ void fetch_stage(const PromptHead& head, const Elements& elements, int first, int keys,
                              PageAt page_at) {
    uint32_t to = take_stage(head);
    if ((room.stage.at & 1) == warp / 2) {
      const int half = warp % 2, token = first + lane % (kStageTokens / 16) * 16;
      const int32_t page = token < keys ? page_at(token) : 0;
      if (half) to += head.steps_k * kStageUnit;
      wait_for(half);
      fetch_half(p, elements.pages + (half ? elements.v : elements.k), elements.stride, page, first,
                 keys, half ? head.steps_v : head.steps_k, to, lane);
      uint64_t& full = s.full[half][room.stage.at];
      arrive_after_copies(full);
      arrive<3>(full);  // for the other warps
    }
    room.stage.next();
  }

  // Room for a stage that all warps store, and its end.
  __device__ uint32_t stored_stage(const PromptHead& head) {
    const uint32_t to = take_stage(head);
    wait_for(kKeyHalf), wait_for(kValueHalf);
    return to;
  }
  __device__ void pass_stored() {
    fence_for_bulk_copies();  // products see what was stored
    arrive(s.full[kKeyHalf][room.stage.at]), arrive(s.full[kValueHalf][room.stage.at]);
    room.stage.next();
  }

  // Fetches elements as they are: a part of 16 bits, or copies. id_of: of page i.
  template <class IdOf>
  __device__ void fetch_elements(const PromptHead& head, const Elements& elements, int keys,
                                 IdOf id_of) {
    for (int first = 0; first < keys; first += kStageTokens)
      fetch_stage(head, elements, first, keys, [&](int token) { return id_of(page_of(p, token)); });
  }

  // Fetches a sealed part. While one piece is converted the next is on its way. Where shared memory
  // has one buffer only, it comes afterwards.
  template <int kBits>
  __device__ void fetch_codes(const PromptHead& head, int part, const int32_t* pages, int keys) {
    const CodesLane<kBits> lane{p, head, part, p.part[part]};
    const int shift = 31 - __clz(p.page_tokens), within = p.page_tokens - 1;
    const bool two = p.codes_buffers == 2;
    const auto buffer = [&](int token) {
      return shared + 2 * p.query_bytes + (two && token & 64 ? p.codes_bytes : 0);
    };
    int32_t page = __ldg(pages);
    const auto ask = [&](int token) {
      if (token < keys) lane.copy(buffer(token), page, token & within);
      close_copy_group();
      if (token + 64 < keys)
        page = __ldg(pages + (token + 64 >> shift));  // in time for the next piece
    };
    meet();  // nobody reads the buffers any more
    ask(0);
    for (int token = 0; token < keys; token += kStageTokens) {
      wait_copy_groups<0>();
      meet();  // all of the piece is there, and the other buffer is free
      if (two) ask(token + 64);
      const uint32_t from = buffer(token), to = stored_stage(head);
      lane.template convert_keys<E>(from, to);
      lane.template convert_values<E>(from, to + head.steps_k * kStageUnit, token & within,
                                      keys - token);
      if (!two) meet(), ask(token + 64);
      pass_stored();
    }
  }

  __device__ void fetch_part(const PromptTile& tile, int part) {
    if constexpr (P::kGeneral) return fetch_general(*this, tile, part);
    const PromptHead& head = p.head[tile.head];
    const PromptPart& from = p.part_of(tile.head, part);
    const int keys = keys_of(p, tile, part, from.lengths[tile.sequence * from.lengths_stride]);
    const int32_t* pages = from.page_table + int64_t{tile.sequence} * from.table_stride;
    if (!keys) return;
    if (is_quantized(from.bits) && p.copy_base) {
      const int base = __ldg(p.copy_base + part * p.batch + tile.sequence);
      if (base >= 0)
        return fetch_elements(head, copies_of(p, head), keys, [base](int i) { return base + i; });
    }
    for_known_bits(
        from.bits, [&](auto bits) { fetch_codes<decltype(bits)::value>(head, part, pages, keys); },
        [&] {
          fetch_elements(head, elements_of(p, head, part, from), keys,
                         [pages](int i) { return __ldg(pages + i); });
        });
  }

  // Whether this launch takes a tile.
  __device__ bool takes(const PromptTile& tile) const {
    return p.tiles == kTilesOfAll || reads_codes(tile) == (p.tiles == kTilesOfCodes);
  }
  __device__ bool reads_codes(const PromptTile& tile) const {
    const PromptHead& head = p.head[tile.head];
    for (int i = 0; i < p.parts; ++i) {
      if (!(head.parts >> i & 1)) continue;
      const PromptPart& part = p.part_of(tile.head, i);
      if (is_quantized(part.bits) && part.lengths[tile.sequence * part.lengths_stride] &&
          p.copy_base[p.call_part_of(tile.head, i) * p.batch + tile.sequence] < 0)
        return true;
    }
    return false;
  }

  // The next tile of this launch. `taken`: thread 0's next item; `turn` alternates.
  __device__ PromptTile next_tile(int& taken, int& turn) const {
    for (;;) {
      turn ^= 1;
      if (threadIdx.x == 0) s.taken[turn] = taken;
      meet();
      const PromptTile tile = tile_of(p, s.taken[turn]);
      if (threadIdx.x == 0 && tile.head >= 0) taken = atomicAdd(p.list + kTaken, 1);
      if (tile.head < 0 || takes(tile)) return tile;
    }
  }

  __device__ void run() {
    int taken = threadIdx.x == 0 ? atomicAdd(p.list + kTaken, 1) : 0, turn = 0;
    for (int n = 0;; ++n) {
      const int slot = n & 1;
      const PromptTile tile = next_tile(taken, turn);
      wait(s.queries_done[slot], (n >> 1 & 1) ^ 1);
      if (threadIdx.x == 0) {
        s.tile[slot] = tile;
        for (int i = 0; i < p.parts; ++i) {
          const PromptPart& part = p.part_of(max(tile.head, 0), i);
          s.before[slot][i] = part.lengths[tile.sequence * part.lengths_stride];
        }
      }
      if (tile.head >= 0) fetch_queries(p, tile, shared + slot * p.query_bytes);
      arrive_after_copies(s.queries_there[slot]);
      if (threadIdx.x == 0) arrive(s.queries_there[slot]);  // for the tile that it wrote
      if (tile.head < 0) break;
      room.next = first_stage(room.after, stage_units(p.head[tile.head]));
      for (int part = 0; part < p.parts; ++part) fetch_part(tile, part);
    }
    // The last block leaves the list as it was, for the next layer.
    if (threadIdx.x == 0 && atomicAdd(p.list + kDone, 1) == int(gridDim.x) - 1)
      p.list[kTaken] = p.list[kDone] = 0;
  }
};

#endif

}  // namespace kvlathe::cuda
