// How a general call fetches: stages that windows hide from all rows of a tile are left out, and
// codes may have any form (forms.cuh). The forms that prompt_codes.cuh knows are converted there.
#pragma once

#include "cuda/prefill/prompt_fetch.cuh"

namespace kvlathe::cuda {

#ifdef KVLATHE_WGMMA

// As copy16, of eight bytes.
__device__ inline void copy8(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from));
}

// Where converted rows go in a stage, from row `first` on (as RowsPlace of forms.cuh).
struct StagePlace {
  uint32_t base;
  int width, first;
  __device__ uint32_t at(int row, int piece) const {
    return base + piece_at(width, first + row, piece);
  }
};

// The codes of one lane in one part, in any form: what CodesLane is for one form. kFloat8: they may be
// floats of 8 bits.
template <bool kFloat8>
struct FormLane {
  const PromptParams& p;
  const PromptHead& head;
  int part;
  const PromptPart& of;
  const FormSide (&sides)[2];
  const uint8_t (&groups)[2];

  __device__ FormRows rows(int which, uint32_t buffer) const {
    const FormSide& side = sides[which];
    const int rank = 16 * (which ? head.steps_v : head.steps_k);
    uint32_t codes = buffer;
    if (which) codes += bytes(0);
    return {codes, codes + code_bytes(which), side, rank, groups[which], 64};
  }
  // What 64 tokens of K or V take in a buffer: codes, and then their metadata.
  __device__ int code_bytes(int which) const {
    return 128 * sides[which].bits * (which ? head.steps_v : head.steps_k);
  }
  __device__ int bytes(int which) const {
    const int rank = 16 * (which ? head.steps_v : head.steps_k);
    return code_bytes(which) + sides[which].meta_size<kFloat8>(groups[which], rank, 64);
  }

  // Asks for 64 tokens of a page, from `token` on.
  __device__ void copy(uint32_t to, int32_t page, int token) const {
    const char* from = p.pool + page * of.page_stride;
    for (int which = 0; which < 2; ++which) {
      const FormRows own = rows(which, to);
      const char* codes = from + (which ? head.v[part] : head.k[part]);
      const char* meta = from + head.k[part] + 16 * (which ? head.v_meta[part] : head.k_meta[part]);
      const int row = 8 * own.side.bits;  // bytes of 64 codes of a channel
      if (!own.side.by_channel()) {
        codes += token * (own.rank * own.side.bits / 8);
        meta += token * own.groups * own.side.meta_bytes<kFloat8>();
      }
      const int size = code_bytes(which), meta_size = bytes(which) - size;
      // A channel's 64 codes of 3 bits are 24 bytes.
      const int piece = own.side.by_channel() && own.side.in_blocks() ? 8 : 16;
#pragma unroll 1
      for (int i = threadIdx.x * piece; i < size; i += 128 * piece) {
        int at = i;
        if (own.side.by_channel())
          at = i / row * (p.page_tokens * own.side.bits / 8) + token * own.side.bits / 8 + i % row;
        if (piece == 8)
          copy8(own.codes + i, codes + at);
        else
          copy16(own.codes + i, codes + at, true);
      }
#pragma unroll 1
      for (int i = threadIdx.x * 16; i < meta_size; i += 128 * 16)
        copy16(own.meta + i, meta + i, true);
    }
  }

  // Converts the piece in the buffer at `from` that begins at `token` of its page. A warp takes 16
  // tokens.
  template <class E>
  __device__ void convert(uint32_t from, uint32_t keys, uint32_t values, int token,
                          int valid) const {
    const int own = threadIdx.x / 32 * 16;
    for (int which = 0; which < 2; ++which) {
      const FormRows rows = this->rows(which, from);
      const int group = rows.side.by_channel() ? (token + own) / rows.side.group : 0;
      convert_form<E, kFloat8>(rows, own, group, valid - own,
                               StagePlace{which ? values : keys, block_steps(rows.rank / 16), own});
    }
  }
};

// The same interface of a form that prompt_codes.cuh reads.
template <int kBits>
struct KnownLane : CodesLane<kBits> {
  template <class E>
  __device__ void convert(uint32_t from, uint32_t keys, uint32_t values, int token,
                          int valid) const {
    this->template convert_keys<E>(from, keys);
    this->template convert_values<E>(from, values, token, valid);
  }
};

