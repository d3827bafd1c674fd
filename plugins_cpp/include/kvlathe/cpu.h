/* kvlathe native kernels on the CPU: the whole op kvlathe::Attend (docs/attend.md), seal and move.
 * Part of the C ABI (abi.h). */
#ifndef KVLATHE_CPU_H
#define KVLATHE_CPU_H

#include <stddef.h>

#include "kvlathe/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Instruction sets. AUTO is the best that this machine has; asking for one that it lacks is
 * refused. */
enum kvlathe_isa {
  KVLATHE_ISA_AUTO = 0,
  KVLATHE_ISA_PORTABLE = 1,
  KVLATHE_ISA_AVX2 = 2,        /* with FMA and F16C */
  KVLATHE_ISA_AVX512 = 3,      /* F, BW, DQ, VL */
  KVLATHE_ISA_AVX512_VNNI = 4, /* products with codes on the integer dot product */
  KVLATHE_ISA_AVX_VNNI = 5,    /* AVX2 and the integer dot product of 256 bits */
  KVLATHE_ISA_NEON = 6,        /* every aarch64 machine */
  KVLATHE_ISA_NEON_DOT = 7,    /* NEON and the integer dot product (Armv8.2 FEAT_DotProd) */
  KVLATHE_ISA_SVE = 8          /* SVE with vectors of 256 or 512 bits */
};

/* One layer's form, read once from its table (layer_table of kvlathe/plan/layer_table.py). Shared
 * freely between threads. */
typedef struct kvlathe_layer kvlathe_layer;

KVLATHE_API int32_t kvlathe_layer_create(const int32_t* table, int64_t count, kvlathe_layer** layer,
                                         kvlathe_status* status);
KVLATHE_API void kvlathe_layer_destroy(kvlathe_layer* layer);

/* How to run body(state, 0) .. body(state, count - 1), each once, in any order and at once, and
 * return when all are done. */
typedef struct kvlathe_parallel {
  void (*run)(void* context, void (*body)(void* state, size_t index), size_t count, void* state);
  void* context;
} kvlathe_parallel;

/* One step of one layer. Sizes as in docs/attend.md; everything is row-major, without padding
 * between rows.
 *
 * The step's k' and v' are written to the pool at the places after `lengths` in each lane's fresh
 * bucket, then every query attends everything that its sequence has, itself included. Nothing is
 * written if the call is refused. */
typedef struct kvlathe_attend_args {
  uint32_t abi_version;        /* KVLATHE_ABI_VERSION */
  int32_t tokens;              /* T: rows of q, k, v, cos, sin, o, rows */
  int32_t batch;               /* B */
  int32_t isa;                 /* kvlathe_isa */
  int32_t threads;             /* used if parallel.run is null: threads to start; 0 counts as 1 */
  float scale;                 /* of the scores */
  const float *q, *k, *v;      /* before RoPE; v already projected */
  const float *cos, *sin;      /* [T, planes]; unused if no lane has RoPE */
  const int32_t* cu_seqlens_q; /* [B + 1] */
  const int32_t* lengths;      /* [B, S] */
  const int32_t* const* page_tables; /* S arrays [B, page_table_widths[s]] */
  const int32_t* page_table_widths;  /* [S] */
  const float *proj_q, *proj_k;      /* [H, D, Rk]; unused if the plan does not project */
  const float* centre_k;             /* [H, Rk]; likewise */
  void* pool;
  int64_t pool_bytes;
  float* o; /* [T, sum of group_size * rank_v] */
  /* null, or [T, sum of ranks] in the hot format: the step's k' of all lanes, then v' */
  void* rows;
  kvlathe_parallel parallel;
  /* null, or [T]: 1 for a row that is observed, else 0; -1: the largest is kept, not the sum */
  const float* observation_weights;
  /* with observation_weights: [B, H, mass_places], observed attention of docs/attend.md */
  float* mass;
  /* N: the places of all page tables, then those of the step's own tokens (Q) */
  int64_t mass_places;
  const float* sinks; /* null, or [H, group_size]: a logit of each query head beside its scores */
  float softcap;      /* not 0: scores are softcap * tanh(score / softcap) */
} kvlathe_attend_args;

