// The compiled variants of attend_decode, by what a call needs. Which file compiles which keeps
// builds parallel.
#pragma once

namespace kvlathe::cuda {

// The kernels for parts of 16 bits only, and for parts of 16 bits and of `bits` (8, 4, 2; 0: any of
// them). half: F16, else BF16. wide: a rank is above 96. fill: 2 for at most 4 query heads
// (attend_codes.cuh), else 1. They take Params<parts> with
//   parts = the call's for 16 bits only;  2 for one quantized width in at most two parts;  3 else,
//   with bits 0.
const void* decode_kernel_16(bool half, bool wide, int parts);
const void* decode_kernel_codes(bool half, bool wide, int bits, int fill);  // 2 parts
const void* decode_kernel_any(bool half, bool wide, int fill);              // 3 parts

}  // namespace kvlathe::cuda
