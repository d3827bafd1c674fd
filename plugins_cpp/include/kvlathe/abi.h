/* kvlathe native kernels: the C ABI. Plain structs, no TensorRT, torch or Python.
 *
 * The paged cache is what kvlathe/plan/layout.py writes down: one pool, pages of `page_tokens`
 * tokens,
 *
 *     address = pool + page_id * page_stride + offset
 *
 * with offsets from a page's start in bytes, and a lane table row is (layer, head, rank_k, rank_v,
 * k, k_meta, v, v_meta, groups_k, groups_v), int32 each. Where v is k, V is the first rank_v numbers
 * of K's rows. One call handles one layer: pass the rows
 * of that layer only.
 *
 * Cached tokens of one lane may lie in several parts (a hot 16-bit bucket and a quantized cold one,
 * say), KVLATHE_MAX_SLOTS at most. A part is one bucket, or those of its lanes that see alike: one
 * page table, one length for each sequence, one number format. A lane's parts are attended together;
 * one softmax spans them.
 *
 * Inside a lane's slab. 32 and 16 bit: K and V are [token][rank]. Quantized: codes are packed low
 * bits first (of 3 bits: in blocks of three runs, kvlathe/plan/packing.py); axis rank is [token][rank] with metadata [token][group], groups being near-equal
 * multiples of 16 channels none above group_*; axis token is [rank][token] with metadata
 * [rank][page_tokens / group]. Metadata is a pair of IEEE halves (scale, minimum) for each group:
 * x = scale * code + minimum. Axis rank_normal is axis rank whose codes stand for levels of a normal
 * number, bytes of a table (NORMAL of kvlathe/plan/formats.py), with one half m for each group:
 * x = m (2 table[code] / 255 - 1). Axis rank_float8 is axis rank whose codes are floats of 8 bits
 * (e4m3 without infinities, OCP 8-bit floating point), with one half for each group:
 * x = scale * code.
 *
 * Every function returns a kvlathe_code and, where `status` is not null, writes the same code and
 * one sentence to it. A refusal happens before any launch and before anything is written. No
 * function throws.
 */
#ifndef KVLATHE_ABI_H
#define KVLATHE_ABI_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define KVLATHE_API __declspec(dllexport)
#else
#define KVLATHE_API __attribute__((visibility("default")))
#endif

#define KVLATHE_ABI_VERSION 15
#define KVLATHE_LANE_COLUMNS 10
#define KVLATHE_MAX_PARTS 32
#define KVLATHE_MAX_SLOTS 3
#define KVLATHE_MAX_HEADS 64

enum kvlathe_code {
  KVLATHE_OK = 0,
  KVLATHE_BAD_VERSION = 1,  /* built for another ABI version */
  KVLATHE_BAD_ARGUMENT = 2, /* sizes that contradict each other */
  KVLATHE_MISALIGNED = 3,   /* a pointer, stride or offset that vector loads cannot use */
  KVLATHE_TOO_SMALL = 4,    /* pool, page table or workspace */
  KVLATHE_UNSUPPORTED = 5,  /* valid, but not by this kernel or on this device */
  KVLATHE_DEVICE_ERROR = 6  /* the CUDA runtime refused */
};

typedef struct kvlathe_status {
  int32_t code;
  char message[508];
} kvlathe_status;

/* Element type of q, o and of parts of 16 or 32 bits. */
enum kvlathe_element { KVLATHE_F32 = 0, KVLATHE_F16 = 1, KVLATHE_BF16 = 2 };

enum kvlathe_axis {
  KVLATHE_AXIS_RANK = 0,
  KVLATHE_AXIS_TOKEN = 1,
  KVLATHE_AXIS_RANK_NORMAL = 2, /* 4, 3 or 2 bits */
  KVLATHE_AXIS_RANK_FLOAT8 = 3  /* 8 bits */
};

/* One bucket, or some of its lanes. `lanes` is host memory; `page_table` and `lengths` are where the kernel runs (device
 * memory for CUDA). */
