// How large things may be: every limit of the kernels, with the words of its refusal.
#pragma once

#include <cstdint>
#include <string>

#include "common/refusal.h"

namespace kvlathe {

constexpr int kRankMultiple =
    16;  // of ranks, quantization groups and pages: an MMA's inner dimension
constexpr int64_t kOffsetBytes =
    128;                         // of offsets and page strides: ALIGN of kvlathe/plan/formats.py
constexpr int kMostRank = 1024;  // on the CPU: rows are unpacked on the stack
constexpr int kMaxRank = 128;    // of the CUDA kernels: what a warp's accumulators hold
constexpr int kMaxGroup = 8;     // query heads a lane on CUDA: the N of mma.m16n8k16

// Parts of one call, which are the buckets of a plan.
inline void check_bucket_count(int64_t count) {
  if (count >= 1 && count <= KVLATHE_MAX_PARTS) return;
  throw Refusal(KVLATHE_UNSUPPORTED, std::to_string(count) + " buckets: 1 to " +
                                         std::to_string(KVLATHE_MAX_PARTS) + " are possible");
}

// Lanes of one layer.
inline void check_lane_count(int64_t count) {
  if (count >= 1 && count <= KVLATHE_MAX_HEADS) return;
  throw Refusal(KVLATHE_UNSUPPORTED, "a layer has " + std::to_string(count) + " lanes: 1 to " +
                                         std::to_string(KVLATHE_MAX_HEADS) + " are possible");
}

// What the CUDA kernels hold of one lane.
inline void check_cuda_ranks(int32_t rank_k, int32_t rank_v) {
  if (rank_k <= kMaxRank && rank_v <= kMaxRank) return;
  throw Refusal(KVLATHE_UNSUPPORTED, "a rank is above " + std::to_string(kMaxRank));
}

}  // namespace kvlathe
