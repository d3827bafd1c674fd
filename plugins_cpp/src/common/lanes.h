// Lanes of a part: the rows of the lane table, and what is refused of them.
#pragma once

#include <cstdint>

#include "common/formats.h"
#include "kvlathe/abi.h"

namespace kvlathe {

// One row of the lane table.
struct LaneRow {
  int32_t layer, head, rank_k, rank_v, k, k_meta, v, v_meta, groups_k, groups_v;
};
static_assert(sizeof(LaneRow) == KVLATHE_LANE_COLUMNS * sizeof(int32_t));

// Whether V is the first rank_v numbers of K's rows: both then have one place, and one form.
inline bool values_in_keys(const LaneRow& row) { return row.v == row.k; }
// Numbers in a row that V is read from, or channels where groups run along the tokens.
inline int32_t row_of_values(const LaneRow& row) {
  return values_in_keys(row) ? row.rank_k : row.rank_v;
}

inline const LaneRow* lanes_of(const kvlathe_part& part) {
  return reinterpret_cast<const LaneRow*>(part.lanes);
}

// The lane of `part` with the layer, head and ranks of `lane`; null where it has none.
const LaneRow* find_lane(const kvlathe_part& part, const LaneRow& lane);

// Positive multiples of 16 up to 1024.
bool is_rank(int32_t rank);

// Refuses a format that no kernel reads.
void check_format(const Format& format);

// Refuses a row whose lane does not fit into a page, or whose V is no part of its K where both have
// one place.
void check_lane(const LaneRow& row, const Format& k, const Format& v, int64_t page_tokens,
                int64_t page_stride);

// Refuses a list of lanes of whole pages: formats, alignment, rows.
void check_lanes(const kvlathe_part& part, int64_t page_tokens);

}  // namespace kvlathe
