// The place of a lane's K or V in a page, as Rows (kernels.h).
#pragma once

#include "common/formats.h"
#include "cpu/kernels.h"

namespace kvlathe {

// Tokens within .. within + count - 1 of a page of `page_tokens`; data and meta are byte offsets
// from its start. `within` is a multiple of 16.
Rows rows_of(const uint8_t* page, int64_t data, int64_t meta, int32_t rank, const Format& format,
             int64_t page_tokens, int64_t within, int32_t count);

}  // namespace kvlathe