KVLATHE_API int32_t kvlathe_cpu_attend(const kvlathe_layer* layer, const kvlathe_attend_args* args,
                                       kvlathe_status* status);

/* One page to seal: 64-byte aligned bytes. `positions` (stochastic rounding only): the place of
 * each token in its sequence, modulo 2^32; those of lane i at positions[i * positions_stride]. */
typedef struct kvlathe_cpu_seal_page {
  const void* source;
  void* target;
  const uint32_t* positions;
} kvlathe_cpu_seal_page;

/* Quantizes full pages: every lane of `target` is written from the same lane of `source`, which has
 * 16 or 32 bits.
 *
 * The bytes are those of kvlathe/plan/codec.py. A group's (scale, minimum) spans the middle part
 * `span` of its range. Codes are the nearest or, stochastic, drawn by the hash of (seed, layer,
 * head, K or V, position, channel). With `sums` the sum of each group's codes follows the metadata:
 * 128-byte aligned, little-endian, in as many bytes as the largest sum takes. Page tables and
 * lengths of the parts are not used. No two pages have the same target. */
typedef struct kvlathe_cpu_seal_args {
  uint32_t abi_version;
  int32_t page_tokens;
  int32_t isa;
  int32_t threads;
  const kvlathe_part *source, *target; /* `lanes` may be of all layers, sorted by layer and head */
  const kvlathe_cpu_seal_page* pages;  /* [page_count] */
  int64_t page_count;
  double span_k, span_v; /* above 0, at most 1 */
  int32_t sums;          /* 1: stored */
  int32_t stochastic;    /* 0: to the nearest */
  int64_t seed;
  int64_t positions_stride; /* 0: all lanes hold the same tokens */
} kvlathe_cpu_seal_args;

KVLATHE_API int32_t kvlathe_cpu_seal(const kvlathe_cpu_seal_args* args, kvlathe_status* status);

/* Copies tokens of one sequence, lane by lane, into other pages of the same layout: place places[i,
 * j] of lane i in the source pages becomes place j in the target pages; what is left of the last
 * target page is zeroed. What a lane has for each token is a list of fields, `size` bytes a token
 * from byte `at` of a page on (codes, metadata, scores): groups along the tokens cannot be moved
 * like this, and the caller refuses them. Source and target pages are distinct. */
typedef struct kvlathe_token_field {
  int64_t at, size;
} kvlathe_token_field;

typedef struct kvlathe_move_args {
  uint32_t abi_version;
  int32_t page_tokens;
  int32_t lanes, fields;            /* fields of each lane */
  const kvlathe_token_field* field; /* [lanes, fields] */
  int64_t page_stride;              /* bytes of a page, both sides */
  const void* source;               /* page id p is at source + p * page_stride */
  int64_t source_bytes;
  const int64_t* source_pages; /* [source_count] ids */
  int64_t source_count;
  void* target;
  int64_t target_bytes;
  const int64_t* target_pages; /* [target_count] ids */
  int64_t target_count;
  const int64_t* places; /* [lanes, kept] */
  int64_t kept;
  int32_t threads;
  int32_t reserved;
} kvlathe_move_args;

KVLATHE_API int32_t kvlathe_cpu_move(const kvlathe_move_args* args, kvlathe_status* status);

/* "avx512vnni", "avxvnni", "avx512", "avx2", "sve", "neondot", "neon" or "portable": what KVLATHE_ISA_AUTO
 * means here, which is the best that this machine has or what the environment's KVLATHE_ISA names.
 * Null, and a status, where that is unknown or this machine lacks it.
 */
KVLATHE_API const char* kvlathe_cpu_isa(kvlathe_status* status);

#ifdef __cplusplus
}
#endif
#endif
