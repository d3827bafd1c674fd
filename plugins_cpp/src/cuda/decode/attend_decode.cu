// The host of attend_decode: what is refused, which kernel a call takes, which sizes a launch has,
// and the launch. What kernels are told is in call_params.h, the kernel in attend_decode.cuh.
#include <algorithm>
#include <cstdlib>

#include "common/decode_call.h"
#include "cuda/decode/alone.cuh"
#include "cuda/decode/call_params.h"
#include "cuda/decode/kernels.h"
#include "cuda/decode/plan.h"
#include "cuda/host.h"
#include "cuda/prefill/prompts.h"

namespace kvlathe::cuda {
namespace {

struct Device {
  int id, major, sms, shared_per_sm, shared_per_block, shared_reserved;

  static Device current() {
    Device d{};
    check_cuda(cudaGetDevice(&d.id), "no CUDA device");
    const auto read = [&](int& value, cudaDeviceAttr attribute) {
      check_cuda(cudaDeviceGetAttribute(&value, attribute, d.id), "reading a device attribute");
    };
    read(d.major, cudaDevAttrComputeCapabilityMajor);
    read(d.sms, cudaDevAttrMultiProcessorCount);
    read(d.shared_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    read(d.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    read(d.shared_reserved, cudaDevAttrReservedSharedMemoryPerBlock);
    return d;
  }
  int most_blocks() const { return sms * kBlocksPerSM; }
};

// Of calls whose blocks are teams (attend_team.cuh).
int64_t team_bytes(const Device& device) {
  return device.sms * 2 * int64_t{sizeof(PartialOf<BundledTeam::kColumns, BundledTeam::kRankV>)};
}
int64_t workspace_bytes(const Device& device) {
  return int64_t{device.most_blocks()} * 2 * int64_t{sizeof(PartialOf<kMostColumns>)};
}
template <class P>
constexpr bool kFitsWorkspace = P::kBlocks * sizeof(PartialOf<P::kColumns, P::kRankV>) <=
                                kBlocksPerSM * sizeof(PartialOf<kMostColumns>);
static_assert(kFitsWorkspace<BundledWide256> && kFitsWorkspace<BundledWidest> &&
              kFitsWorkspace<BundledPlain256> && kFitsWorkspace<BundledPlainWidest>);

// Of calls whose warps attend alone: of the most warps, at the widest ranks and most query heads.
int64_t alone_bytes(const Device& device) {
  return int64_t{device.most_blocks()} * kMaxWarps * 2 *
         int64_t{sizeof(AlonePartial<kNarrowRank / 16, 1>)};
}

// An environment variable where it is a number, or `otherwise`.
int64_t number_of(const char* name, int64_t otherwise) {
  const char* given = std::getenv(name);
  if (!given) return otherwise;
  char* end = nullptr;
  const int64_t number = std::strtoll(given, &end, 10);
  return end == given || *end ? otherwise : number;
}

// From how many pairs for four SMs on warps attend alone.
int64_t alone_pairs() { return number_of("KVLATHE_ALONE_PAIRS", kAlonePairs); }
// From how many query heads of all rows an SM on blocks are teams.
int64_t team_columns() { return number_of("KVLATHE_TEAM_COLUMNS", kTeamColumns); }
bool has_teams(const Device& device) { return device.major == 9 && team_columns() >= 0; }

// KVLATHE_UNPROVEN=1: attend_bytes is taken. Its tests passed on a GPU, and an engine gained by it at
// 16 sequences of 16 K. At 64 of 4 K one run made no step, for a reason that is not known.
bool proves_bytes() {
  const char* given = std::getenv("KVLATHE_UNPROVEN");
  return given && given[0] == '1' && !given[1];
}

// Whether pairs are so many that each warp attends alone.
bool many_pairs(int64_t batch, int64_t heads, const Device& device) {
  return 4 * batch * heads >= alone_pairs() * device.sms;
}

// Whether warps of a call with codes attend alone. Of a step with prompts `batch` counts the rows of
// some chunks, too, which have no work in it.
bool is_alone(const kvlathe_attend_decode_args& a, int64_t heads, const Device& device) {
  return !a.prompts && many_pairs(a.batch, heads, device) &&
         a.workspace_bytes >= alone_bytes(device);
}

void check_cuda_limits(const kvlathe_attend_decode_args& a, const Device& device,
                       const std::vector<Head>& heads) {
  require(device.major >= 8 || (device.major == 7 && a.element == KVLATHE_F16), KVLATHE_UNSUPPORTED,
          "this device has compute capability " + std::to_string(device.major) +
              ".x: the kernels need 7.5, and 8.0 for bfloat16");
  require(a.element != KVLATHE_F32, KVLATHE_UNSUPPORTED,
          "the CUDA kernels read 16-bit elements, not F32");
  const int most_group = is_wide(a) ? kMaxWideGroup : kMaxGroup;
  require(a.group_size <= most_group, KVLATHE_UNSUPPORTED,
          "group_size " + std::to_string(a.group_size) + " is above " + std::to_string(most_group));
  for (int i = 0; i < a.part_count; ++i) {
    if (any_quantized(a.parts[i])) check_codes(a);
  }
  for (const Head& head : heads) {
    check_cuda_lane(head.rank_k, head.rank_v);
  }
}

struct Launch {
  int grid, warps, shared_bytes;
};

// One more warp brings the tiles.
Launch fit_team(BundledTeam& p, const Device& device, int static_bytes) {
  const int others = kTeamHead + kTeamWarps * p.codes_bytes;
  p.ring_bytes = (device.shared_per_block - static_bytes - others) / 512 * 512;
  return {device.sms, kTeamThreads / 32, p.ring_bytes + others};
}

// The most warps whose rings hold one and a half of the widest tiles each, or one. Quantized tiles
// take more instructions a byte, so there one tile is enough and warps come first.
// columns: query heads of an item of work at most.
template <class P>
Launch fit(P& p, const Device& device, int most_warps, int static_bytes, int columns) {
  int widest = 0, elements = 0;
  const bool one = p.codes_bytes > 0 || P::kByteRows;  // of calls with codes alone
  for (int h = 0; h < p.heads; ++h) {
    for (const LaneParams& lane : p.head[h].lane)
      widest = std::max(widest, (P::kByteRows ? 2 : 1) * ring_room(lane.tile_bytes));
    const int channels = P::kSliced ? kMergedChannels : p.head[h].rank_v;
    if (!P::kAlone) elements = std::max(elements, columns * channels);
    if (!P::kPlain) widest = std::max(widest, ring_room(most_columns(p) * p.head[h].rank_k * 2));
  }
  for (int halves = one ? 2 : 3; halves >= 2; --halves) {
    for (int blocks = P::kBlocks; blocks >= 1; --blocks) {
      // A tile of a wide call may leave no room for a second warp.
      const auto fewer = [](int warps) {
        return P::kSliced || (P::kWide && warps == 2) ? warps - 1 : warps - 2;
      };
      for (int warps = most_warps; warps >= 1 && (P::kHides || warps * 128 >= elements);
           warps = fewer(warps)) {
        p.merge_floats = (warps * elements + 31) / 32 * 32;  // where the block's warps meet
        const int room = std::min(device.shared_per_block,
                                  device.shared_per_sm / blocks - device.shared_reserved);
        const int kept = (P::kPlain ? 1 : warps) * p.codes_bytes;
        const int left = room - static_bytes - 4 * p.merge_floats - kept;
        p.ring_bytes = std::max(0, left) / warps / 512 * 512;
        if (2 * p.ring_bytes >= halves * widest)
          return {device.sms * blocks, warps, warps * p.ring_bytes + kept + 4 * p.merge_floats};
      }
    }
  }
  throw Refusal(KVLATHE_UNSUPPORTED,
                "the device's shared memory holds no tile of ranks and pages this large");
}

// What the plan of a call depends on beside lengths and page ids, and a hash of it. The kernel
// compares the hash, so that it never takes a plan of another call.
template <class P>
PlanCall planned(const P& p, int grid) {
  constexpr int kParts = P::kParts;
  PlanCall call{};
  PlanSizes<KVLATHE_MAX_PARTS>& sizes = call.sizes;
  sizes.batch = p.batch, sizes.heads = p.heads, sizes.blocks = grid,
  sizes.least_block_weight = p.least_block_weight;
  sizes.spare_blocks = p.spare_blocks;
  const int parts = std::max(kParts, KVLATHE_MAX_SLOTS);
  for (int i = 0; i < parts; ++i) {
    sizes.part[i] = p.part[std::min(i, kParts - 1)];
    if (i < kParts) sizes.part_weight[i] = p.part_weight[i];
  }
  for (int h = 0; h < p.heads; ++h) {
    for (int i = 0; i < P::kSlots; ++i)
      call.head[h].lane[i] = {p.head[h].lane[i].weight, p.head[h].lane[i].tile_units};
  }
  call.named = P::kNamed;
  if constexpr (P::kNamed) call.slots = p;
  uint32_t tag = 2166136261u;  // FNV-1a
  const auto mix = [&tag](const void* from, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i)
      tag = (tag ^ static_cast<const unsigned char*>(from)[i]) * 16777619u;
  };
  mix(&sizes.part, parts * sizeof sizes.part[0]);
  mix(&sizes.part_weight, sizeof sizes - sizeof sizes.part);
  mix(&call.head, p.heads * sizeof call.head[0]);
  mix(&call.slots, sizeof call.slots);
  if constexpr (P::kBundled) {
    call.columns = P::kColumns, call.group_size = p.group_size, call.tiles = p.tiles;
    mix(&call.columns, sizeof call.columns);
  }
  sizes.tag = tag | 1;  // never that of zeroed memory
  return call;
}

bool overlaps(const kvlathe_attend_decode_args& a, const Device& device) {
  return (a.flags & KVLATHE_OVERLAP) && device.major >= 9;
}

// The weight of the widest tile.
template <class P>
int32_t widest_tile(const P& p) {
  int32_t widest = 0;
  for (const auto& head : p.head) {
    for (const LaneParams& lane : head.lane)
      widest = std::max(widest, lane.weight * lane.tile_units);
  }
  return widest;
}

// Of a bundle.
int most_rows(const kvlathe_attend_decode_args& a) {
  return a.flags & KVLATHE_BUNDLES ? KVLATHE_MAX_BUNDLE : 1;
}

template <class P>
struct Decided {
  const void* kernel;
  P p;
  Launch at;
};

template <class P>
Decided<P> decide(const void* kernel, const P& params, const kvlathe_attend_decode_args& a,
                  const Device& device, int warps) {
  Decided<P> call{kernel, params, {}};
  cudaFuncAttributes attributes{};
  check_cuda(
      cudaFuncGetAttributes(&attributes, kernel),
      "this library has no kernel for this device (kvlathe native --cuda-architectures native)");
  int columns = most_columns(params);
  if (P::kWide) columns = std::min(columns, most_rows(a) * a.group_size);
  if constexpr (P::kTeam)
    call.at = fit_team(call.p, device, int(attributes.sharedSizeBytes));
  else
    call.at = fit(call.p, device, warps, int(attributes.sharedSizeBytes), columns);
  // The shares of a block's warps differ by less than their number, and each is at least a tile's.
  if constexpr (P::kAlone)
    call.p.least_block_weight =
        std::max(call.p.least_block_weight, call.at.warps * (widest_tile(call.p) + call.at.warps));
  if (overlaps(a, device)) call.p.spare_blocks = call.at.grid / kSpareBlocks;
  if (!a.plan) return call;
  const int64_t bytes = call.at.grid * int64_t{sizeof(PlanRecord)};
  require(a.plan_bytes >= bytes, KVLATHE_TOO_SMALL,
          "the plan's memory has " + std::to_string(a.plan_bytes) + " bytes and this call needs " +
              std::to_string(bytes));
  require(reinterpret_cast<uintptr_t>(a.plan) % 128 == 0, KVLATHE_MISALIGNED,
          "the plan is not aligned to 128 bytes");
  call.p.plan = static_cast<const PlanRecord*>(a.plan);
  call.p.plan_tag = planned(call.p, call.at.grid).sizes.tag;
  return call;
}

// P: Bundled. `heads` once for each tile of columns that the largest bundle has, which is one row
// without KVLATHE_BUNDLES.
template <class P>
Decided<P> decide_bundled(const void* kernel, const kvlathe_attend_decode_args& a,
                          const std::vector<Head>& heads, const Device& device) {
  const int rows = most_rows(a);
  const int tiles = tiles_of<P::kColumns>(a.group_size, rows);
  std::vector<Head> tiled;
  for (const Head& head : heads) tiled.insert(tiled.end(), size_t(tiles), head);
  require(tiled.size() <= KVLATHE_MAX_HEADS, KVLATHE_UNSUPPORTED,
          "bundles of " + std::to_string(rows) + " rows and " +
              std::to_string(heads.size() * size_t(a.group_size)) + " query heads");
  P p;
  if constexpr (P::kScored)
    p = general_params_of<P>(a, tiled);
  else
    p = decode_params_of<P>(a, tiled, 1);
  p.tiles = tiles;
  for (int32_t& weight : p.part_weight) weight /= tiles;
  return decide(kernel, p, a, device, P::kWide ? general_warps<P>() : kBundledWarps);
}

// Whether blocks of a wide call without codes are teams: where tiles of columns would read the same
// tokens again, and columns are so many that few blocks share a pair.
bool is_team(const kvlathe_attend_decode_args& a, int64_t heads, const Device& device) {
  return has_teams(device) && ((a.flags & KVLATHE_BUNDLES) || a.group_size > kMaxGroup) &&
         a.batch * heads * a.group_size >= team_columns() * device.sms &&
         a.workspace_bytes >= team_bytes(device);
}

// Chooses the kernel and the grid of a wide call, and gives them to `body`. Query heads beyond those of
// one tile have tiles of their own, as those of a bundle's rows. The widest have no other kernel.
template <class Body>
void decided_wide(const kvlathe_attend_decode_args& a, const std::vector<Head>& heads,
                  const Device& device, Body body) {
  const bool half = a.element == KVLATHE_F16;
  const auto above = [](const Head& head) {
    return std::max(head.rank_k, head.rank_v) > Wide256::kRank;
  };
  const bool widest = std::any_of(heads.begin(), heads.end(), above),
             codes = std::any_of(a.parts, a.parts + a.part_count,
                                 [](const kvlathe_part& part) { return any_quantized(part); });
  if (!codes && is_team(a, int64_t(heads.size()), device)) {
    body(decide_bundled<BundledTeam>(team_kernel(half), a, heads, device));
  } else if (!codes && widest) {
    body(decide_bundled<BundledPlainWidest>(plain_kernel_widest(half), a, heads, device));
  } else if (!codes) {
    body(decide_bundled<BundledPlain256>(plain_kernel_256(half), a, heads, device));
  } else if (widest) {
    body(decide_bundled<BundledWidest>(bundled_kernel_widest(half), a, heads, device));
  } else if ((a.flags & KVLATHE_BUNDLES) || a.group_size > kMaxGroup) {
    body(decide_bundled<BundledWide256>(bundled_kernel_wide(half), a, heads, device));
  } else {
    body(decide(decode_kernel_wide(half), general_params_of<Wide256>(a, heads), a, device,
                general_warps<Wide256>()));
  }
}

// Chooses the kernel and the grid of a call with bundles, and gives them to `body`. bits: of its codes.
template <class Body>
void decided_bundled(const kvlathe_attend_decode_args& a, const std::vector<Head>& heads,
                     const Device& device, bool wide, int bits, Body body) {
  const bool half = a.element == KVLATHE_F16;
  if (any_float8(a)) {
    body(decide_bundled<BundledFloat8>(bundled_kernel_float8(half), a, heads, device));
  } else if (is_general(a)) {
    body(decide_bundled<BundledGeneral>(bundled_kernel_general(half), a, heads, device));
  } else if (is_half(bits)) {
    body(decide_bundled<Bundled16>(bundled_kernel_16(half), a, heads, device));
  } else {
    body(decide_bundled<BundledCodes>(bundled_kernel_codes(half, wide, bits), a, heads, device));
  }
}

// Chooses the kernel and the grid of a call, and gives them to `body`.
template <class Body>
void decided(const kvlathe_attend_decode_args& a, const std::vector<Head>& heads,
             const Device& device, Body body) {
  const bool half = a.element == KVLATHE_F16;
  const auto general = [&](const void* kernel, auto kind) {
    body(decide(kernel, general_params_of<decltype(kind)>(a, heads), a, device, kGeneralWarps));
  };
  if (is_wide(a)) return decided_wide(a, heads, device, body);
  bool wide = false;
  for (const Head& head : heads) wide |= std::max(head.rank_k, head.rank_v) > 96;
  const int bits = bits_of_codes(a);
  if (a.flags & KVLATHE_BUNDLES) return decided_bundled(a, heads, device, wide, bits, body);
  const auto bytes = [&](const void* kernel, auto kind) {
    using P = decltype(kind);
    body(decide(kernel, decode_params_of<P>(a, heads, 1), a, device, kByteWarps));
  };
  if (proves_bytes() && is_of_bytes(a, heads, false)) {
    if (any_float8(a)) return bytes(decode_kernel_bytes(half, true), ByteParams<Coding::kFloat8>{});
    return bytes(decode_kernel_bytes(half, false), ByteParams<Coding::kAffine>{});
  }
  if (proves_bytes() && is_of_bytes(a, heads, true))
    return bytes(decode_kernel_key_pages(half), KeyPageParams{});
  if (any_float8(a)) return general(decode_kernel_float8(half), Float8Params{});
  if (is_scored(a)) return general(decode_kernel_scored(half), ScoredParams{});
  if (names_parts(a.part_count))
    return general(decode_kernel_general(half, true), GeneralParams<KVLATHE_MAX_PARTS>{});
  if (is_general(a))
    return general(decode_kernel_general(half, false), GeneralParams<KVLATHE_MAX_SLOTS>{});
  const int fill = is_quantized(bits) && a.group_size <= 4 ? 2 : 1;
  const auto as = [&](const void* kernel, auto kind) {
    body(decide(kernel, decode_params_of<decltype(kind)>(a, heads, fill), a, device,
                decltype(kind)::kAlone ? kMaxWarps : most_warps(bits, fill)));
  };
  const auto with = [&](const void* kernel, auto parts) {
    as(kernel, Params<decltype(parts)::value>{});
  };
  using std::integral_constant;
  if (is_half(bits)) {
    const void* kernel = decode_kernel_16(half, wide, a.part_count);
    if (a.part_count == 1) with(kernel, integral_constant<int, 1>{});
    if (a.part_count == 2) with(kernel, integral_constant<int, 2>{});
    if (a.part_count == 3) with(kernel, integral_constant<int, 3>{});
  } else if (bits != kSeveralWidths && a.part_count <= 2 &&
             is_alone(a, int64_t(heads.size()), device)) {
    as(decode_kernel_alone(half, wide, bits, fill), AloneParams{});
  } else if (bits != kSeveralWidths && a.part_count <= 2) {
    with(decode_kernel_codes(half, wide, bits, fill), integral_constant<int, 2>{});
  } else {
    with(decode_kernel_any(half, wide, fill), integral_constant<int, 3>{});
  }
}

template <class P>
void launch(Decided<P> call, const kvlathe_attend_decode_args& a, bool overlap) {
  const Launch& at = call.at;
  call.p.partials = static_cast<Partial*>(a.workspace);
  call.p.early = overlap && (a.flags & KVLATHE_APPENDED) && !P::kBundled;
  check_cuda(cudaFuncSetAttribute(call.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  at.shared_bytes),
             "reserving shared memory");
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = at.grid;
  config.blockDim = at.warps * 32;
  config.dynamicSmemBytes = at.shared_bytes;
  config.stream = static_cast<cudaStream_t>(a.stream);
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  void* arguments[] = {&call.p};
  check_cuda(cudaLaunchKernelExC(&config, call.kernel, arguments), "launching attend_decode");
}

void attend_rows(const kvlathe_attend_decode_args& a) {
  const std::vector<Head> heads = checked_heads(a);
  const Device device = Device::current();
  check_cuda_limits(a, device, heads);
  if (a.batch == 0)
    return decided(a, heads, device, [](const auto&) {});  // refuses what would not fit
  require(a.workspace && a.workspace_bytes >= workspace_bytes(device), KVLATHE_TOO_SMALL,
          "the workspace has " + std::to_string(a.workspace_bytes) + " bytes and this call needs " +
              std::to_string(workspace_bytes(device)));
  require(reinterpret_cast<uintptr_t>(a.workspace) % 128 == 0 &&
              reinterpret_cast<uintptr_t>(a.pool) % 128 == 0,
          KVLATHE_MISALIGNED, "the workspace or the pool is not aligned to 128 bytes");
  decided(a, heads, device, [&](const auto& call) { launch(call, a, overlaps(a, device)); });
}

}  // namespace

kvlathe_attend_decode_args single_rows(kvlathe_attend_decode_args a) {
  if (a.prompts) a.batch = a.prompts->rows;
  return a;
}

PlanCall plan_call_of(const kvlathe_attend_decode_args& args) {
  PlanCall plan{};
  const kvlathe_attend_decode_args a = single_rows(args);
  const std::vector<Head> heads = checked_lanes(a);
  const Device device = Device::current();
  check_cuda_limits(a, device, heads);
  decided(a, heads, device, [&](const auto& call) { plan = planned(call.p, call.at.grid); });
  return plan;
}

int most_blocks() { return Device::current().most_blocks(); }

}  // namespace kvlathe::cuda

extern "C" int32_t kvlathe_has_cuda(void) { return 1; }

extern "C" int32_t kvlathe_cuda_attend_decode(const kvlathe_attend_decode_args* args,
                                              kvlathe_status* status) {
  return kvlathe::run(status, [&] {
    if (!args) throw kvlathe::Refusal(KVLATHE_BAD_ARGUMENT, "args is null");
    if (!args->prompts || !kvlathe::cuda::prompt_kernel_here())
      return kvlathe::cuda::attend_rows(*args);
    const auto chunks =
        kvlathe::cuda::prompt_launch_of(*args);  // what it refuses, it refuses before anything runs
    // Rows first: it writes zeros where a row has no length, which may be a chunk's row.
    const auto rows = kvlathe::cuda::single_rows(*args);
    if (rows.batch) kvlathe::cuda::attend_rows(rows);
    kvlathe::cuda::copy_pages(chunks, args->stream);
    kvlathe::cuda::attend_prompts(chunks, args->stream);
  });
}

extern "C" int32_t kvlathe_cuda_workspace_bytes(int32_t batch, int32_t heads, int64_t* bytes,
                                                kvlathe_status* status) {
  return kvlathe::run(status, [&] {
    if (!bytes || batch < 0 || heads < 1)
      throw kvlathe::Refusal(KVLATHE_BAD_ARGUMENT,
                             "batch or heads is not positive, or bytes is null");
    const auto device = kvlathe::cuda::Device::current();
    if (kvlathe::cuda::has_teams(device)) {
      *bytes = std::max(kvlathe::cuda::team_bytes(device), kvlathe::cuda::alone_bytes(device));
      return;
    }
    *bytes =
        batch && kvlathe::cuda::many_pairs(batch, heads, device)
            ? std::max(kvlathe::cuda::workspace_bytes(device), kvlathe::cuda::alone_bytes(device))
            : kvlathe::cuda::workspace_bytes(device);
  });
}
