/* kvlathe native kernels on CUDA that change the cache: spread, append, seal, observe, move. Part of
 * the C ABI (abi.h).
 *
 * Pointers are device memory unless said otherwise. Calls are asynchronous on `stream`, allocate
 * nothing and may be captured into a CUDA graph. What lies in device memory (page ids, lengths) is
 * trusted. */
#ifndef KVLATHE_CACHE_H
#define KVLATHE_CACHE_H

#include "kvlathe/abi.h"
#include "kvlathe/cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What every query of a packed step may read, from what its sequence has. Once a step.
 *
 * Row t of `sequence_of` and `visible` belongs to token t: its sequence, or -1 (and lengths 0) past
 * cu_seqlens_q[batch]; and the tokens of each bucket it attends: lengths, and in a fresh bucket
 * also the step's tokens up to itself. `row_lengths` and `spread_tables` are of parts: part i is of
 * bucket part_buckets[i]. spread_tables[i] gets the sequence's row of that bucket's page table
 * (null: not wanted), in rows that have a sequence. Other outputs cover all `tokens` rows.
 *
 * With `windows`, row_lengths and spread_tables leave out the pages that the row's query does not
 * see in the lanes of the part. `hidden` gets the places of the others that it does not see either,
 * which only exact windows have: from hidden[t, i, 0] up to hidden[t, i, 1]. Without `windows` the
 * parts are the buckets.
 *
 * With `most_bundled` above 1, row_lengths are those of a call with KVLATHE_BUNDLES: the rows of a
 * sequence, as many at a time, where all parts let them see the same pages.
 *
 * With `prompts` it also lists the tiles of prompt chunks: of sequences with 16 rows or more, on a
 * device that has the kernel for them (compute capability 9.0). Their rows then have `row_lengths`
 * 0 and no spread tables; other rows have those of `visible`. */
typedef struct kvlathe_spread_args {
  uint32_t abi_version;
  int32_t tokens, batch, buckets;    /* T, B, S */
  uint32_t fresh;                    /* bit s: bucket s takes new tokens */
  const int32_t* cu_seqlens_q;       /* [B + 1] */
  const int32_t* lengths;            /* [B, S], before the step */
  const int32_t* const* page_tables; /* host array of S: [B, page_table_widths[s]] */
  const int32_t* page_table_widths;  /* host [S] */
  int32_t* sequence_of;              /* [T] */
  int32_t* visible;                  /* [T, S] */
  int32_t* const* spread_tables;     /* host array of P: null or [T, the bucket's width] */
  void* stream;
  int32_t group_size;   /* query heads a lane; used with `prompts` */
  int32_t page_tokens;  /* used with `windows` */
  int32_t* row_lengths; /* [T, P]; with `prompts`, `windows` or `most_bundled` */
  int32_t* prompts;     /* null, or kvlathe_cuda_prompt_list_bytes(tokens, batch, group_size) */
  /* null, or host array of P: what each part's lanes see; `sealed` and `fresh` are buckets */
  const kvlathe_window* windows;
  int32_t* hidden;             /* null, or [T, P, 2]; with `windows` */
  const int32_t* part_buckets; /* host [P]; with `windows` */
  int32_t parts;               /* P <= KVLATHE_MAX_PARTS; S <= P */
  int32_t most_bundled;        /* rows of a bundle (KVLATHE_BUNDLES) at most; 0, 1: no bundles */
} kvlathe_spread_args;

/* 1 if the current device has the kernel for prompt chunks; where it has not, no chunk is ever
 * listed. */
KVLATHE_API int32_t kvlathe_cuda_has_prompt_kernel(void);

/* Bytes of the list of a step's prompt chunks. */
KVLATHE_API int64_t kvlathe_cuda_prompt_list_bytes(int32_t tokens, int32_t batch,
                                                   int32_t group_size);

KVLATHE_API int32_t kvlathe_cuda_spread(const kvlathe_spread_args* args, kvlathe_status* status);

/* One layer's fresh tokens: RoPE, projection, centre, rounding; k' and v' go to their places in the
 * pages, q' to a packed row.
 *
 * Sizes and packing are those of docs/attend.md. The products are summed in float32; k' and v' are
 * rounded once. Elements and the hot format are one 16-bit type. */
typedef struct kvlathe_append_args {
  uint32_t abi_version;
  int32_t element; /* F16 or BF16: q, k, v, cos, sin, proj_*, centre_k, q_out, the pages, rows */
  int32_t tokens;  /* T */
  int32_t reserved;
  /* before RoPE; rows start at multiples of the strides, in elements, multiples of 8. k and v are
   * null where another layer has written the pages: then only q_out is made */
  const void *q, *k, *v;
  int64_t q_stride, k_stride, v_stride;
  const void *cos, *sin;             /* [T, planes]; unused if no lane has RoPE */
  const int32_t* sequence_of;        /* [T], from kvlathe_cuda_spread */
  const int32_t* visible;            /* [T, S], likewise: token t's own place is visible - 1 */
  const int32_t* const* page_tables; /* host array of S: rows of sequences */
  const int32_t* page_table_widths;  /* host [S] */
  /* the layer's table in device memory; read only for lanes that keep chosen RoPE planes */
  const int32_t* layout;
  const void *proj_q, *proj_k; /* [H, D, Rk]; unused if the plan does not project */
  const void* centre_k;        /* [H, Rk]; likewise */
  void* pool;
  int64_t pool_bytes;
  /* [T, q_out_stride]: the lanes in head order, each lane's query heads side by side, rank_k
   * each */
  void* q_out;
  int64_t q_out_stride;
  void* rows; /* null, or [T, sum of ranks]: k' of the lanes, then v' */
  void* stream;
} kvlathe_append_args;

