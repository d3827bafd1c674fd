// Lanes of whole pages, of all layers: what seal and evict check before they start.
#pragma once

#include "../cpu/layer.h"
#include "host.h"
#include "params.h"

namespace kvlathe::cuda {

inline const LaneRow* lanes_of(const kvlathe_part& part) { return reinterpret_cast<const LaneRow*>(part.lanes); }

inline void check_format(int32_t bits, int32_t group) {
  require(bits == 16 || bits == 8 || bits == 4 || bits == 2, KVLATHE_UNSUPPORTED,
          "a part has " + std::to_string(bits) + " bits: CUDA pages have 16, 8, 4 or 2");
  require(bits == 16 || (group > 0 && group % 16 == 0), KVLATHE_UNSUPPORTED,
          "a quantization group is no multiple of 16");
}

inline void check_pages(const kvlathe_part& part, int32_t page_tokens, const void* pool, int64_t pool_bytes) {
  require(page_tokens > 0 && page_tokens % 16 == 0 && page_tokens <= 256, KVLATHE_UNSUPPORTED,
          "page_tokens is " + std::to_string(page_tokens) + ": a multiple of 16 up to 256 is possible");
  require(part.lanes && part.lane_count >= 1, KVLATHE_BAD_ARGUMENT, "a part has no lanes");
  require(part.page_stride > 0 && part.page_stride % 128 == 0, KVLATHE_MISALIGNED,
          "a page stride is no multiple of 128 bytes");
  require(pool && part.page_stride <= pool_bytes, KVLATHE_TOO_SMALL, "the pool is smaller than one page");
  check_aligned(pool, 128, "the pool");
  check_format(part.bits_k, part.group_k);
  check_format(part.bits_v, part.group_v);
  for (int32_t i = 0; i < part.lane_count; ++i) {
    const LaneRow& row = lanes_of(part)[i];
    check_slab(row, part.bits_k, part.bits_v, page_tokens, part.page_stride);
    require(row.rank_k <= kMaxRank && row.rank_v <= kMaxRank, KVLATHE_UNSUPPORTED, "a rank is above 128");
  }
}

}  // namespace kvlathe::cuda
