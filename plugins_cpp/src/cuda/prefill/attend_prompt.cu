// The host of attend_prompt: what is refused, which sizes a launch has, and the launch. The kernel
// is in attend_prompt.cuh.
#include <algorithm>
#include <array>

#include "common/decode_call.h"
#include "cuda/host.h"
#include "cuda/prefill/prompt_stages.cuh"
#include "kvlathe/cache.h"

namespace kvlathe::cuda {
namespace {

void check_prompts(const kvlathe_attend_decode_args& a, const std::vector<Head>& heads) {
  const kvlathe_prompts& prompts = *a.prompts;
  check_element(a.element);
  for (const Head& head : heads) {
    require(!head.is_wide(), KVLATHE_UNSUPPORTED,
            "a rank is above " + std::to_string(kNarrowRank) +
                ", or V is a part of K: no kernel attends such prompts in tiles");
  }
  for (int i = 0; i < a.part_count; ++i) {
    if (any_quantized(a.parts[i])) check_codes(a);
  }
  require(prompts.list && prompts.cu_seqlens_q && prompts.parts && prompts.batch >= 1,
          KVLATHE_BAD_ARGUMENT, "the prompts have no list, cu_seqlens_q or parts");
  require(prompts.rows >= 0 && prompts.rows <= a.batch, KVLATHE_BAD_ARGUMENT,
          "the prompts leave more rows than the call has, or fewer than none");
  for (int i = 0; i < a.part_count; ++i) {
    require(prompts.parts[i].page_table && prompts.parts[i].lengths, KVLATHE_BAD_ARGUMENT,
            "a part of the prompts has no page table or no lengths");
  }
}

// Where a lane lies in the part of its slot i.
void set_lane(GeneralPrompts& p, int h, int i, const LaneRow& row, const kvlathe_part& part) {
  PromptHead& head = p.head[h];
  head.k[i] = row.k, head.v[i] = row.v, head.parts |= uint8_t(1 << i);
  if (!any_quantized(part)) return;
  const int32_t k_meta = is_quantized(part.bits_k) ? (row.k_meta - row.k) / 16 : 0,
                v_meta = is_quantized(part.bits_v) ? (row.v_meta - row.k) / 16 : 0;
  require(k_meta >= 0 && v_meta >= 0 && k_meta <= UINT16_MAX && v_meta <= UINT16_MAX,
          KVLATHE_UNSUPPORTED,
          "the metadata of head " + std::to_string(row.head) +
              " does not lie after its K, within 1 MB");
  head.k_meta[i] = uint16_t(k_meta), head.v_meta[i] = uint16_t(v_meta);
  const int ranks[] = {row.rank_k, row.rank_v}, groups[] = {row.groups_k, row.groups_v};
  for (int which = 0; which < 2; ++which) {
    const Format format = which ? format_v(part) : format_k(part);
    const int count = groups_of(format, ranks[which], p.page_tokens);
    require(!format.quantized() ||
                groups[which] == count * (format.by_channel() ? ranks[which] : p.page_tokens),
            KVLATHE_BAD_ARGUMENT,
            "the lane of head " + std::to_string(row.head) +
                " has other group counts than its part's groups give");
    p.groups[h][i][which] = uint8_t(count);
  }
  head.groups_k[i] = p.groups[h][i][0];
  head.least_k[i] = uint8_t(row.rank_k / 16 / head.groups_k[i]);
}

// What 64 tokens of a sealed lane take in a buffer of codes.
int codes_bytes(const GeneralPrompts& p, int h, int i, const LaneRow& row,
                const kvlathe_part& part) {
  const int ranks[] = {row.rank_k, row.rank_v};
  int bytes = 0;
  for (int which = 0; which < 2; ++which) {
    const FormSide side = side_of(which ? format_v(part) : format_k(part));
    bytes += int(slab_bytes(ranks[which], 64, side.bits)) +
             side.meta_size(p.groups[h][i][which], ranks[which], 64);
  }
  return bytes;
}

// Of a part, for the kernel: kGeneralBits where it has codes that prompt_codes.cuh does not read.
int bits_of(const kvlathe_part& part) {
  return any_quantized(part) && !known_codes(part) ? kGeneralBits : part.bits_k;
}

// Whether lanes name their parts: the kernels of scored calls and of floats of 8 bits take no others.
bool is_named(const kvlathe_attend_decode_args& a) {
  return names_parts(a.part_count) || is_scored(a) || any_float8(a);
}

// Whether lanes see less than all of a part.
bool is_windowed(const kvlathe_prompt_part& part) {
  return part.window.recent < KVLATHE_NO_END || part.window.exact;
}

// Whether a part has a window, or other codes.
bool is_general(const kvlathe_attend_decode_args& a) {
  if (is_named(a)) return true;
  for (int i = 0; i < a.part_count; ++i) {
    if (is_windowed(a.prompts->parts[i]) || bits_of(a.parts[i]) == kGeneralBits) return true;
  }
  return false;
}

kvlathe_window checked_window(const kvlathe_window& window, int32_t parts) {
  require(window.fresh >= 0 && window.fresh < parts && window.sealed >= -1 && window.sealed < parts,
          KVLATHE_BAD_ARGUMENT, "a window names a part that is not there");
  require(window.sink >= 0 && window.recent >= 0 && window.exact >= 0, KVLATHE_BAD_ARGUMENT,
          "a window has a negative length");
  return window;
}

// What a lane sees of its parts, which are in `slots`: the window of one of them, by slot. A lane
// with a window is in its fresh part and in one sealed part at most, and parts with one window have
// equally many tokens.
kvlathe_window window_in(const std::array<int, KVLATHE_MAX_SLOTS>& slots, kvlathe_window window) {
  int fresh = -1, other = -1;
  for (int i = 0; i < KVLATHE_MAX_SLOTS; ++i) {
    if (slots[i] < 0) continue;
    (slots[i] == window.fresh ? fresh : other) = i;
  }
  require(fresh >= 0, KVLATHE_BAD_ARGUMENT, "a lane is not in the fresh part of its window");
  window.fresh = fresh;
  window.sealed = window.sealed < 0 ? -1 : other;
  return window;
}

// The lanes of a call that name their parts.
void name_parts(NamedPrompts& p, const kvlathe_attend_decode_args& a,
                const std::vector<Head>& heads) {
  p.parts = KVLATHE_MAX_SLOTS;
  p.slots.parts = a.part_count;
  for (size_t h = 0; h < heads.size(); ++h) {
    const auto slots = heads[h].slots(a.part_count);
    for (int i = 0; i < KVLATHE_MAX_SLOTS; ++i) {
      if (slots[i] < 0) continue;
      p.slots.slot[h][i] = uint8_t(slots[i]);
      const kvlathe_window& window = a.prompts->parts[slots[i]].window;
      p.lane_window[h][i] = window_in(slots, checked_window(window, a.part_count));
    }
  }
}

// Where the sink logits of each lane of p begin, which has other places than in `heads`.
void set_scoring(ScoredPrompts& p, const kvlathe_attend_decode_args& a,
                 const std::vector<Head>& heads) {
  p.sinks = a.sinks, p.bound = a.softcap / a.scale;
  for (int h = 0; h < p.heads; ++h) {
    const auto same = [&](const Head& x) { return x.q_offset == p.head[h].q_offset; };
    const auto at = std::find_if(heads.begin(), heads.end(), same) - heads.begin();
    p.sink_at[h] = uint16_t(at * a.group_size);
  }
}

ScoredPrompts params_of(const kvlathe_attend_decode_args& a, std::vector<Head> heads) {
  const kvlathe_prompts& prompts = *a.prompts;
  const std::vector<Head> in_order = heads;
  ScoredPrompts p{};
  p.pool = static_cast<const char*>(a.pool), p.q = static_cast<const uint16_t*>(a.q),
  p.o = static_cast<uint16_t*>(a.o);
  p.q_stride = a.q_stride, p.o_stride = a.o_stride;
  p.list = prompts.list, p.cu_seqlens_q = prompts.cu_seqlens_q;
  p.scale_log2 = a.scale * 1.4426950408889634f;
  p.heads = int32_t(heads.size()), p.group_size = a.group_size, p.page_tokens = a.page_tokens,
  p.parts = a.part_count, p.batch = prompts.batch;
  p.page_magic = uint32_t((uint64_t{1} << 32) / uint64_t(a.page_tokens) + 1);
  for (int i = 0; i < a.part_count; ++i) {
    const kvlathe_prompt_part& part = prompts.parts[i];
    p.every_part[i] = {
        part.page_table,        part.lengths,
        a.parts[i].page_stride, part.lengths_stride,
        part.page_table_stride, part.fresh,
        bits_of(a.parts[i]),    is_quantized(a.parts[i].bits_v) ? log2_of(a.parts[i].group_v) : 0};
    p.every_side[i][0] = side_of(format_k(a.parts[i])),
    p.every_side[i][1] = side_of(format_v(a.parts[i]));
    if (is_named(a)) continue;
    for (auto& slots : p.slots.slot) slots[i] = uint8_t(i);
    if (is_general(a)) p.window[i] = checked_window(part.window, a.part_count);
    p.part[i] = p.every_part[i];
    std::copy_n(p.every_side[i], 2, p.side[i]);
  }
  std::stable_sort(heads.begin(), heads.end(), [](const Head& x, const Head& y) {
    return x.rank_k + x.rank_v > y.rank_k + y.rank_v;
  });
  int rank_k = 0, steps = 0;
  for (size_t h = 0; h < heads.size(); ++h) {
    PromptHead& head = p.head[h];
    head.q_offset = int32_t(heads[h].q_offset), head.o_offset = int32_t(heads[h].o_offset);
    head.steps_k = uint8_t(heads[h].rank_k / 16), head.steps_v = uint8_t(heads[h].rank_v / 16);
    head.steps_before = uint16_t(steps), steps += head.steps_k + head.steps_v;
    rank_k = std::max(rank_k, heads[h].rank_k);
    const auto slots = heads[h].slots(a.part_count);
    for (int i = 0; i < KVLATHE_MAX_SLOTS; ++i) {
      if (slots[i] < 0) continue;
      const kvlathe_part& part = a.parts[slots[i]];
      const LaneRow& row = *heads[h].lane[slots[i]];
      set_lane(p, int(h), i, row, part);
      if (any_quantized(part))
        p.codes_bytes = std::max(p.codes_bytes, codes_bytes(p, int(h), i, row, part));
    }
  }
  if (is_named(a)) name_parts(p, a, heads);
  set_scoring(p, a, in_order);
  p.query_bytes = kPromptRows * 2 * rank_k;
  p.codes_bytes = (p.codes_bytes + 1023) / 1024 * 1024;  // stages begin at multiples
  return p;
}

// Divides `shared` bytes of shared memory for a launch. Two stages must fit, because those who
// attend hold one while they wait for the next.
PromptRoom fit(const PromptParams& p, PromptTiles tiles, int shared) {
  shared -= kBlockAlignment;
  int two_stages = 0;
  for (int h = 0; h < p.heads; ++h)
    two_stages = std::max(two_stages, 2 * (p.head[h].steps_k + p.head[h].steps_v) * kStageUnit);
  PromptRoom room{tiles};
  for (room.codes_buffers = p.codes_bytes && tiles != kTilesOfElements ? 2 : 0;;
       --room.codes_buffers) {
    room.stages_at = 2 * p.query_bytes + room.codes_buffers * p.codes_bytes;
    if (room.stages_at + two_stages <= shared) break;
    require(room.codes_buffers > 1, KVLATHE_UNSUPPORTED,
            "the device's shared memory holds no tile of ranks this large");
  }
  room.stage_units = (shared - room.stages_at) / kStageUnit;
  room.shared_bytes = room.stages_at + room.stage_units * kStageUnit + kBlockAlignment;
  return room;
}

const void* kernel_of(const kvlathe_attend_decode_args& a) {
  const PromptKind kind = any_float8(a)   ? PromptKind::kFloat8
                          : is_scored(a)  ? PromptKind::kScored
                          : is_named(a)   ? PromptKind::kNamed
                          : is_general(a) ? PromptKind::kGeneral
                                          : PromptKind::kPlain;
  return a.element == KVLATHE_F16 ? prompt_kernel_f16(kind) : prompt_kernel_bf16(kind);
}

}  // namespace

bool prompt_kernel_here() {
  cudaFuncAttributes attributes{};
  return attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
         cudaFuncGetAttributes(&attributes, prompt_kernel_f16(PromptKind::kPlain)) == cudaSuccess &&
         attributes.sharedSizeBytes > 0;
}

PromptLaunch prompt_launch_of(const kvlathe_attend_decode_args& a) {
  const std::vector<Head> heads = checked_heads(a);
  check_prompts(a, heads);
  PromptLaunch launch{params_of(a, heads), {}, kernel_of(a), {}, 0};
  launch.copies = copy_launch_of(a, launch.params, is_general(a));
  cudaFuncAttributes attributes{};
  check_cuda(
      cudaFuncGetAttributes(&attributes, launch.kernel),
      "this library has no kernel for this device (kvlathe native --cuda-architectures native)");
  const int room =
      attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - int(attributes.sharedSizeBytes);
  const bool copied = launch.copies.slots;
  launch.rooms[0] = fit(launch.params, copied ? kTilesOfElements : kTilesOfAll, room);
  launch.rooms[1] = copied ? fit(launch.params, kTilesOfCodes, room) : PromptRoom{};
  check_cuda(
      cudaFuncSetAttribute(launch.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           std::max(launch.rooms[0].shared_bytes, launch.rooms[1].shared_bytes)),
      "reserving shared memory");
  reserve_copies(launch);
  const int64_t most =
      prompt_tiles_most(a.batch, a.prompts->batch, a.group_size) * launch.params.heads;
  launch.grid =
      a.batch ? int(std::min<int64_t>(most, attribute(cudaDevAttrMultiProcessorCount))) : 0;
  return launch;
}

void attend_prompts(const PromptLaunch& launch, void* stream) {
  if (!launch.grid) return;
  ScoredPrompts params = launch.params;
  void* arguments[] = {&params};
  for (const PromptRoom& room : launch.rooms) {
    if (!room.shared_bytes) continue;
    static_cast<PromptRoom&>(params) = room;
    check_cuda(cudaLaunchKernel(launch.kernel, dim3(launch.grid), dim3(kPromptThreads), arguments,
                                room.shared_bytes, static_cast<cudaStream_t>(stream)),
               "launching attend_prompt");
  }
}

}  // namespace kvlathe::cuda

extern "C" int32_t kvlathe_cuda_has_prompt_kernel(void) {
  try {
    return kvlathe::cuda::prompt_kernel_here();
  } catch (const kvlathe::Refusal&) {
    return 0;
  }
}

extern "C" int64_t kvlathe_cuda_prompt_list_bytes(int32_t tokens, int32_t batch,
                                                  int32_t group_size) {
  return 4 * (kvlathe::cuda::kListHeader +
              2 * kvlathe::cuda::prompt_tiles_most(tokens, batch, group_size));
}
