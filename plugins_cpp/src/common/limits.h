// Limits: the largest sizes that the kernels take, and the words that refuse more.
//
// Python reads the numbers from this file and refuses a plan beyond them when an engine is built
// or loaded (kvlathe/base/kernel_limits.py). So each stands on a line of its own.
#pragma once

#include <cstdint>
#include <string>

#include "common/refusal.h"
#include "kvlathe/abi.h"

namespace kvlathe {

// -- every kernel -------------------------------------------------------------

// Ranks, quantization groups and pages are multiples of an MMA's inner dimension.
constexpr int kRankMultiple = 16;
// Offsets in a page and page strides: ALIGN of kvlathe/plan/formats.py.
constexpr int64_t kOffsetBytes = 128;
// The CPU kernels unpack rows on the stack.
constexpr int kMostRank = 1024;

// -- the CUDA kernels ---------------------------------------------------------

// Buckets of a plan, each counted once for each window that lanes of it have: the parts of a call.
// Their tables are launch parameters, and so are lanes.
constexpr int kMaxBuckets = 32;
// Buckets that hold one lane.
constexpr int kMaxSlots = 3;
constexpr int kMaxLanes = 64;
static_assert(kMaxBuckets == KVLATHE_MAX_PARTS && kMaxSlots == KVLATHE_MAX_SLOTS &&
              kMaxLanes == KVLATHE_MAX_HEADS);
// Ranks of K, and of V.
constexpr int kMaxRank = 640;
constexpr int kMaxRankV = 512;
// What the accumulators of a warp hold in most kernels. Wider ranks have a decode kernel of their
// own, and no kernel for prompts in tiles.
constexpr int kNarrowRank = 128;
// Query heads of a lane: the N of mma.m16n8k16.
constexpr int kMaxGroup = 8;
// And of a wide lane, whose tiles of kMaxGroup each count as a lane.
constexpr int kMaxWideGroup = 512;
// Dimensions of a head before its projection.
constexpr int kMaxInput = 640;
// Tokens of a page: sealing holds a lane's page in shared memory.
constexpr int kMaxPage = 256;
// Pages of codes are attended 64 tokens at a time; their sizes are powers of two.
constexpr int kLeastCodedPage = 64;
// Tokens of a group of V in codes: the inner dimension of an MMA on bytes.
constexpr int kLeastCodedGroup = 32;
// New tokens of a sequence from which its rows are a prompt chunk, attended in tiles.
constexpr int kLeastChunk = 16;
// Columns of an RMS norm's rows: a block holds one row in registers.
constexpr int kMaxColumns = 16384;

// Whether a lane is wide. in_keys: its V is a part of its K, which the same kernel reads.
constexpr bool is_wide_lane(int rank_k, int rank_v, bool in_keys) {
  return in_keys || rank_k > kNarrowRank || rank_v > kNarrowRank;
}

constexpr bool is_power_of_two(int x) { return x > 0 && (x & (x - 1)) == 0; }

// Parts of one call.
inline void check_bucket_count(int64_t count) {
  if (count >= 1 && count <= kMaxBuckets) return;
  throw Refusal(KVLATHE_UNSUPPORTED, std::to_string(count) + " buckets: 1 to " +
                                         std::to_string(kMaxBuckets) + " are possible");
}

// Lanes of one layer.
inline void check_lane_count(int64_t count) {
  if (count >= 1 && count <= kMaxLanes) return;
  throw Refusal(KVLATHE_UNSUPPORTED, "a layer has " + std::to_string(count) + " lanes: 1 to " +
                                         std::to_string(kMaxLanes) + " are possible");
}

// What the CUDA kernels hold of one lane.
inline void check_cuda_lane(int32_t rank_k, int32_t rank_v) {
  if (rank_k <= kMaxRank && rank_v <= kMaxRankV) return;
  throw Refusal(KVLATHE_UNSUPPORTED, "a rank of K is above " + std::to_string(kMaxRank) +
                                         ", or one of V above " + std::to_string(kMaxRankV));
}

}  // namespace kvlathe
