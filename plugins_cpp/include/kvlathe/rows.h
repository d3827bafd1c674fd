/* kvlathe native kernels on CUDA for what a decoder layer does to rows beside attention and its
 * products. Part of the C ABI (abi.h). Pointers are device memory; calls are asynchronous on
 * `stream`, allocate nothing and may be captured. */
#ifndef KVLATHE_ROWS_H
#define KVLATHE_ROWS_H

#include "kvlathe/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows of `columns` elements (a multiple of 8; at most 16384 for the norm) of one 16-bit type; out
 * is packed. Computed in float32, rounded once. */
typedef struct kvlathe_rows_args {
  uint32_t abi_version;
  int32_t element; /* F16 or BF16 */
  int32_t rows, columns;
  float eps;          /* of the norm */
  int32_t heads;      /* of a row: norms of heads alone */
  const void* x;      /* rows start at multiples of x_stride, a multiple of 8 */
  int64_t x_stride;   /* in elements */
  const void* weight; /* of the norm: [columns] */
  void* out;          /* [rows, columns] */
  void* stream;
} kvlathe_rows_args;

/* out = weight * x / sqrt(mean(x^2) + eps) */
KVLATHE_API int32_t kvlathe_cuda_rms_norm(const kvlathe_rows_args* args, kvlathe_status* status);

/* The same of each of `heads` heads of a row of x, which have `columns` elements each, at most 256:
 * out [rows, heads, columns]. */
KVLATHE_API int32_t kvlathe_cuda_norm_heads(const kvlathe_rows_args* args, kvlathe_status* status);

/* x holds [gate | up], 2 * columns elements a row: out = silu(gate) * up */
KVLATHE_API int32_t kvlathe_cuda_silu_product(const kvlathe_rows_args* args,
                                              kvlathe_status* status);

/* Codes of e4m3 [rows, columns], one byte each, and behind them the float32 scale of each row:
 * x = code * scale. A row's largest number becomes 448. At most 16384 columns. */
KVLATHE_API int32_t kvlathe_cuda_fp8_rows(const kvlathe_rows_args* args, kvlathe_status* status);

#ifdef __cplusplus
}
#endif
#endif