typedef struct kvlathe_part {
  int32_t bits_k, bits_v;   /* 32, 16, 8, 4, 3 or 2; above 8: the call's element type */
  int32_t axis_k, axis_v;   /* of the quantization groups; ignored above 8 bits */
  int32_t group_k, group_v; /* elements in a group at most; ignored above 8 bits */
  int32_t lane_count;       /* rows in `lanes`, sorted by head, no head twice */
  /* page ids in a row of page_table: the most pages a sequence may have */
  int32_t page_table_stride;
  const int32_t* lanes; /* [lane_count, KVLATHE_LANE_COLUMNS] */
  int64_t page_stride;  /* bytes from one page to the next */
  /* [batch, page_table_stride] page ids; entries past the length are not read */
  const int32_t* page_table;
  const int32_t* lengths; /* tokens of sequence b at lengths[b * lengths_stride]; 0 is allowed */
  int64_t lengths_stride; /* in elements */
  /* attend_decode: null, or sequence b does not see its tokens from hidden[b * hidden_stride] up to
   * hidden[b * hidden_stride + 1]. Of all its tokens it sees one or more. */
  const int32_t* hidden;
  int64_t hidden_stride; /* in elements */
} kvlathe_part;

/* What the lanes of a part see (Sight of kvlathe/plan/lives.py). The query at place p sees
 * place t <= p where t < sink, or t >= p / P * P - recent and, where exact is not 0, t > p - exact.
 * P: tokens of a page. Places count the tokens of bucket `sealed` (-1: there is none) before those
 * of bucket `fresh`, which takes the new ones. Both name the same two. recent = KVLATHE_NO_END: it
 * sees all. */
#define KVLATHE_NO_END (1 << 30)
typedef struct kvlathe_window {
  int32_t sink, recent, exact, sealed, fresh;
} kvlathe_window;

/* Flags of a call. OVERLAP (CUDA, compute capability 9.0 and later): programmatic dependent launch.
 * The kernel may start while the one before it on the stream still runs; it reads lengths and page
 * tables at once, and waits for that kernel before it touches the pool, q, o and the workspace. So
 * the kernel just before must not write lengths or page tables. APPENDED, with OVERLAP: the kernel
 * just before writes at most the last row that each sequence has in a 16-bit part, nothing else of
 * the pool: all other rows may be read while it runs. BUNDLES (CUDA): lengths are as below. */
enum kvlathe_flags { KVLATHE_OVERLAP = 1, KVLATHE_APPENDED = 2, KVLATHE_BUNDLES = 4 };

/* Rows of one sequence that follow each other and are attended together, so that their tokens are
 * read once: a bundle, of at most KVLATHE_MAX_BUNDLE rows. A row alone is one, too. The length of
 * its first row is the tokens that its last row sees, plus KVLATHE_STEPPED where each row sees one
 * token less than the next (else all see the same), plus (rows - 1) << KVLATHE_BUNDLE_SHIFT. That
 * of the others is -1. The parts of a call have the same bundles. Page tables are the first row's;
 * what is hidden is each row's own. */
#define KVLATHE_MAX_BUNDLE 8
#define KVLATHE_BUNDLE_SHIFT 28
#define KVLATHE_STEPPED (1 << 27)

/* The prompt chunks of a step, which kvlathe_cuda_spread lists (cache.h): sequences with several
 * new rows, attended in tiles. `parts` goes with the call's parts: the same buckets, by sequence
 * and not by row. */
typedef struct kvlathe_prompt_part {
  const int32_t* page_table; /* [B, page_table_stride] */
  const int32_t* lengths; /* tokens of sequence b before the step at lengths[b * lengths_stride] */
  int64_t lengths_stride;
  int32_t page_table_stride;
  /* 1: the step's own tokens lie in it, after `lengths`: each row sees those up to itself */
  int32_t fresh;
  kvlathe_window window; /* its buckets are counted among the call's parts */
  int32_t reserved;
} kvlathe_prompt_part;

typedef struct kvlathe_prompts {
  int32_t* list;                    /* from kvlathe_cuda_spread; a call leaves it as it was */
  const int32_t* cu_seqlens_q;      /* [B + 1] */
  int32_t batch;                    /* B */
  int32_t rows;                     /* every row of the call from this one on is a listed chunk's */
  const kvlathe_prompt_part* parts; /* host [part_count] */
  /* null, or room for 16-bit copies of sealed pages that chunks of the call read, on 128 bytes.
   * Sequences take room in their order; from the first that finds none on, they go without. */
  void* copies;
  int64_t copies_bytes;
  /* null, or whose copies each sequence reads [B]: its own (b), those of another one whose pages
   * begin with its own and which reads its own, or none (-1). A copy pays where many rows read it:
   * with null, a sequence of 128 new tokens or more reads its own. */
  const int32_t* copies_of;
} kvlathe_prompts;

