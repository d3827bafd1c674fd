// Kernel parameters of one launch of attend_decode, by value. The host decides all sizes.
#pragma once

#include <cstdint>

#include "common/formats.h"
#include "common/limits.h"
#include "kvlathe/abi.h"

namespace kvlathe::cuda {

constexpr int kRowTokens = 16;    // tokens of a unit of a 16-bit tile: the M of mma.m16n8k16
constexpr int kChunkTokens = 64;  // tokens of a quantized page that are attended at a time

// A warp reads K of 8 bits at tokens that are 16 apart, which would lie in the same banks. So in a
// tile pieces of 16 tokens are set apart by 16 bytes.
constexpr int kPieceTokens = 16, kPieceGap = 16;

// Tuning, fixed when the library is built. docs/history/performance.md says what was tried.
#ifndef KVLATHE_WARPS
#define KVLATHE_WARPS 8
#endif
#ifndef KVLATHE_BLOCKS_PER_SM
#define KVLATHE_BLOCKS_PER_SM 2
#endif
constexpr int kMaxWarps = KVLATHE_WARPS;
// Warps of a block of attend_decode<.., kBits, kFill>. 8-bit tiles are so large that shared memory
// holds the rings of fewer warps. The registers of the others then serve loads on their way. Warps
// that attend alone (attend_alone.cuh) are kMaxWarps at every width.
__host__ __device__ constexpr int most_warps(int bits, int fill) {
  return is_byte(bits) && fill == 2 ? kMaxWarps * 3 / 4 : kMaxWarps;
}
// And of attend_general, which needs more registers than 8 warps would leave it.
constexpr int kGeneralWarps = kMaxWarps * 3 / 4;
// And of attend_bytes: more rings would have no room for both halves of a tile.
constexpr int kByteWarps = kMaxWarps * 3 / 4;
// And of calls with bundles, whose items have up to twice as many columns.
constexpr int kBundledWarps = kMaxWarps * 3 / 4;
constexpr int kBlocksPerSM = KVLATHE_BLOCKS_PER_SM;
// And of all blocks of a multiprocessor in a wide call.
constexpr int kWideWarps = 8;
// And of a block in one whose parts all have 16 bits, at ranks up to 256.
constexpr int kPlainWarps = kMaxWarps * 3 / 4;
// In such a call every two rows of a tile are kRowGap bytes apart, and warps merge the sums of so many
// channels at a time. A warp asks for kWideBatch matrices of 16 channels before it multiplies the first
// one. Queries of two such take kTwoSteps bytes.
constexpr int kRowGap = 16, kMergedChannels = 64, kWideBatch = 8, kTwoSteps = 512;
__host__ __device__ constexpr int two_rows(int rank) { return 4 * rank + kRowGap; }
__host__ __device__ constexpr int wide_queries_bytes(int rank_k) {
  return (rank_k + 16 * kWideBatch - 1) / (16 * kWideBatch) * kWideBatch / 2 * kTwoSteps;
}
// Narrow 16-bit lanes take several units a tile up to so many bytes, and quantized ones two pages.
constexpr int kTileBytes = 6 << 10;
constexpr int kPagesBytes = 8 << 10;
// Work is counted in units of so many bytes: 31 bits then hold the work of a layer.
constexpr int kWeight = 128;
// Blocks with less work take one unit a tile, because even shares then matter more than overhead.
constexpr int kFineShare = (1 << 18) / kWeight;
// Where calls overlap and blocks have less work than kSpareShare, one block in kSpareBlocks gets
// none. It would start when the call before has ended, and be the last to end.
constexpr int kSpareShare = (1 << 19) / kWeight;
constexpr int kSpareBlocks = 32;
// Warps attend alone from so many pairs for four SMs on (attend_alone.cuh; docs/performance.md).
constexpr int kAlonePairs = 7;
// A block with less work costs more than it saves.
constexpr int kLeastBlockWeight = (16 << 10) / kWeight;
// What a quantized page costs beyond its bytes, and in a general call, whose instructions take longer
// than its bytes and are as many at every width.
constexpr int kTileWeight = (1 << 10) / kWeight;
constexpr int kGeneralTileWeight = (1 << 14) / kWeight;

// The bits of codes in a call where parts have several, and in the kernel that takes any.
constexpr int kSeveralWidths = 0;

struct PartParams {
  const int32_t* page_table;
  const int32_t* lengths;
  int64_t page_stride, lengths_stride;
  int32_t table_stride;
  int32_t bits;        // 16, 8, 4 or 2
  int32_t unit_shift;  // log2 of a unit's tokens: 16 of a 16-bit lane, a page of a quantized one
  int32_t units_per_page;
  int32_t units_per_page_magic;  // u / units_per_page == umulhi(u, magic), but for 1
  int32_t groups_v;              // log2 of the tokens of a quantized V group
};

// One lane in one part.
//
// A tile is what one warp fetches and attends at once. 16 bit: `tile_units` units of one page, a
// power of two; K of a unit lies at k + unit * the bytes of its rows, and V likewise. Quantized:
// one or two pages; a unit is the slab of one page, `bytes` from k on, and V and the metadata lie
// at offsets from its start.
//
// weight: of a unit, in kWeight bytes. 0: the part does not hold this lane.
struct LaneParams {
  int32_t k, v;
  int32_t bytes;            // of a unit, in the pool
  int32_t tile_bytes;       // of a tile of tile_units, in a ring
  uint16_t k_meta, v_meta;  // in 16 bytes
  uint16_t weight;
  uint8_t tile_units, groups_k;
};

template <int kSlots>
struct HeadParams {
  int32_t q_offset, o_offset;
  uint16_t rank_k, rank_v;
  LaneParams lane[kSlots];
};

// The parts of a lane are its slots. A call of as many parts as slots has part i in slot i. In one
// of more, each lane names its parts.
template <bool kNamed>
struct SlotTable {
  KVLATHE_ANYWHERE static int part_in(int, int slot) { return slot; }
};
template <>
struct SlotTable<true> {
  int32_t parts;
  uint8_t slot[KVLATHE_MAX_HEADS][KVLATHE_MAX_SLOTS];
  KVLATHE_ANYWHERE int part_in(int head, int i) const { return slot[head][i]; }
};

// A partial result of one span of work: the softmax state of its query heads.
template <int kColumns, int kRank = kNarrowRank>
struct PartialOf {
  float2 m_l[kColumns];       // m in base 2, and l
  float o[kColumns * kRank];  // [group][rank_v], not divided by l
};
using Partial = PartialOf<kMaxGroup>;

struct PlanRecord;  // schedule.cuh

template <int kSlots_, int kParts_ = kSlots_>
struct Params : SlotTable<(kParts_ > kSlots_)> {
  static constexpr int kSlots = kSlots_, kParts = kParts_;
  static constexpr bool kNamed = kParts > kSlots;
  // Of general calls: a row may see no token at all, and a block may have few threads (finish.cuh).
  static constexpr bool kHides = false, kScored = false, kFloat8 = false;
  static constexpr bool kBundled = false;
  static constexpr bool kAlone = false;
  // Whether parts of 8 bits are rows of bytes (attend_bytes.cuh), and then bytes of a token's metadata.
  static constexpr bool kByteRows = false, kKeyPages = false;
  static constexpr int kMetaBytes = 0;
  // Whether warps merge kMergedChannels at a time.
  static constexpr bool kSliced = false;
  static constexpr int kColumns = kMaxGroup;  // query heads of an item of work at most
  // The widest ranks, and blocks of a multiprocessor.
  static constexpr bool kWide = false, kPlain = false, kTeam = false;
  static constexpr int kRank = kNarrowRank, kRankV = kNarrowRank, kBlocks = kBlocksPerSM;
  const char* pool;
  const uint16_t* q;
  uint16_t* o;
  int64_t q_stride, o_stride;
  Partial* partials;       // [blocks, 2]; zero between launches
  const PlanRecord* plan;  // null, or [blocks]
  float scale_log2;
  int32_t batch, heads, group_size, page_tokens;
  uint32_t plan_tag;  // of what the plan depends on beside lengths and page ids
  // Whether what the kernel before this one does not write may be read before that has ended.
  int32_t early;
  int32_t ring_bytes;           // shared memory of one warp's ring
  int32_t codes_bytes;          // shared memory of one warp's quantized queries
  int32_t merge_floats;         // shared memory of the merge buffer
  int32_t part_weight[kParts];  // sum over heads
  int32_t least_block_weight;   // at least a tile's: then no block between two others is empty
  int32_t spare_blocks;         // of a small call: the last ones, which get no work
  PartParams part[kParts];
  HeadParams<kSlots> head[KVLATHE_MAX_HEADS];

