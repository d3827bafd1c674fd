// What one attend_decode launch is told, by value. Hosts decide, kernels take work arrays.
#pragma once

#include <cstdint>

#include "kvlathe/abi.h"

namespace kvlathe::cuda {

constexpr int kMaxRank = 128;
constexpr int kMaxGroup = 8;     // query heads a lane: the N of mma.m16n8k16
constexpr int kUnitTokens = 16;  // a unit of work: 16 tokens of a lane, the M of mma.m16n8k16

// Tuning, fixed when the library is built.
#ifndef KVLATHE_WARPS
#define KVLATHE_WARPS 8
#endif
#ifndef KVLATHE_BLOCKS_PER_SM
#define KVLATHE_BLOCKS_PER_SM 2
#endif
constexpr int kMaxWarps = KVLATHE_WARPS;
constexpr int kBlocksPerSM = KVLATHE_BLOCKS_PER_SM;
constexpr int kTileBytes = 6 << 10;              // narrow lanes take several units at once, up to this
constexpr int kWeight = 512;                     // bytes a unit of scheduled work: 16 tokens x 16 channels x 2 bytes
constexpr int kFineShare = (1 << 18) / kWeight;  // blocks with less work take one unit a tile: evenness beats overhead
constexpr int kLeastBlockWeight = (16 << 10) / kWeight;  // a block with less work costs more than it saves

struct PartParams {
  const int32_t* page_table;
  const int32_t* lengths;
  int64_t page_stride, lengths_stride;
  int32_t table_stride;
};

// One lane in one part: byte offsets from the page's start. A tile is what one warp fetches and attends at once:
// tile_units (a power of two) units of one page. weight: of a unit, in kWeight bytes; 0: the part does not hold this
// lane.
struct LaneParams {
  int32_t k, v;
  uint16_t weight, tile_units;

  __host__ __device__ int unit_bytes() const { return weight * kWeight; }
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

// Kept below 4 KB: a launch with more is microseconds slower.
template <int kParts>
struct Params {
  const char* pool;
  const uint16_t* q;
  uint16_t* o;
  int64_t q_stride, o_stride;
  int32_t* arrivals;  // [batch, heads]: blocks that have left a partial result; zero between launches
  Partial* partials;  // [blocks, 2]
  float scale_log2;
  int32_t batch, heads, group_size, page_tokens;
  int32_t units_per_page, units_per_page_magic;  // u / units_per_page == umulhi(u, magic), but for 1
  int32_t ring_bytes;                            // shared memory of one warp's ring
  int32_t merge_floats;                          // shared memory of the merge buffer
  int32_t part_weight[kParts];                   // sum over heads
  int32_t least_block_weight;                    // at least a tile's: then no block between two others is empty
  PartParams part[kParts];
  HeadParams<kParts> head[KVLATHE_MAX_HEADS];
};
static_assert(sizeof(Params<KVLATHE_MAX_PARTS>) <= 4096);

}  // namespace kvlathe::cuda