/* Attention of one new token for each row over the cached tokens that its row of lengths and page
 * tables names.
 *
 * q' and o' are packed like the op's o (docs/attend.md): the lanes in head order, each lane's query
 * heads side by side,
 *   q [batch, q_stride]: sum over lanes of group_size * rank_k elements (RoPE and projection done)
 *   o [batch, o_stride]: sum over lanes of group_size * rank_v elements (zeros without tokens)
 * softmax(scale * q' k'^T) v', accumulated in float32. Rows of listed prompt chunks have lengths of
 * 0 here and are attended by what `prompts` says. */
typedef struct kvlathe_attend_decode_args {
  uint32_t abi_version; /* KVLATHE_ABI_VERSION */
  int32_t element;      /* kvlathe_element */
  int32_t batch;
  int32_t group_size;  /* query heads a lane */
  int32_t page_tokens; /* a multiple of 16 */
  int32_t part_count;  /* 1 .. KVLATHE_MAX_PARTS */
  float scale;
  int32_t flags; /* kvlathe_flags */
  const kvlathe_part* parts;
  const void* pool;
  int64_t pool_bytes;
  const void* q;
  int64_t q_stride; /* in elements */
  void* o;
  int64_t o_stride; /* in elements */
  /* CUDA only: kvlathe_cuda_workspace_bytes() bytes, zeroed once; a call leaves it ready for the
   * next */
  void* workspace;
  int64_t workspace_bytes;
  void* stream;                   /* CUDA only: a cudaStream_t; null is the default stream */
  const kvlathe_prompts* prompts; /* CUDA only: null, or the step's prompt chunks */
  void* plan; /* CUDA only: null, or what kvlathe_cuda_plan wrote for this call */
  int64_t plan_bytes;
  /* null, or [heads, group_size] where the kernel runs: a logit of each query head beside its
   * scores, whose value is zero */
  const float* sinks;
  float softcap; /* not 0: scores are softcap * tanh(score / softcap) */
  int32_t reserved;
} kvlathe_attend_decode_args;

/* The ABI version of this library. */
KVLATHE_API uint32_t kvlathe_abi_version(void);

/* 1 if the library holds CUDA kernels, else 0. */
KVLATHE_API int32_t kvlathe_has_cuda(void);

/* The portable reference: any element, bit width, rank and group size; checks every page id. */
KVLATHE_API int32_t kvlathe_cpu_attend_decode(const kvlathe_attend_decode_args* args,
                                              kvlathe_status* status);

/* F16 or BF16; ranks of K 16 .. 640, of V 16 .. 512; group sizes 1 .. 8, and more in wide calls. One
 * is wide where a rank is above 128 or V a part of K. Parts of 16 bits, and of codes in pages of 64,
 * 128 or 256 tokens. In calls that are not wide, even codes of one width, 8, 4 or 2 bits, of K in
 * groups along the rank and of V along the tokens (32, 64, 128 or 256), are attended as they are,
 * with q and the weights rounded to
 * 8 bits. A call with other codes, or with hidden tokens, turns codes into elements first. Page ids
 * and lengths are trusted: they are in device memory. Asynchronous on `stream`; may be captured into
 * a CUDA graph. With batch 0 nothing is launched: a call is only checked, down to the current
 * device's room for its tiles; q, o, pool, tables and the workspace may then be null. */
KVLATHE_API int32_t kvlathe_cuda_attend_decode(const kvlathe_attend_decode_args* args,
                                               kvlathe_status* status);

/* Bytes of workspace that kvlathe_cuda_attend_decode may use on the current device for up to `batch`
 * sequences of `heads` lanes. Those for no sequence are enough for any call; with them many
 * sequences take longer. */
KVLATHE_API int32_t kvlathe_cuda_workspace_bytes(int32_t batch, int32_t heads, int64_t* bytes,
                                                 kvlathe_status* status);

/* Once a step, for all its layers: finds which block attends what in each of `count` calls (host
 * array) and writes it to their `plan`, on the stream of the first. q, o and the workspace are not
 * touched and may be null, but workspace_bytes counts. The calls that follow must be made with the
 * same arguments otherwise, on the lengths and page tables that are there now; a plan made for
 * another batch, grid, layer or table is found out on the device and not used. With OVERLAP the
 * kernel just before a call must not be this one. Asynchronous; may be captured into a CUDA
 * graph. */
KVLATHE_API int32_t kvlathe_cuda_plan(const kvlathe_attend_decode_args* calls, int32_t count,
                                      kvlathe_status* status);

/* Bytes of one call's plan on the current device, to be aligned to 128. */
KVLATHE_API int32_t kvlathe_cuda_plan_bytes(int64_t* bytes, kvlathe_status* status);

#ifdef __cplusplus
}
#endif
#endif
