// A call of attend_decode as every backend sees it: checked, and its parts' lanes merged by head.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "common/lanes.h"
#include "common/refusal.h"

namespace kvlathe {

// One KV head of the call: its ranks, where it starts in a row of q and of o, and its lane in each
// part (null: none there).
struct Head {
  int32_t rank_k, rank_v;
  int64_t q_offset, o_offset;
  const LaneRow* lane[KVLATHE_MAX_PARTS];
  bool values_in_keys;  // in some part

  // As that of a LaneRow.
  int32_t row_of_values() const { return values_in_keys ? rank_k : rank_v; }

  // Whether only the kernels of wide calls attend it (cuda/decode/params.h).
  bool is_wide() const;

  // The part in each of its slots; -1: none. Where a call has as few parts as a lane has slots, part
  // i is in slot i. Else lanes name their parts, in their order. Refuses a head in more parts.
  std::array<int, KVLATHE_MAX_SLOTS> slots(int32_t part_count) const;
};

// Whether its softmax is not that of its scores alone: they are bounded, or have sink logits beside them.
inline bool is_scored(const kvlathe_attend_decode_args& a) { return a.softcap != 0 || a.sinks; }

// Whether some head is wide.
bool is_wide(const kvlathe_attend_decode_args& a);

inline bool names_parts(int32_t part_count) { return part_count > KVLATHE_MAX_SLOTS; }

// Checks sizes, alignment and table rows; returns the union of the parts' heads in head order.
std::vector<Head> checked_heads(const kvlathe_attend_decode_args& args);

// The same for a call that is only planned: q and o may be null.
std::vector<Head> checked_lanes(const kvlathe_attend_decode_args& args);

}  // namespace kvlathe
