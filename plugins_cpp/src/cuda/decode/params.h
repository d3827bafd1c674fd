// What one attend_decode launch is told, by value. Hosts decide, kernels take work arrays.
#pragma once

#include <cstdint>

#include "common/formats.h"
#include "common/limits.h"
#include "kvlathe/abi.h"

namespace kvlathe::cuda {

constexpr int kRowTokens = 16;    // the M of mma.m16n8k16: what 16-bit tiles are cut into
constexpr int kChunkTokens = 64;  // quantized pages are attended in chunks of this many tokens

// K of 8 bits lies in its tile in pieces of 16 tokens set apart by 16 bytes: the tokens that a warp
// reads at once are 16 apart, and would be in the same banks.
constexpr int kPieceTokens = 16, kPieceGap = 16;

// Tuning, fixed when the library is built.
#ifndef KVLATHE_WARPS
#define KVLATHE_WARPS 8
#endif
#ifndef KVLATHE_BLOCKS_PER_SM
#define KVLATHE_BLOCKS_PER_SM 2
#endif
constexpr int kMaxWarps = KVLATHE_WARPS;
// Of a block of attend_decode<.., kBits, kFill>. 8-bit tiles are so large that shared memory holds
// the rings of no more warps; their registers then go to loads in flight.
__host__ __device__ constexpr int most_warps(int bits, int fill) {
  return bits == 8 && fill == 2 ? kMaxWarps * 3 / 4 : kMaxWarps;
}
constexpr int kBlocksPerSM = KVLATHE_BLOCKS_PER_SM;
constexpr int kTileBytes = 6 << 10;   // narrow 16-bit lanes take several units at once, up to this
constexpr int kPagesBytes = 8 << 10;  // likewise two quantized pages
constexpr int kWeight = 128;          // bytes a unit of scheduled work
constexpr int kFineShare =
    (1 << 18) / kWeight;  // blocks with less work take one unit a tile: evenness beats overhead
constexpr int kSpareShare =
    (1 << 19) / kWeight;  // where calls overlap and blocks have less work than this, one in
constexpr int kSpareBlocks =
    32;  // so many is left without: it starts when the call before has ended
constexpr int kLeastBlockWeight =
    (16 << 10) / kWeight;                         // a block with less work costs more than it saves
constexpr int kTileWeight = (1 << 10) / kWeight;  // what a quantized tile costs beyond its bytes

struct PartParams {
  const int32_t* page_table;
  const int32_t* lengths;
  int64_t page_stride, lengths_stride;
  int32_t table_stride;
  int32_t bits;  // 16, 8, 4 or 2
  int32_t
      unit_shift;  // log2 of the tokens in a unit: 16 of a 16-bit lane, a page of a quantized one
  int32_t units_per_page,
      units_per_page_magic;  // u / units_per_page == umulhi(u, magic), but for 1
  int32_t groups_v;          // log2 of a quantized V group's tokens
};

// One lane in one part. A tile is what one warp fetches and attends at once: tile_units (a power of
// two) units of one page, or one or two quantized pages. weight: of a unit, in kWeight bytes; 0:
// the part does not hold this lane. 16 bit: a unit's K lies at k + unit * bytes of its rows,
// likewise V. Quantized: a unit is the slab of one page, `bytes` from k on; V and the metadata lie
// at offsets from its start.
struct LaneParams {
  int32_t k, v;
  int32_t bytes;            // of a unit, in the pool
  int32_t tile_bytes;       // of a tile of tile_units, in a ring
  uint16_t k_meta, v_meta;  // in 16 bytes
  uint16_t weight;
  uint8_t tile_units, groups_k;
};

template <int kParts>
struct HeadParams {
  int32_t q_offset, o_offset;
  uint16_t rank_k, rank_v;
  LaneParams lane[kParts];
};

// A partial result of one span of work: the softmax state of its query heads.
struct Partial {
  float2 top_sum[kMaxGroup];        // running maximum (base 2) and sum
  float out[kMaxGroup * kMaxRank];  // [group][rank_v], not divided by the sum
};

struct PlanRecord;  // schedule.cuh

template <int kParts>
struct Params {
  const char* pool;
  const uint16_t* q;
  uint16_t* o;
  int64_t q_stride, o_stride;
  Partial* partials;       // [blocks, 2]; zero between launches
  const PlanRecord* plan;  // null, or [blocks]
  float scale_log2;
  int32_t batch, heads, group_size, page_tokens;
  uint32_t plan_tag;  // of what the plan depends on beside lengths and page ids
  int32_t early;  // what the kernel before this one does not write may be read before it is done
  int32_t ring_bytes;           // shared memory of one warp's ring
  int32_t codes_bytes;          // shared memory of one warp's quantized queries
  int32_t merge_floats;         // shared memory of the merge buffer
  int32_t part_weight[kParts];  // sum over heads
  int32_t least_block_weight;   // at least a tile's: then no block between two others is empty
  int32_t spare_blocks;         // of a small call: the last ones, which get no work
  PartParams part[kParts];
  HeadParams<kParts> head[KVLATHE_MAX_HEADS];
};
static_assert(sizeof(Params<KVLATHE_MAX_PARTS>) <= 8192);

}  // namespace kvlathe::cuda
