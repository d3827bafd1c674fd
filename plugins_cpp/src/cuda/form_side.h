// How K, or V, of one part is written, for the kernels that read every form (forms.cuh).
#pragma once

#include "common/formats.h"
#include "common/limits.h"
#include "common/refusal.h"

namespace kvlathe::cuda {

struct FormSide {
  uint8_t bits, axis;
  uint16_t group;  // along the tokens: tokens of a group

  KVLATHE_ANYWHERE bool by_channel() const { return bits < 16 && axis == KVLATHE_AXIS_TOKEN; }
  KVLATHE_ANYWHERE bool fixed_levels() const {
    return bits < 16 && axis == KVLATHE_AXIS_RANK_NORMAL;
  }
  // Bytes of a group's metadata.
  KVLATHE_ANYWHERE int meta_bytes() const {
    return bits == 16 ? 0 : fixed_levels() ? 2 : kPairBytes;
  }
  // Bytes of the metadata of `tokens` tokens, a whole page of `page` along the tokens.
  KVLATHE_ANYWHERE int meta_size(int groups, int rank, int tokens) const {
    return meta_bytes() * groups * (by_channel() ? rank : tokens);
  }
};

inline FormSide side_of(const Format& format) {
  return {uint8_t(format.bits), uint8_t(format.axis), uint16_t(format.group)};
}

// Groups of a token along the rank, or of a channel along the tokens of a page; 1 where there are
// none.
inline int groups_of(const Format& format, int rank, int page_tokens) {
  if (!format.quantized()) return 1;
  if (format.by_channel()) return token_groups(page_tokens, format.group);
  return RankGroups(rank, format.group).count;
}

}  // namespace kvlathe::cuda
