// Kernel parameters of one call of decode attention: Params and what is derived from it, filled by
// the host.
#pragma once

#include <algorithm>

#include "common/decode_call.h"
#include "cuda/decode/attend_general.cuh"
#include "cuda/decode/codes.cuh"
#include "cuda/decode/params.h"
#include "cuda/host.h"

namespace kvlathe::cuda {

// Of the quantized parts: 8, 4 or 2, or kSeveralWidths; 16: there are none.
inline int bits_of_codes(const kvlathe_attend_decode_args& a) {
  int bits = 16;
  for (int i = 0; i < a.part_count; ++i) {
    const int one = a.parts[i].bits_k;
    if (is_quantized(one)) bits = is_half(bits) || bits == one ? one : kSeveralWidths;
  }
  return bits;
}

// Whether the call is for attend_general. With bundles there is no other kernel for several widths.
inline bool is_general(const kvlathe_attend_decode_args& a) {
  const int bits = bits_of_codes(a);
  const bool mixed = bits == kSeveralWidths || (is_quantized(bits) && a.part_count > 2);
  return names_parts(a.part_count) || is_scored(a) || is_wide(a) ||
         ((a.flags & KVLATHE_BUNDLES) && mixed) ||
         std::any_of(a.parts, a.parts + a.part_count, [](const kvlathe_part& part) {
           return part.hidden || (any_quantized(part) && !known_codes(part));
         });
}

// Whether a part's V, and its K, are rows of bytes, one group a token. key_pages: or its K is by
// channel, in groups that are pages.
inline bool has_byte_rows(const kvlathe_part& part, const std::vector<Head>& heads,
                          bool key_pages) {
  const bool alike = key_pages
                         ? part.axis_v == KVLATHE_AXIS_RANK && part.axis_k == KVLATHE_AXIS_TOKEN &&
                               part.group_k == kChunkTokens
                         : part.axis_v != KVLATHE_AXIS_TOKEN && part.axis_k == part.axis_v;
  return is_byte(part.bits_k) && is_byte(part.bits_v) && alike && !part.hidden &&
         std::all_of(heads.begin(), heads.end(), [&](const Head& head) {
           return head.rank_k % 32 == 0 && head.rank_v % 32 == 0 && head.rank_v <= part.group_v &&
                  (key_pages || head.rank_k <= part.group_k);
         });
}

// Whether attend_bytes takes the call.
inline bool is_of_bytes(const kvlathe_attend_decode_args& a, const std::vector<Head>& heads,
                        bool key_pages) {
  if (key_pages && a.page_tokens != kChunkTokens) return false;
  const auto of_bytes = [&](const kvlathe_part& part) {
    return has_byte_rows(part, heads, key_pages);
  };
  const kvlathe_part* const end = a.parts + a.part_count;
  return a.part_count <= 2 && !is_scored(a) && !is_wide(a) && !(a.flags & KVLATHE_BUNDLES) &&
         std::any_of(a.parts, end, of_bytes) && std::all_of(a.parts, end, [&](const auto& part) {
           return of_bytes(part) ? any_float8(part) == any_float8(a)
                                 : !any_quantized(part) && !part.hidden;
         });
}

inline PartParams part_params(const kvlathe_attend_decode_args& a, const kvlathe_part& part,
                              bool general, bool byte_rows) {
  const bool codes = any_quantized(part);
  const int32_t unit = !codes      ? kRowTokens
                       : byte_rows ? kChunkTokens
                                   : a.page_tokens,
                units = a.page_tokens / unit;
  return {part.page_table,
          part.lengths,
          part.page_stride,
          part.lengths_stride,
          part.page_table_stride,
          codes && general ? kGeneral : part.bits_k,
          log2_of(unit),
          units,
          int32_t((uint64_t{1} << 32) / uint64_t(units) + 1),
          codes ? log2_of(part.group_v) : 0};
}

// 16 bit: a tile has a power of two of units, up to kTileBytes, and a page holds whole tiles.
// gap: bytes after two rows in a ring.
inline LaneParams lane_params16(const LaneRow& row, int32_t units_per_page, int32_t gap) {
  const int32_t ranks = row.rank_k + (values_in_keys(row) ? 0 : row.rank_v),
                bytes = kRowTokens * 2 * ranks, copies = std::max(row.rank_k, row.rank_v) / 16,
                room = bytes + kRowTokens / 2 * gap * (values_in_keys(row) ? 1 : 2);
  int32_t units = 1;
  while (2 * units * bytes <= kTileBytes && 2 * units * copies <= kMostCopies &&
         units_per_page % (2 * units) == 0)
    units *= 2;
  return {row.k, row.v, bytes, room * units, 0, 0, uint16_t(bytes / kWeight), uint8_t(units), 0};
}

// Rows of bytes, 64 tokens in two halves: K, by channel or by token, and V. meta_bytes: of a token of
// either. A tile of the ring is a half.
inline LaneParams lane_params_halves(const LaneRow& row, bool by_channel, int32_t meta_bytes) {
  const int32_t k = by_channel ? row.rank_k * (kChunkTokens + kPairBytes)
                               : kChunkTokens * (row.rank_k + meta_bytes),
                v = kChunkTokens * (row.rank_v + meta_bytes);
  return {row.k,
          row.v,
          k + v,
          std::max(k, v),
          uint16_t((row.k_meta - row.k) / 16),
          uint16_t((row.v_meta - row.k) / 16),
          uint16_t((k + v) / kWeight),
          1,
          0};
}

// The end of K or V, or of its metadata, in a lane's slab.
struct SideEnds {
  int32_t codes, meta;
};

inline SideEnds ends_of(const LaneRow& row, const kvlathe_part& part, int which,
                        int32_t page_tokens) {
  const Format format = which ? format_v(part) : format_k(part);
  const int32_t rank = which ? row_of_values(row) : row.rank_k,
                groups = which ? row.groups_v : row.groups_k, at = (which ? row.v : row.k) - row.k,
                meta = (which ? row.v_meta : row.k_meta) - row.k;
  const FormSide side = side_of(format);
  const int32_t codes = at + int32_t(slab_bytes(rank, page_tokens, format.bits));
  if (!format.quantized()) return {codes, codes};
  const int count = groups_of(format, rank, page_tokens);
  require(groups == count * (format.by_channel() ? rank : page_tokens), KVLATHE_BAD_ARGUMENT,
          "the lane of head " + std::to_string(row.head) +
              " has other group counts than its part's groups give");
  return {codes, meta + side.meta_size(count, rank, page_tokens)};
}

// Quantized: a tile is the lane's whole slab of a page, K | metadata | V | metadata; or the first two
// of them, where V is a part of K.
inline LaneParams lane_params_codes(const LaneRow& row, const kvlathe_part& part,
                                    int32_t page_tokens, bool general) {
  const int32_t k_meta = row.k_meta - row.k, v = row.v - row.k, v_meta = row.v_meta - row.k;
  const SideEnds of_k = ends_of(row, part, 0, page_tokens),
                 of_v = ends_of(row, part, 1, page_tokens);
  const bool in_keys = values_in_keys(row);
  require((k_meta >= of_k.codes || !is_quantized(part.bits_k)) && (in_keys || v >= of_k.meta) &&
              (v_meta >= of_v.codes || !is_quantized(part.bits_v)) && of_v.meta < 1 << 20,
          KVLATHE_UNSUPPORTED,
          "the lane of head " + std::to_string(row.head) +
              " is not in the order K, metadata, V, metadata");
  const int32_t copied = ((in_keys ? of_k : of_v).meta + 15) / 16 * 16;
  const int32_t gaps =
      is_byte(part.bits_k) && !general ? page_tokens / kPieceTokens * kPieceGap : 0;
  const int32_t units = 2 * (copied + gaps) <= kPagesBytes ? 2 : 1;
  return {row.k,
          v,
          copied,
          (copied + gaps) * units,
          uint16_t(k_meta / 16),
          uint16_t(v_meta / 16),
          uint16_t(copied / kWeight + (general ? kGeneralTileWeight : kTileWeight)),
          uint8_t(units),
          uint8_t(groups_of(format_k(part), row.rank_k, page_tokens))};
}

// What a warp needs beside its ring for a lane of a call with codes: the queries of `columns`.
// groups_k: 0 for a lane without codes.
inline int32_t codes_bytes_of(const kvlathe_attend_decode_args& a, const Head& head, int groups_k,
                              const kvlathe_part& part, int fill, int columns, bool general) {
  const Format values = format_v(part);
  const bool grids = values.quantized() && !values.by_channel();
  if (general)
    return kept_queries_bytes(head.rank_k) +
           (grids ? kept_grids_bytes(groups_of(values, head.row_of_values(), a.page_tokens)) : 0);
  const int32_t queries = columns * head.rank_k * 2;  // as they are, for 16-bit parts
  const int32_t tiles = (columns + kMaxGroup - 1) / kMaxGroup;
  return groups_k ? std::max(tiles * codes_bytes(fill, head.rank_k, groups_k), queries) : queries;
}

// P: Params, or what is derived from it.
template <class P>
P decode_params_of(const kvlathe_attend_decode_args& a, const std::vector<Head>& heads, int fill) {
  const bool general = !P::kByteRows && is_general(a);
  constexpr int kParts = P::kParts;
  P p{};
  p.pool = static_cast<const char*>(a.pool);
  p.q = static_cast<const uint16_t*>(a.q);
  p.o = static_cast<uint16_t*>(a.o);
  p.q_stride = a.q_stride;
  p.o_stride = a.o_stride;
  p.scale_log2 = a.scale * 1.4426950408889634f;
  p.batch = a.batch;
  p.heads = int32_t(heads.size());
  p.group_size = a.group_size;
  p.page_tokens = a.page_tokens;
  p.least_block_weight = kLeastBlockWeight;
  bool any_codes = false;
  for (int i = 0; i < kParts; ++i) {
    p.part[i] = part_params(a, a.parts[std::min(i, a.part_count - 1)], general, P::kByteRows);
    any_codes |= is_quantized(p.part[i].bits) && !P::kByteRows;
  }
  for (size_t h = 0; h < heads.size(); ++h) {
    const Head& head = heads[h];
    p.head[h] = {int32_t(head.q_offset),
                 int32_t(head.o_offset),
                 uint16_t(head.rank_k),
                 uint16_t(head.rank_v),
                 {}};
    const auto slots = head.slots(a.part_count);
    for (int slot = 0; slot < P::kSlots; ++slot) {
      const int i = slots[slot];
      if (i < 0) continue;
      const bool codes = any_quantized(a.parts[i]);
      LaneParams& lane = p.head[h].lane[slot];
      lane = !codes
                 ? lane_params16(*head.lane[i], p.part[i].units_per_page, P::kPlain ? kRowGap : 0)
             : P::kByteRows ? lane_params_halves(*head.lane[i], P::kKeyPages, P::kMetaBytes)
                            : lane_params_codes(*head.lane[i], a.parts[i], a.page_tokens, general);
      if (P::kPlain)
        p.codes_bytes = std::max(p.codes_bytes, wide_queries_bytes(head.rank_k));
      else if (any_codes || general)
        p.codes_bytes = std::max(p.codes_bytes, codes_bytes_of(a, head, lane.groups_k, a.parts[i],
                                                               fill, most_columns(p), general));
      p.part_weight[i] += lane.weight;
      p.least_block_weight = std::max(p.least_block_weight, lane.weight * lane.tile_units);
      if constexpr (P::kNamed) p.slot[h][slot] = uint8_t(i);
    }
  }
  if constexpr (P::kNamed) p.parts = a.part_count;
  return p;
}

// P: GeneralParams, or what is derived from it.
template <class P>
P general_params_of(const kvlathe_attend_decode_args& a, const std::vector<Head>& heads) {
  auto p = decode_params_of<P>(a, heads, 1);
  for (int i = 0; i < a.part_count; ++i) {
    const kvlathe_part& part = a.parts[i];
    p.form[i] = {
        {side_of(format_k(part)), side_of(format_v(part))}, part.hidden, part.hidden_stride};
  }
  for (size_t h = 0; h < heads.size(); ++h) {
    const auto slots = heads[h].slots(a.part_count);
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      if (slots[slot] < 0) continue;
      const kvlathe_part& part = a.parts[slots[slot]];
      p.groups[h][slot][0] = uint8_t(groups_of(format_k(part), heads[h].rank_k, a.page_tokens));
      p.groups[h][slot][1] =
          uint8_t(groups_of(format_v(part), heads[h].row_of_values(), a.page_tokens));
    }
  }
  if constexpr (P::kScored) p.sinks = a.sinks, p.bound = a.softcap * kLog2E;
  return p;
}

}  // namespace kvlathe::cuda
