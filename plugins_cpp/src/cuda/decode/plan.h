// The sizes of a call of attend_decode that plan.cu plans with. schedule.cuh says how work is divided.
#pragma once

#include "cuda/decode/params.h"
#include "cuda/decode/schedule.cuh"

namespace kvlathe::cuda {

struct PlanLane {
  uint16_t weight, tile_units;
};
struct PlanHead {
  PlanLane lane[KVLATHE_MAX_SLOTS];
};

template <int kParts>
struct PlanSizes {
  PartParams part[kParts];
  int32_t part_weight[kParts];
  int32_t least_block_weight, batch, heads, blocks, spare_blocks;
  uint32_t tag;
};
struct PlanCall {
  PlanSizes<KVLATHE_MAX_PARTS> sizes;
  PlanHead head[KVLATHE_MAX_HEADS];
  bool named;  // else the first KVLATHE_MAX_SLOTS parts are all
  SlotTable<true> slots;
  int32_t columns, group_size, tiles;  // of a call with bundles; else 0
};

// A call without the rows that its prompt chunks are known to have.
kvlathe_attend_decode_args single_rows(kvlathe_attend_decode_args args);

// Checks a call and decides its grid as attend_decode does. q, o and the workspace may be null.
PlanCall plan_call_of(const kvlathe_attend_decode_args& args);

// Of any call on the current device.
int most_blocks();

}  // namespace kvlathe::cuda