KVLATHE_API int32_t kvlathe_cuda_append(const kvlathe_layer* layer, const kvlathe_append_args* args,
                                        kvlathe_status* status);

/* Quantizes full pages: every lane of `target`, of all layers, is written from the same lane of
 * `source`, which has 16 bits. One launch takes all pages and lanes (up to 512 pages and 256 lanes;
 * more take more launches). The codes are those of kvlathe/plan/codec.py, bit for bit: the nearest,
 * or stochastic by the hash of (seed, layer, head, K or V, position, channel). */
typedef struct kvlathe_cuda_seal_page {
  int32_t source, target; /* page ids */
  int32_t position;       /* place of the page's first token in its sequence */
} kvlathe_cuda_seal_page;

typedef struct kvlathe_cuda_seal_args {
  uint32_t abi_version;
  int32_t element; /* of the source, and of a target of 16 bits */
  int32_t page_tokens;
  int32_t stochastic; /* 0: to the nearest */
  int64_t seed;
  /* host; lanes of all layers, sorted by layer and head; no page tables, no lengths */
  const kvlathe_part *source, *target;
  const kvlathe_cuda_seal_page* pages; /* host [page_count] */
  int32_t page_count;
  int32_t reserved;
  double span_k, span_v; /* of a group's range, what its codes cover: above 0, at most 1 */
  void* pool;
  int64_t pool_bytes;
  void* stream;
} kvlathe_cuda_seal_args;

KVLATHE_API int32_t kvlathe_cuda_seal(const kvlathe_cuda_seal_args* args, kvlathe_status* status);

/* The same for `pages` in device memory, which a captured call reads again at each replay. A page
 * with `source` < 0 is none. Nobody checks whether the others lie in the pool. */
KVLATHE_API int32_t kvlathe_cuda_seal_listed(const kvlathe_cuda_seal_args* args,
                                             kvlathe_status* status);

/* What observed rows of a step give the tokens that they attend ("Mass" of docs/attend.md), added
 * to the scores that pages hold. After a layer's append, and apart from its attention: observed rows
 * take a softmax of their own.
 *
 * A lane's scores in a page are float32 [page_tokens], and its tokens' positions int32
 * [page_tokens]. Scores of tokens that were cached before the step grow by their mass. Those of the
 * step's own tokens become their mass, 0 where no row is observed; their positions are written
 * beside them. No two sequences share a page that has scores. The call has KVLATHE_MAX_SLOTS parts at
 * most. */
typedef struct kvlathe_observe_part {
  const int32_t* page_table; /* [B, page_table_stride] */
  const int32_t* lengths; /* tokens of sequence b before the step at lengths[b * lengths_stride] */
  int64_t lengths_stride;
  int32_t page_table_stride;
  int32_t fresh; /* 1: the step's own tokens lie in it, after `lengths` */
  /* null, or host [lane_count]: bytes from a page's start to the scores, positions, of each lane */
  const int32_t* scores;
  const int32_t* positions;
} kvlathe_observe_part;

typedef struct kvlathe_observe_args {
  uint32_t abi_version;
  int32_t batch;     /* B */
  int32_t tokens;    /* T: rows of q */
  int32_t most_rows; /* of one sequence that are observed, at most */
  /* the layer's attention: element, sizes, scale, parts' formats and lanes, q, pool, stream. The
   * tables and lengths of its parts, o and the workspace are not used */
  const kvlathe_attend_decode_args* call;
  const kvlathe_observe_part* parts; /* host [part_count of the call] */
  const int32_t* cu_seqlens_q;       /* [B + 1] */
  const int32_t* rows;               /* [T]: the observed rows, ascending */
  const int32_t* row_starts;         /* [B + 1]: where each sequence's begin in `rows` */
  const int32_t* token_positions;    /* [T]; null where no part keeps positions */
  void* states; /* 8 * group_size * lanes of the call bytes for each of T rows. With more, */
  int64_t states_bytes; /* up to 16 blocks share the tokens of a sequence with few observed rows:
                         * memory of 15 more rows a sequence is enough for decodes */
} kvlathe_observe_args;

KVLATHE_API int32_t kvlathe_cuda_observe(const kvlathe_observe_args* args, kvlathe_status* status);

/* As kvlathe_cpu_move, within one pool: place places[i, j] of lane i in the source pages becomes
 * place j in the target pages, and what is left of the last target page is zeroed. The sizes and
 * places of fields are even. */
typedef struct kvlathe_cuda_move_args {
  uint32_t abi_version;
  int32_t page_tokens;
  int32_t lanes, fields;            /* fields of each lane */
  const kvlathe_token_field* field; /* host [lanes, fields] */
  int64_t page_stride;
  void* pool;
  int64_t pool_bytes;
  const int32_t* source_pages; /* ids */
  const int32_t* target_pages; /* [target_count] ids */
  const int32_t* places;       /* lane i at places[i * places_stride]: [kept] */
  int64_t places_stride;
  int32_t target_count, kept;
  void* stream;
} kvlathe_cuda_move_args;

KVLATHE_API int32_t kvlathe_cuda_move(const kvlathe_cuda_move_args* args, kvlathe_status* status);

#ifdef __cplusplus
}
#endif
#endif
