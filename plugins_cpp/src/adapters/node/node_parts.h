// The parts in which a node takes the buckets of its layer, as PlanIndex.parts of
// kvlathe/plan/index.py has them for a plan.
#pragma once

#include <cstdint>
#include <vector>

#include "common/layer_table.h"

namespace kvlathe {

// The lanes of a bucket that see alike.
struct NodePart {
  int32_t bucket;
  std::vector<int32_t> lanes;  // their rows of the bucket's lane table
  kvlathe_window window;       // its `sealed` and `fresh` are buckets

  int32_t lane_count() const { return int32_t(lanes.size()) / KVLATHE_LANE_COLUMNS; }
};

// Bucket after bucket. One without lanes in this layer is a part as well: page tables and lengths
// are by bucket.
std::vector<NodePart> node_parts(const Layer& layer);

// Those that have lanes: the parts of a call of attention.
std::vector<int32_t> attended_parts(const std::vector<NodePart>& parts);

// What the lanes of part `own` see, `sealed` and `fresh` being places in `attended`. Sealed parts
// with one window have equally many tokens, so any of them does.
kvlathe_window window_among(const std::vector<NodePart>& parts,
                            const std::vector<int32_t>& attended, const NodePart& own);

}  // namespace kvlathe
