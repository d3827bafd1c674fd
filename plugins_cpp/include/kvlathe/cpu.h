/* kvlathe native kernels on the CPU: the whole op kvlathe::Attend (docs/attend.md), and seal. Part of the C ABI (abi.h). */
#ifndef KVLATHE_CPU_H
#define KVLATHE_CPU_H

#include <stddef.h>

#include "kvlathe/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Instruction sets. AUTO is the best that this machine has; asking for one that it lacks is refused. */
enum kvlathe_isa {
  KVLATHE_ISA_AUTO = 0,
  KVLATHE_ISA_PORTABLE = 1,
  KVLATHE_ISA_AVX2 = 2,       /* with FMA and F16C */
  KVLATHE_ISA_AVX512 = 3,     /* F, BW, DQ, VL */
  KVLATHE_ISA_AVX512_VNNI = 4 /* products with codes on the integer dot product */
};

/* One layer's form, read once from its table (layer_table of export/layout.py). Shared freely between threads. */
typedef struct kvlathe_layer kvlathe_layer;

KVLATHE_API int32_t kvlathe_layer_create(const int32_t *table, int64_t count, kvlathe_layer **layer, kvlathe_status *status);
KVLATHE_API void kvlathe_layer_destroy(kvlathe_layer *layer);

/* How to run body(state, 0) .. body(state, count - 1), each once, in any order and at once, and return when all are done. */
typedef struct kvlathe_parallel {
  void (*run)(void *context, void (*body)(void *state, size_t index), size_t count, void *state);
  void *context;
} kvlathe_parallel;

/* One step of one layer. Sizes as in docs/attend.md; everything is row-major, without padding between rows.
 *
 * The step's k' and v' are written to the pool at the places after `lengths` in each lane's fresh bucket, then every query
 * attends everything that its sequence has, itself included. Nothing is written if the call is refused. */
typedef struct kvlathe_attend_args {
  uint32_t abi_version;         /* KVLATHE_ABI_VERSION */
  int32_t tokens;               /* T: rows of q, k, v, cos, sin, o, rows */
  int32_t batch;                /* B */
  int32_t isa;                  /* kvlathe_isa */
  int32_t threads;              /* used if parallel.run is null: threads to start; 0 counts as 1 */
  float scale;                  /* of the scores */
  const float *q, *k, *v;       /* before RoPE; v already projected */
  const float *cos, *sin;       /* [T, planes]; unused if no lane has RoPE */
  const int32_t *query_starts;  /* [B + 1] */
  const int32_t *lengths;       /* [B, S] */
  const int32_t *const *page_tables;  /* S arrays [B, page_table_widths[s]] */
  const int32_t *page_table_widths;   /* [S] */
  const float *proj_q, *proj_k; /* [H, D, Rk]; unused if the plan does not project */
  const float *centre_k;        /* [H, Rk]; likewise */
  void *pool;
  int64_t pool_bytes;
  float *o;                     /* [T, sum of group_size * rank_v] */
  void *rows;                   /* null, or [T, sum of ranks] in the hot format: the step's k' of all lanes, then v' */
  kvlathe_parallel parallel;
  const float *probe_weights;   /* null, or [T]: 1 for a row that is observed, else 0 */
  float *mass;                  /* with probe_weights: [B, H, mass_places], probe mass of docs/attend.md */
  int64_t mass_places;          /* N: the places of all page tables, then those of the step's own tokens (Q) */
} kvlathe_attend_args;

KVLATHE_API int32_t kvlathe_cpu_attend(const kvlathe_layer *layer, const kvlathe_attend_args *args, kvlathe_status *status);

/* Writes every lane of `target` from the same lane of `source`: one full page into another number format. Rounds to the
 * nearest; a group's (scale, minimum) is its range. The parts' page tables and lengths are not used. */
typedef struct kvlathe_seal_args {
  uint32_t abi_version;
  int32_t page_tokens;
  int32_t isa;
  int32_t threads;
  const kvlathe_part *source, *target; /* `lanes` may be of all layers, sorted by layer and head */
  const void *source_page;
  void *target_page;
} kvlathe_seal_args;

KVLATHE_API int32_t kvlathe_cpu_seal(const kvlathe_seal_args *args, kvlathe_status *status);

/* "avx512vnni", "avx512", "avx2" or "portable": what KVLATHE_ISA_AUTO means here. */
KVLATHE_API const char *kvlathe_cpu_isa(void);

#ifdef __cplusplus
}
#endif
#endif
