// The fetching warpgroup of attend_prompt. It takes tile after tile from the list and fills stages,
// ahead of those who attend.
#pragma once

#include "cuda/prefill/prompt_codes.cuh"

namespace kvlathe::cuda {

#ifdef KVLATHE_WGMMA

// Where a thread's copies go. Lane t of a warp takes half t / 8 % 2 of 32 bytes of row
// t % 8 + t / 16 * 8 among 16: eight lanes then fill one core matrix.
struct Copier {
  int row, half;
  __device__ Copier()
      : row(threadIdx.x % 8 + threadIdx.x % 32 / 16 * 8), half(threadIdx.x / 8 % 2) {}

  // Copies 16 rows of `steps` x 32 bytes into core matrices, whose columns are `column` bytes
  // apart. `from` is this thread's row.
  __device__ void copy(uint32_t to, int first, int column, const char* from, int steps,
                       bool valid) const {
    to += (first + row) * 16 + half * column, from += half * 16;
    for (int i = 0; i < steps; ++i) copy16(to + 2 * i * column, from + 32 * i, valid);
  }
};

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

__device__ inline void fetch_queries(const PromptParams& p, const PromptTile& tile, uint32_t to) {
  const Copier copier;
  const PromptHead& head = p.head[tile.head];
  const int rank = head.steps_k * 16;
  for (int first = threadIdx.x / 32 * 16; first < kPromptRows; first += 64) {
    const int row = tile.first + first + copier.row, in = min(row, tile.rows - 1),
              token = in / p.group_size;
    const uint16_t* from = p.q + (tile.token + token) * p.q_stride + head.q_offset +
                           (in - token * p.group_size) * rank;
    copier.copy(to, first, kPromptRows * 16, reinterpret_cast<const char*>(from), head.steps_k,
                row < tile.rows);
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

// The pages of the tokens that this thread's warp copies: 16 of each 64 of a stage. They are asked
// for before there is room for the tokens.
struct StagePages {
  int32_t ids[2];
  // id_of: of a sequence's page i.
  template <class IdOf>
  __device__ StagePages(const PromptParams& p, int first, int keys, IdOf id_of) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = first + threadIdx.x / 32 * 16 + 64 * i;
      ids[i] = token < keys ? id_of(page_of(p, token)) : 0;
    }
  }
  __device__ StagePages(const PromptParams& p, const int32_t* pages, int first, int keys)
      : StagePages(p, first, keys, [pages](int i) { return __ldg(pages + i); }) {}
};

// Copies K and V of one stage, from token `first` on. Tokens past `keys` become zeros, because what
// lies there may be NaN.
__device__ inline void fetch_keys(const PromptParams& p, const PromptHead& head,
                                  const Elements& elements, const StagePages& pages, int first,
                                  int keys, uint32_t to) {
  const Copier copier;
  const int count = prompt_keys(head.steps_v), values = count * 32 * head.steps_k;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (64 * i >= count) break;
    const int rows = threadIdx.x / 32 * 16 + 64 * i, token = first + rows;
    const int row = token - page_of(p, token) * p.page_tokens + copier.row;
    const char* from = elements.pages + pages.ids[i] * elements.stride;
    const bool valid = token + copier.row < keys;
    copier.copy(to, rows, count * 16, from + elements.k + row * head.steps_k * 32, head.steps_k,
                valid);
    copier.copy(to + values, rows, count * 16, from + elements.v + row * head.steps_v * 32,
                head.steps_v, valid);
  }
}

// The stages in use, oldest first. Waiting for the oldest makes room for another.
struct Room {
  Turn stage, oldest;
  int used = 0;         // stages in use
  int after = 0;        // where the last one ends
  int next = 0;         // where the next one may begin
  uint64_t begins = 0;  // where stage i begins: byte i

  // Takes `units` more as stage.at, and says where they begin.
  __device__ int take(PromptShared& s, int units, int room) {
    const int begin = place_stage(next, units, room);
    while (used && !free(begin, units)) {
      wait(s.empty[oldest.at], oldest.parity);
      oldest.next(), --used;
    }
    begins = (begins & ~(uint64_t{255} << 8 * stage.at)) | uint64_t(begin) << 8 * stage.at;
    after = next = begin + units, ++used;
    return begin;
  }

