// Prompt chunks: their list, which spread.cu writes and attend_prompt.cuh takes, and what one
// launch is told.
#pragma once

#include <cstdint>

#include "common/formats.h"
#include "cuda/decode/params.h"

namespace kvlathe::cuda {

// Warpgroups that attend, 64 rows each. One more fetches.
constexpr int kPromptGroups = 3;
constexpr int kPromptThreads = 128 * (kPromptGroups + 1);
// Rows of a tile. A row is one query head of one token.
constexpr int kPromptRows = 64 * kPromptGroups;

// Tokens attended at once. More leave no registers for o, whose size is the rank of V.
constexpr int kStageTokens = 64;

constexpr int kStageUnit = kStageTokens * 32;  // bytes: 16 ranks of a stage
constexpr int kBlockAlignment = 1024;          // bytes: what swizzles repeat after

// The list, int32: a header, then (sequence, first row in its chunk) of each tile, those with the
// most keys first. Items taken and blocks done are 0 between launches.
enum PromptList { kTiles = 0, kTaken = 1, kDone = 2, kListHeader = 4 };

inline int64_t prompt_tiles_most(int64_t tokens, int64_t batch, int64_t group_size) {
  return tokens * group_size / kPromptRows + batch;
}

// Which tiles of the list a launch takes. Where pages are copied, those that read codes all the same
// have a launch of their own: buffers of codes would cost the others a stage.
enum PromptTiles { kTilesOfAll, kTilesOfElements, kTilesOfCodes };

// How a launch divides shared memory: two tiles of queries, then buffers of codes (0 to 2), then
// stages of K | V from stages_at on.
struct PromptRoom {
  int32_t tiles;  // PromptTiles
  int32_t codes_buffers, stages_at, stage_units;
  int32_t shared_bytes;
};

struct PromptPart {
  const int32_t *page_table, *lengths;
  int64_t page_stride, lengths_stride;
  int32_t table_stride;
  int32_t fresh;
  int32_t bits;         // 16, 8, 4 or 2
  int32_t group_shift;  // log2 of a quantized V group's tokens
};

// By slot, as in LaneParams.
struct PromptHead {
  int32_t q_offset, o_offset;
  int32_t k[KVLATHE_MAX_SLOTS], v[KVLATHE_MAX_SLOTS];             // bytes from a page's start
  uint16_t k_meta[KVLATHE_MAX_SLOTS], v_meta[KVLATHE_MAX_SLOTS];  // quantized: 16 bytes from k
  uint8_t groups_k[KVLATHE_MAX_SLOTS];                            // quantized: groups of K
  uint8_t least_k[KVLATHE_MAX_SLOTS];  // quantized: steps of 16 channels in the shortest of them
  uint8_t steps_k, steps_v;            // ranks / 16
  uint8_t parts;                       // bit i: slot i has tokens of this lane
  uint16_t steps_before;               // of K and V of the lanes before, in a copied page
};

struct PromptParams : PromptRoom {
  static constexpr bool kGeneral = false, kScored = false, kFloat8 = false;
  KVLATHE_ANYWHERE const PromptPart& part_of(int, int slot) const { return part[slot]; }
  // The same of the call's parts, and which of them is in a slot.
  KVLATHE_ANYWHERE const PromptPart& call_part(int i) const { return part[i]; }
  KVLATHE_ANYWHERE int call_part_of(int, int slot) const { return slot; }

  const char* pool;
  const uint16_t* q;
  uint16_t* o;
  int64_t q_stride, o_stride;
  int32_t* list;
  const int32_t* cu_seqlens_q;
  float scale_log2;
  int32_t heads, group_size, page_tokens, parts;  // parts: of a lane at most
  uint32_t page_magic;               // token / page_tokens == umulhi(token, page_magic)
  int32_t query_bytes, codes_bytes;  // of a tile of queries, of a buffer of codes
  // 16-bit copies of sealed pages (prompt_copies.cu), where there is room for them: the copy of
  // page i of sequence b in the call's part s is the one at copy_base[s * batch + b] + i, or there
  // is none where that is below 0.
  const int32_t* copy_base;   // null: no copies
  const int32_t* codes_left;  // whether some listed sequence has sealed pages without one
  const char* copies;
  int64_t copy_stride;
  int32_t batch;
  PromptPart part[KVLATHE_MAX_SLOTS];
  PromptHead head[KVLATHE_MAX_HEADS];  // the most work first
};
static_assert(sizeof(PromptParams) <= 4000);

// The same for any call: parts have windows, and codes have any form. A part then has the bits
// kGeneralBits where prompt_codes.cuh does not read its codes.
struct GeneralPrompts : PromptParams {
  static constexpr bool kGeneral = true;
  using Sides = FormSide[2];  // of K and V
  KVLATHE_ANYWHERE const kvlathe_window& window_of(int, int slot) const { return window[slot]; }
  KVLATHE_ANYWHERE const Sides& sides_of(int, int slot) const { return side[slot]; }

