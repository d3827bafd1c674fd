#include "common/lanes.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "common/limits.h"

namespace kvlathe {

const LaneRow* find_lane(const kvlathe_part& part, const LaneRow& lane) {
  for (int32_t i = 0; i < part.lane_count; ++i) {
    const LaneRow& row = lanes_of(part)[i];
    if (row.layer != lane.layer || row.head != lane.head) continue;
    return row.rank_k == lane.rank_k && row.rank_v == lane.rank_v ? &row : nullptr;
  }
  return nullptr;
}

bool is_rank(int32_t rank) { return rank > 0 && rank % kRankMultiple == 0 && rank <= kMostRank; }

void check_format(const Format& format) {
  require(
      is_width(format.bits), KVLATHE_BAD_ARGUMENT,
      "a bucket has " + std::to_string(format.bits) + " bits: 32, 16, 8, 4, 3 or 2 are possible");
  if (!format.quantized()) return;
  require(format.axis >= KVLATHE_AXIS_RANK && format.axis <= KVLATHE_AXIS_RANK_FLOAT8,
          KVLATHE_BAD_ARGUMENT, "a bucket's axis is neither rank nor token");
  require(has_width(format.coding(), format.bits), KVLATHE_BAD_ARGUMENT,
          format.fixed_levels() ? "levels of the normal are for 4, 3 and 2 bits"
                                : "codes that are floats have 8 bits");
  require(format.group > 0 && format.group % kRankMultiple == 0, KVLATHE_UNSUPPORTED,
          "a quantization group is no multiple of 16");
}

void check_lane(const LaneRow& row, const Format& k, const Format& v, int64_t page_tokens,
                int64_t page_stride) {
  const auto where = [&] {
    return "the lane of layer " + std::to_string(row.layer) + " head " + std::to_string(row.head);
  };
  if (!is_rank(row.rank_k) || !is_rank(row.rank_v)) {
    throw Refusal(KVLATHE_BAD_ARGUMENT, where() + " has ranks that are no multiples of 16 up to " +
                                            std::to_string(kMostRank));
  }
  for (int32_t offset : {row.k, row.k_meta, row.v, row.v_meta}) {
    if (offset >= 0 && offset % kOffsetBytes == 0) continue;
    throw Refusal(KVLATHE_MISALIGNED, where() + " has an offset that is no multiple of 128 bytes");
  }
  const bool alike =
      k.bits == v.bits && (!k.quantized() || (k.axis == v.axis && k.group == v.group));
  require(!values_in_keys(row) || (alike && row.v_meta == row.k_meta && row.rank_v <= row.rank_k),
          KVLATHE_BAD_ARGUMENT, where() + " has V in the place of K, and is no part of it");
  const int64_t ends[] = {
      row.k + slab_bytes(row.rank_k, page_tokens, k.bits),
      row.v + slab_bytes(row.rank_v, page_tokens, v.bits),
      row.k_meta + 2 * k.halves() * int64_t{row.groups_k},
      row.v_meta + 2 * v.halves() * int64_t{row.groups_v},
  };
  if (*std::max_element(std::begin(ends), std::end(ends)) > page_stride) {
    throw Refusal(KVLATHE_TOO_SMALL, where() + " ends past the page stride");
  }
}

void check_lanes(const kvlathe_part& part, int64_t page_tokens) {
  require(part.lanes && part.lane_count >= 1, KVLATHE_BAD_ARGUMENT, "a part has no lanes");
  check_format(format_k(part));
  check_format(format_v(part));
  for (int32_t i = 0; i < part.lane_count; ++i) {
    check_lane(lanes_of(part)[i], format_k(part), format_v(part), page_tokens, part.page_stride);
  }
}

}  // namespace kvlathe