 private:
  __device__ bool free(int begin, int units) const {
    const int first = int(begins >> 8 * oldest.at & 255);
    if (used == kPromptStages) return false;
    // [first, after) is in use or, where that has gone round, all but [after, first).
    return first < after ? begin >= after || begin + units <= first
                         : begin >= after && begin + units <= first;
  }
};

// Fetches one part of a tile of a general call (prompt_general.cuh).
template <class Fetcher>
__device__ void fetch_general(Fetcher& fetcher, const PromptTile& tile, int part);

// P: PromptParams, GeneralPrompts or NamedPrompts.
template <class E, class P>
struct Fetcher {
  using Element = E;
  const P& p;
  PromptShared& s;
  const uint32_t shared;
  Room room{};

  __device__ void meet() const { asm volatile("bar.sync 1, 128;" ::: "memory"); }

  // The address of room for the next stage of a lane.
  __device__ uint32_t next_stage(const PromptHead& head) {
    return shared + p.stages_at + room.take(s, stage_units(head), p.stage_units) * kStageUnit;
  }

  // Fetches elements as they are: a part of 16 bits, or copies. id_of: of page i.
  template <class IdOf>
  __device__ void fetch_elements(const PromptHead& head, const Elements& elements, int keys,
                                 IdOf id_of) {
    for (int first = 0; first < keys; first += prompt_keys(head.steps_v)) {
      const StagePages ids(p, first, keys, id_of);
      fetch_keys(p, head, elements, ids, first, keys, next_stage(head));
      arrive_after_copies(s.full[room.stage.at]);
      room.stage.next();
    }
  }

  // Fetches a sealed part. While one piece is converted the next is on its way. Where shared memory
  // has one buffer only, it comes afterwards.
  template <int kBits>
  __device__ void fetch_codes(const PromptHead& head, int part, const int32_t* pages, int keys) {
    const CodesLane<kBits> lane{p, head, part, p.part[part]};
    const int count = prompt_keys(head.steps_v), column = count * 16,
              values = head.steps_k * 2 * column;
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
    uint32_t to = 0;
    for (int token = 0; token < keys || token % count; token += 64) {
      wait_copy_groups<0>();
      meet();  // all of the piece is there, and the other buffer is free
      if (two) ask(token + 64);
      if (token % count == 0) to = next_stage(head);
      const uint32_t from = buffer(token), at = to + token % count * 16;
      lane.template convert_keys<E>(from, at, column);
      lane.template convert_values<E>(from, at + values, column, token & within, keys - token);
      if (!two) meet(), ask(token + 64);
      if ((token + 64) % count == 0) {
        fence_for_bulk_copies();  // products see what was stored
        arrive(s.full[room.stage.at]);
        room.stage.next();
      }
    }
  }

  __device__ void fetch_part(const PromptTile& tile, int part) {
    if constexpr (P::kGeneral) return fetch_general(*this, tile, part);
    const PromptHead& head = p.head[tile.head];
    const PromptPart& from = p.part_of(tile.head, part);
    const int keys = keys_of(p, tile, part, from.lengths[tile.sequence * from.lengths_stride]);
    const int32_t* pages = from.page_table + int64_t{tile.sequence} * from.table_stride;
    if (!keys) return;
    if (from.bits < 16 && p.copy_base) {
      const int base = __ldg(p.copy_base + part * p.batch + tile.sequence);
      if (base >= 0)
        return fetch_elements(head, copies_of(p, head), keys, [base](int i) { return base + i; });
    }
    switch (from.bits) {
      case 16:
        fetch_elements(head, elements_of(p, head, part, from), keys,
                       [pages](int i) { return __ldg(pages + i); });
        break;
      case 8: fetch_codes<8>(head, part, pages, keys); break;
      case 4: fetch_codes<4>(head, part, pages, keys); break;
      case 2: fetch_codes<2>(head, part, pages, keys); break;
    }
  }

  __device__ void run() {
    int taken = threadIdx.x == 0 ? atomicAdd(p.list + kTaken, 1) : 0;
    for (int n = 0;; ++n) {
      const int slot = n & 1;
      if (threadIdx.x == 0) s.taken[slot] = taken;
      meet();
      const PromptTile tile = tile_of(p, s.taken[slot]);
      if (threadIdx.x == 0 && tile.head >= 0) taken = atomicAdd(p.list + kTaken, 1);
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