  kvlathe_window window[KVLATHE_MAX_SLOTS];
  Sides side[KVLATHE_MAX_SLOTS];
  uint8_t groups[KVLATHE_MAX_HEADS][KVLATHE_MAX_SLOTS][2];  // groups_of
};

// The same of a call of more parts than slots, where lanes name their parts (SlotTable).
struct NamedPrompts : GeneralPrompts {
  KVLATHE_ANYWHERE const PromptPart& part_of(int head, int slot) const {
    return every_part[slots.part_in(head, slot)];
  }
  KVLATHE_ANYWHERE const PromptPart& call_part(int i) const { return every_part[i]; }
  KVLATHE_ANYWHERE int call_part_of(int head, int slot) const { return slots.part_in(head, slot); }
  KVLATHE_ANYWHERE const kvlathe_window& window_of(int head, int slot) const {
    return lane_window[head][slot];
  }
  KVLATHE_ANYWHERE const Sides& sides_of(int head, int slot) const {
    return every_side[slots.part_in(head, slot)];
  }

  SlotTable<true> slots;
  PromptPart every_part[KVLATHE_MAX_PARTS];
  Sides every_side[KVLATHE_MAX_PARTS];
  // Its buckets are slots.
  kvlathe_window lane_window[KVLATHE_MAX_HEADS][KVLATHE_MAX_SLOTS];
};

// The same of models that bound their scores or have sink logits (scoring.cuh), of any call.
struct ScoredPrompts : NamedPrompts {
  static constexpr bool kScored = true;
  const float* sinks;                   // null, or [lanes, group_size] in the order of lanes
  uint16_t sink_at[KVLATHE_MAX_HEADS];  // where those of a lane begin
  float bound;                          // of scores that are not scaled yet; 0: none
};
static_assert(sizeof(ScoredPrompts) <= 32764, "a kernel takes no more parameters");

// The same of a call with floats of 8 bits.
struct Float8Prompts : ScoredPrompts {
  static constexpr bool kFloat8 = true;
};
constexpr int kGeneralBits = 1;

// Copies that come before a call's launch.
struct CopyLaunch {
  int32_t slots;             // pages that there is room for; 0: no copies
  int32_t parts;             // of the call
  uint32_t copied;           // bit i: pages of part i are copied
  bool general, float8;      // float8: with floats of 8 bits
  int32_t *count, *left;     // copies made; PromptParams::codes_left
  int2* owners;              // [slots]: part and page of each
  const int32_t* copies_of;  // of kvlathe_prompts
  int32_t element;
  int shared_bytes;
};

// What parameters a kernel takes: PromptParams, GeneralPrompts, NamedPrompts, ScoredPrompts or
// Float8Prompts.
enum class PromptKind { kPlain, kGeneral, kNamed, kScored, kFloat8 };
const void* prompt_kernel_f16(PromptKind kind);
const void* prompt_kernel_bf16(PromptKind kind);

// Whether the current device has the kernel.
bool prompt_kernel_here();

// The launch of a call's listed chunks. Nothing is launched yet: what cannot be attended throws a
// Refusal before anything runs.
struct PromptLaunch {
  ScoredPrompts params;
  CopyLaunch copies;
  const void* kernel;   // takes them, or what they have of GeneralPrompts or PromptParams
  PromptRoom rooms[2];  // of its launches: one, or two where pages are copied
  int grid;
};
PromptLaunch prompt_launch_of(const kvlathe_attend_decode_args& args);

// Divides the room that a call gives for copies, and tells the parameters.
CopyLaunch copy_launch_of(const kvlathe_attend_decode_args& args, NamedPrompts& params,
                          bool general);

// Reserves what the launch of copies needs. Call once all of the launch is known.
void reserve_copies(PromptLaunch& launch);

// The copies that a launch reads (prompt_copies.cu).
void copy_pages(const PromptLaunch& launch, void* stream);

void attend_prompts(const PromptLaunch& launch, void* stream);

}  // namespace kvlathe::cuda