// Where a part of a tile is fetched from.
struct PartPages {
  const PromptHead& head;
  int part;
  const PromptPart& of;
  const int32_t* pages;
  int keys;
  TileWindow window;
};

// As Fetcher::fetch_elements, of a lane with a window.
template <class Fetcher, class IdOf>
__device__ void fetch_seen_elements(Fetcher& f, const PartPages& from, const Elements& elements,
                                    IdOf id_of) {
  for (int first = from.window.next(0); first < from.keys;
       first = from.window.next(first + kStageTokens))
    f.fetch_stage(from.head, elements, first, from.keys,
                  [&](int token) { return id_of(page_of(f.p, token)); });
}

// As Fetcher::fetch_codes. A stage is fetched whole or not at all.
template <class Fetcher, class Lane>
__device__ void fetch_seen_codes(Fetcher& f, const PartPages& from, const Lane& lane) {
  const int shift = 31 - __clz(f.p.page_tokens), within = f.p.page_tokens - 1;
  const bool two = f.p.codes_buffers == 2;
  const auto after = [&](int token) { return from.window.next(token + kStageTokens); };
  int turn = 0;  // which buffer is next
  const auto ask = [&](int token) {
    if (token < from.keys)
      lane.copy(f.shared + 2 * f.p.query_bytes + turn * f.p.codes_bytes,
                __ldg(from.pages + (token >> shift)), token & within);
    close_copy_group();
  };
  int token = from.window.next(0);
  f.meet();  // nobody reads the buffers any more
  ask(token);
#pragma unroll 1
  for (; token < from.keys; token = after(token)) {
    wait_copy_groups<0>();
    f.meet();  // all of the piece is there, and the other buffer is free
    const uint32_t piece = f.shared + 2 * f.p.query_bytes + turn * f.p.codes_bytes;
    if (two) turn ^= 1, ask(after(token));
    const uint32_t to = f.stored_stage(from.head);
    lane.template convert<typename Fetcher::Element>(piece, to, to + from.head.steps_k * kStageUnit,
                                                     token & within, from.keys - token);
    if (!two) f.meet(), ask(after(token));
    f.pass_stored();
  }
}

template <class Fetcher>
__device__ void fetch_general(Fetcher& f, const PromptTile& tile, int part) {
  const auto& p = f.p;
  const PromptHead& head = p.head[tile.head];
  const auto before = [&](int other) {
    const PromptPart& of = p.part_of(tile.head, other);
    return of.lengths[tile.sequence * of.lengths_stride];
  };
  const int keys = keys_of(p, tile, part, before(part));
  if (!keys) return;
  const PromptPart& of = p.part_of(tile.head, part);
  const int32_t* pages = of.page_table + int64_t{tile.sequence} * of.table_stride;
  int base = -1;  // of copies
  if (of.bits < 16 && p.copy_base)
    base = __ldg(p.copy_base + p.call_part_of(tile.head, part) * p.batch + tile.sequence);
  const bool as_they_are = of.bits == 16 || base >= 0;
  const Elements elements = base < 0 ? elements_of(p, head, part, of) : copies_of(p, head);
  const auto id_of = [pages, base](int i) { return base < 0 ? __ldg(pages + i) : base + i; };
  const PartPages from{head,  part, of,
                       pages, keys, TileWindow(p, tile, part, kStageTokens, before)};
  if (as_they_are) return fetch_seen_elements(f, from, elements, id_of);
  switch (of.bits) {
    case 8: fetch_seen_codes(f, from, KnownLane<8>{p, head, part, of}); break;
    case 4: fetch_seen_codes(f, from, KnownLane<4>{p, head, part, of}); break;
    case 2: fetch_seen_codes(f, from, KnownLane<2>{p, head, part, of}); break;
    default:
      fetch_seen_codes(f, from,
                       FormLane<Fetcher::kFloat8>{p, head, part, of, p.sides_of(tile.head, part),
                                                  p.groups[tile.head][part]});
  }
}

#endif

}  // namespace kvlathe::cuda