  KVLATHE_ANYWHERE const PartParams& part_of(int head, int slot) const {
    return part[this->part_in(head, slot)];
  }
};
static_assert(sizeof(Params<KVLATHE_MAX_SLOTS, KVLATHE_MAX_PARTS>) <= 8192);

// Of calls whose warps attend alone (attend_alone.cuh): the weight of a block is divided among its
// warps, and partials are AlonePartial [blocks, warps, 2].
struct AloneParams : Params<2> {
  static constexpr bool kAlone = true;
};

// Of calls whose codes are rows of bytes: a unit of such a part has 64 tokens, and is fetched in two
// halves, K and V. kKeyPages: K is by channel, of pages of 64 tokens.
template <Coding kCoding_, bool kKeyPages_ = false>
struct ByteParams : Params<2> {
  static constexpr bool kByteRows = true, kHides = true;  // a block may have few threads
  static constexpr bool kSliced = true;
  static constexpr bool kKeyPages = kKeyPages_;
  static constexpr Coding kCoding = kCoding_;
  static constexpr int kMetaBytes = 2 * metadata_halves(kCoding);
};
using KeyPageParams = ByteParams<Coding::kAffine, true>;

// What the kernel of general calls (attend_general.cuh) is told beside that. A part has the bits
// kGeneral where one of its sides has codes. A unit is then the slab of a page, as of a quantized
// part, but K and V may have any form.
constexpr int kGeneral = 1;
struct GeneralPart {
  FormSide side[2];       // of K and V
  const int32_t* hidden;  // as in kvlathe_part
  int64_t hidden_stride;
};
template <int kParts>
struct GeneralParams : Params<KVLATHE_MAX_SLOTS, kParts> {
  static constexpr bool kHides = true;
  GeneralPart form[kParts];
  uint8_t groups[KVLATHE_MAX_HEADS][KVLATHE_MAX_SLOTS][2];  // groups_of
};

// The same of models that bound their scores or have sink logits (scoring.cuh), of any call.
struct ScoredParams : GeneralParams<KVLATHE_MAX_PARTS> {
  static constexpr bool kScored = true;
  const float* sinks;  // null, or [heads, group_size]
  float bound;         // of scores in base 2; 0: none
};

// The same of a call with floats of 8 bits.
struct Float8Params : ScoredParams {
  static constexpr bool kFloat8 = true;
};

// The same of a call with ranks above kNarrowRank, or with lanes whose V is a part of their K: its
// place is K's then. Every form goes by one kernel.
template <int kRank_, int kRankV_, int kBlocks_>
struct WideParams : Float8Params {
  static constexpr bool kWide = true;
  static constexpr int kRank = kRank_, kRankV = kRankV_, kBlocks = kBlocks_;
};
// Ranks of both up to 256, and all.
using Wide256 = WideParams<256, 256, 2>;
using Widest = WideParams<kMaxRank, kMaxRankV, 1>;

// The same where all parts have 16 bits (attend_wide.cuh).
template <int kRank_, int kRankV_, int kBlocks_>
struct PlainParams : ScoredParams {
  static constexpr bool kWide = true, kPlain = true, kSliced = true;
  static constexpr int kRank = kRank_, kRankV = kRankV_, kBlocks = kBlocks_;
};
// Ranks of both up to 256, and all.
using Plain256 = PlainParams<256, 256, 2>;
using PlainWidest = PlainParams<kMaxRank, kMaxRankV, 1>;

// The same of many query heads: the warps of a block attend the same tiles, kMaxGroup query heads each
// (attend_team.cuh).
// Warps that attend; and threads, a third warpgroup's among them.
constexpr int kTeamWarps = 8, kTeamThreads = 384;
// Bytes in front of a team's ring.
constexpr int kTeamHead = 512;
// From how many query heads of all rows an SM on blocks are teams. Below 0: never.
constexpr int kTeamColumns = -1;
struct TeamParams : PlainWidest {
  static constexpr bool kTeam = true;
};

// The same of a call with bundles (bundles.cuh). Every KV head stands here as many times as there are
// tiles of kColumns_ columns in the largest bundle, one after the other.
template <class Base, int kColumns_>
struct Bundled : Base {
  static constexpr bool kHides = true, kBundled = true;
  static constexpr int kColumns = kColumns_;
  int32_t tiles;
};

// Warps of a block of attend_general. A thread of a wide call has as many registers as there are.
template <class P>
KVLATHE_ANYWHERE constexpr int general_warps() {
  if (P::kPlain && P::kBlocks > 1) return kPlainWarps;
  return P::kWide ? kWideWarps / P::kBlocks : P::kBundled ? kBundledWarps : kGeneralWarps;
}

// Query heads that an item of work has at most.
template <class P>
KVLATHE_ANYWHERE int most_columns(const P& p) {
  if constexpr (P::kBundled) return P::kColumns;
  return p.group_size;
}

}  // namespace kvlathe::cuda
