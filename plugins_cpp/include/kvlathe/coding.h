/* kvlathe native code that packs the bytes of a page, bit-exact, while nobody attends it
 * (docs/cold_pages.md). Part of the C ABI (abi.h). */
#ifndef KVLATHE_CODING_H
#define KVLATHE_CODING_H

#include "kvlathe/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* `columns` columns of numbers: row r of column c is at byte `at` + r * row_stride +
 * c * column_stride. */
typedef struct kvlathe_coded_matrix {
  int64_t at, columns, row_stride, column_stride;
} kvlathe_coded_matrix;

/* Numbers of one kind, with `rows` rows each and `width` bytes (1, 2 or 4). Byte i of all of them is
 * a plane. `turn`: by so many bits a number is turned left before it is divided into bytes, so that
 * its exponent fills one (0, or 1 for bfloat16 and float32). */
typedef struct kvlathe_coded_part {
  int32_t rows, width, turn, matrices;
  const kvlathe_coded_matrix* matrix;
} kvlathe_coded_part;

/* All parts of a page, which have every byte once. */
typedef struct kvlathe_coded_page {
  uint32_t abi_version;
  int32_t parts;
  const kvlathe_coded_part* part;
  int64_t bytes;
} kvlathe_coded_page;

/* Bytes of `out` that every page of this form fits into; or -1. */
KVLATHE_API int64_t kvlathe_coded_bound(const kvlathe_coded_page* form, kvlathe_status* status);

/* `page` in fewer bytes, mostly: *written of `out`, which has `room`, at least
 * kvlathe_coded_bound. */
KVLATHE_API int32_t kvlathe_encode_page(const kvlathe_coded_page* form, const void* page, void* out,
                                        int64_t room, int64_t* written, kvlathe_status* status);

/* The page again. Refuses bytes that kvlathe_encode_page did not write, where they cannot be a
 * page's. */
KVLATHE_API int32_t kvlathe_decode_page(const kvlathe_coded_page* form, const void* data,
                                        int64_t bytes, void* page, kvlathe_status* status);

#ifdef __cplusplus
}
#endif
#endif
