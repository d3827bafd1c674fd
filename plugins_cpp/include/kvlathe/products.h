/* kvlathe native kernels on CUDA for products with weights that are codes. Part of the C ABI
 * (abi.h). Pointers are device memory; calls are asynchronous on `stream`, allocate nothing and may
 * be captured. */
#ifndef KVLATHE_PRODUCTS_H
#define KVLATHE_PRODUCTS_H

#include "kvlathe/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows of x that one call multiplies at most. */
#define KVLATHE_MAX_PRODUCT_ROWS 16

/* Weights [outputs, inputs]: a weight is code * scale with 8 bits (e4m3, a scale for each output),
 * and (code - zero) * scale with 4 (a scale, and a zero, for each `group` of inputs). Two codes of
 * 4 bits are a byte, the first in its low bits. codes, x and out start at multiples of 16 bytes. */
typedef struct kvlathe_product_args {
  uint32_t abi_version;
  int32_t element;         /* F16 */
  int32_t rows;            /* of x */
  int32_t inputs, outputs; /* multiples of 16; inputs of 32 with 4 bits */
  int32_t bits;            /* 8 or 4 */
  int32_t group;           /* with 4 bits: a power of two from 32 on that divides inputs */
  int32_t scale_stride; /* 4 bits: scales, and zeros, of one group and the next are so far apart */
  const void* x;        /* [rows, inputs], rows x_stride elements apart, a multiple of 8 */
  int64_t x_stride;
  const void* codes;
  const void*
      scales; /* 8 bits: float32 [outputs]; 4 bits: F16 [inputs / group, outputs]; with a stride */
  const uint8_t* zeros; /* 4 bits: [inputs / group, outputs], or null where all are 8 */
  const void* residual; /* what is added to the product, laid out as out; or null. May be out */
  void* out;            /* rows out_stride elements apart */
  int64_t out_stride;
  void* stream;
} kvlathe_product_args;

/* out [rows, outputs] = x weights^T (+ residual), of at most KVLATHE_MAX_PRODUCT_ROWS rows. Sums are
 * in float32, and rounded once. */
KVLATHE_API int32_t kvlathe_cuda_product(const kvlathe_product_args* args, kvlathe_status* status);

/* out [outputs, inputs], packed: the weights of 4 bits, rounded once. x, rows and residual are not
 * read. */
KVLATHE_API int32_t kvlathe_cuda_widen(const kvlathe_product_args* args, kvlathe_status* status);

#ifdef __cplusplus
}
#endif
#endif
