// Checks of whole pages before they are sealed: their lanes may be those of all layers.
#pragma once

#include "common/lanes.h"
#include "common/limits.h"
#include "cuda/host.h"

namespace kvlathe::cuda {

inline void check_pages(const kvlathe_part& part, int32_t page_tokens, const void* pool,
                        int64_t pool_bytes) {
  require(page_tokens > 0 && page_tokens % kRankMultiple == 0 && page_tokens <= kMaxPage,
          KVLATHE_UNSUPPORTED,
          "page_tokens is " + std::to_string(page_tokens) + ": a multiple of 16 up to " +
              std::to_string(kMaxPage) + " is possible");
  require(part.page_stride > 0 && part.page_stride % kOffsetBytes == 0, KVLATHE_MISALIGNED,
          "a page stride is no multiple of 128 bytes");
  require(pool && part.page_stride <= pool_bytes, KVLATHE_TOO_SMALL,
          "the pool is smaller than one page");
  check_aligned(pool, kOffsetBytes, "the pool");
  check_lanes(part, page_tokens);
  require(!is_single(part.bits_k) && !is_single(part.bits_v), KVLATHE_UNSUPPORTED,
          "a part has 32 bits: CUDA pages have 16 or fewer");
  for (int32_t i = 0; i < part.lane_count; ++i) {
    const LaneRow& lane = lanes_of(part)[i];
    check_cuda_lane(lane.rank_k, lane.rank_v);
  }
}

}  // namespace kvlathe::cuda
