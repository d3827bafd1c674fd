// The compiled variants of attend_decode, by what a call needs. They are spread over files
// (decode_16.cu, decode_codes.cu, decode_alone.cu, decode_any.cu, decode_bytes.cu, decode_general.cu, decode_float8.cu, and
// bundled_*.cu beside them), so that these are compiled at the same time.
#pragma once

#include "cuda/decode/params.h"

namespace kvlathe::cuda {

// half: F16, else BF16. wide: a rank is above 96. fill: 2 for at most 4 query heads
// (attend_codes.cuh), else 1. The kernels take
//   Params<parts>  where all parts have 16 bits
//   Params<2>      where at most two parts have 16 bits, or the same `bits`: 8, 4 or 2
//   Params<3>      for other calls of 3 parts at most
const void* decode_kernel_16(bool half, bool wide, int parts);
const void* decode_kernel_codes(bool half, bool wide, int bits, int fill);  // 2 parts
const void* decode_kernel_any(bool half, bool wide, int fill);              // 3 parts

// Calls of decode_kernel_codes with many pairs a block. Takes AloneParams.
const void* decode_kernel_alone(bool half, bool wide, int bits, int fill);

// Takes GeneralParams: every form of codes, tokens that a row does not see and, `named`, lanes that
// name their parts.
const void* decode_kernel_general(bool half, bool named);
const void* decode_kernel_scored(bool half);  // takes ScoredParams
const void* decode_kernel_float8(bool half);  // takes Float8Params: floats of 8 bits, too

// Takes ByteParams. floats: of 8 bits.
const void* decode_kernel_bytes(bool half, bool floats);
const void* decode_kernel_key_pages(bool half);  // takes KeyPageParams
const void* decode_kernel_wide(bool half);       // takes Wide256

// Of calls with bundles: 16 bit, codes as in decode_kernel_codes, and all others.
using Bundled16 = Bundled<Params<KVLATHE_MAX_SLOTS>, kMaxGroup>;
using BundledCodes = Bundled<Params<2>, 2 * kMaxGroup>;
using BundledGeneral = Bundled<ScoredParams, kMaxGroup>;
using BundledFloat8 = Bundled<Float8Params, kMaxGroup>;
using BundledWide256 = Bundled<Wide256, kMaxGroup>;
using BundledWidest = Bundled<Widest, kMaxGroup>;
using BundledPlain256 = Bundled<Plain256, kMaxGroup>;
using BundledPlainWidest = Bundled<PlainWidest, kMaxGroup>;
using BundledTeam = Bundled<TeamParams, kTeamWarps * kMaxGroup>;
constexpr int kMostColumns = BundledCodes::kColumns;
const void* bundled_kernel_16(bool half);
const void* bundled_kernel_codes(bool half, bool wide, int bits);
const void* bundled_kernel_general(bool half);
const void* bundled_kernel_float8(bool half);
const void* bundled_kernel_wide(bool half);
const void* bundled_kernel_widest(bool half);
const void* bundled_kernel_widest_bf16();
const void* plain_kernel_256(bool half);
const void* plain_kernel_widest(bool half);
const void* team_kernel(bool half);

}  // namespace kvlathe::cuda
