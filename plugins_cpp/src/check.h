// What every backend checks before it starts, and the merged view of the lanes that it then trusts.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "kvlathe/abi.h"

namespace kvlathe {

// Thrown inside the library only; run() turns it into a status at the C boundary.
struct Refusal : std::exception {
  Refusal(kvlathe_code code, std::string message) : code(code), message(std::move(message)) {}
  const char* what() const noexcept override { return message.c_str(); }
  kvlathe_code code;
  std::string message;
};

// One row of the lane table.
struct LaneRow {
  int32_t layer, head, rank_k, rank_v, k, k_meta, v, v_meta, groups_k, groups_v;
};
static_assert(sizeof(LaneRow) == KVLATHE_LANE_COLUMNS * sizeof(int32_t));

// One KV head of the call: its ranks, where it starts in a row of q and of o, and its lane in each part (null: none
// there).
struct Head {
  int32_t rank_k, rank_v;
  int64_t q_offset, o_offset;
  const LaneRow* lane[KVLATHE_MAX_PARTS];
};

// Checks sizes, alignment and table rows; returns the union of the parts' heads in head order.
std::vector<Head> checked_heads(const kvlathe_attend_decode_args& args);

// The same for a call that is only planned: q and o may be null.
std::vector<Head> checked_lanes(const kvlathe_attend_decode_args& args);

// Bytes of one lane's codes (or elements) of K or V in a page.
inline int64_t slab_bytes(int64_t rank, int64_t page_tokens, int64_t bits) { return rank * page_tokens * bits / 8; }

void write_status(kvlathe_status* status, kvlathe_code code, const char* message) noexcept;

// Runs `body` and reports what it throws: no exception crosses the C boundary.
template <class Body>
int32_t run(kvlathe_status* status, Body body) noexcept {
  try {
    body();
    write_status(status, KVLATHE_OK, "");
    return KVLATHE_OK;
  } catch (const Refusal& refusal) {
    write_status(status, refusal.code, refusal.what());
    return refusal.code;
  } catch (const std::exception& error) {
    write_status(status, KVLATHE_BAD_ARGUMENT, error.what());
    return KVLATHE_BAD_ARGUMENT;
  }
}

}  // namespace kvlathe
