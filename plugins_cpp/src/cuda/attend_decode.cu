// Decode attention over the paged cache: a persistent grid on the byte-interval schedule (schedule.cuh).
//
// Each warp keeps its own ring of tiles in flight and its own softmax state; a block's warps take the tiles of a span
// in turn and meet only where the span ends. A pair that several blocks share is finished by the block that arrives
// last.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "../check.h"
#include "finish.cuh"
#include "producer.cuh"

namespace kvlathe::cuda {
namespace {

// Touches what the block will need soon, so that address translations are there by then: a sequence that is likely its
// own.
template <int kParts>
__device__ void warm_up(const Params<kParts>& p) {
  const int sequence = int(unsigned(blockIdx.x) * unsigned(p.batch) / gridDim.x);
  if (threadIdx.x == 32) prefetch(p.arrivals + sequence * p.heads);
  if (threadIdx.x == 64) prefetch(p.partials + 2 * blockIdx.x);
  if (threadIdx.x == 96) prefetch(p.q + sequence * p.q_stride);
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    if (threadIdx.x == 127) prefetch(p.part[i].page_table + int64_t{sequence} * p.part[i].table_stride);
  }
}

template <class E, int kParts, int kSteps>
__global__ void __launch_bounds__(kMaxWarps * 32, kBlocksPerSM)
    attend_decode(const __grid_constant__ Params<kParts> p) {
  extern __shared__ __align__(128) char rings[];  // [warps] rings | merge buffer
  __shared__ Merge merge;
  warm_up(p);
  const Plan<kParts> plan(p);

  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  auto* buffer = reinterpret_cast<float*>(rings + warps * p.ring_bytes);
  const bool fine = plan.share < kFineShare;
  Ring ring{uint32_t(pinned(shared_address(rings) + warp * p.ring_bytes)), pinned(p.ring_bytes)};
  SpanWalk<kParts> walk(p, plan);
  Producer<kParts> producer(p, walk, ring, fine);
  wait_for_previous_kernel();
  if (plan.some_empty) write_empty<E>(p);
  if (!plan.any) return;
  Lane16<kSteps> lane16;
  if (walk.valid) lane16.set(p, p.head[walk.span.head], walk.span.sequence);
  producer.fill();
  if (threadIdx.x < 2) merge.unfinished[threadIdx.x].there = false;
  __syncthreads();
  SoftmaxState<kSteps> state;
  while (walk.valid) {
    const Span<kParts> span = walk.span;
    state.clear();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const Run run(span, part);
      const LaneParams& lane = p.head[span.head].lane[part];
      const int units = pinned(fine ? 1 : lane.tile_units), bytes = pinned(lane.unit_bytes() * units),
                tile_tokens = units * kUnitTokens;
      int rows = span.pair.tokens[part] - (run.first + warp * units) * kUnitTokens;
      for (int unit = run.first + warp * units; unit < run.last; unit += warps * units, rows -= warps * tile_tokens) {
        producer.fill();
        const uint32_t tile = ring.wait_oldest(bytes);
        attend_tile<E>(state, lane16, tile, units, min(tile_tokens, rows), p.scale_log2);
        ring.release_oldest(bytes);
      }
    }
    producer.fill();
    walk.next();  // the next span's queries come while this one is finished
    if (walk.valid) lane16.set(p, p.head[walk.span.head], walk.span.sequence);
    finish<E>(p, plan, span, state, buffer, merge);
  }
  finish_shared_pairs<E>(p, plan, buffer, merge);
}

// -- host -------------------------------------------------------------------------------------------------------------

void require(bool ok, kvlathe_code code, const std::string& message) {
  if (!ok) throw Refusal(code, message);
}

void check_cuda(cudaError_t error, const char* what) {
  require(error == cudaSuccess, KVLATHE_DEVICE_ERROR, std::string(what) + ": " + cudaGetErrorString(error));
}

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

struct Workspace {
  int64_t arrivals, partials;
  int64_t bytes() const { return arrivals + partials; }
};

Workspace workspace_of(const Device& device, int64_t batch, int64_t heads) {
  return {(batch * heads * int64_t{sizeof(int32_t)} + 127) / 128 * 128,
          int64_t{device.most_blocks()} * 2 * int64_t{sizeof(Partial)}};
}

void check_cuda_limits(const kvlathe_attend_decode_args& a, const Device& device, const std::vector<Head>& heads) {
  require(device.major >= 8 || (device.major == 7 && a.element == KVLATHE_F16), KVLATHE_UNSUPPORTED,
          "this device has compute capability " + std::to_string(device.major) +
              ".x: the kernels need 7.5, and 8.0 for bfloat16");
  require(a.element != KVLATHE_F32, KVLATHE_UNSUPPORTED, "the CUDA kernels read 16-bit elements, not F32");
  require(a.group_size <= kMaxGroup, KVLATHE_UNSUPPORTED, "group_size " + std::to_string(a.group_size) + " is above 8");
  for (int i = 0; i < a.part_count; ++i) {
    require(a.parts[i].bits_k == 16 && a.parts[i].bits_v == 16, KVLATHE_UNSUPPORTED,
            "this build's CUDA kernels read 16-bit parts only");
  }
  for (const Head& head : heads) {
    require(head.rank_k <= kMaxRank && head.rank_v <= kMaxRank, KVLATHE_UNSUPPORTED, "a rank is above 128");
  }
}

template <int kParts>
Params<kParts> params_of(const kvlathe_attend_decode_args& a, const std::vector<Head>& heads) {
  Params<kParts> p{};
  p.pool = static_cast<const char*>(a.pool);
  p.q = static_cast<const uint16_t*>(a.q);
  p.o = static_cast<uint16_t*>(a.o);
  p.q_stride = a.q_stride;
  p.o_stride = a.o_stride;
  p.scale_log2 = a.scale * 1.4426950408889634f;
  p.batch = a.batch;
  p.heads = int32_t(heads.size());
  p.group_size = a.group_size;
  p.page_tokens = a.page_tokens;
  p.units_per_page = a.page_tokens / kUnitTokens;
  p.units_per_page_magic = int32_t((uint64_t{1} << 32) / uint64_t(p.units_per_page) + 1);
  p.least_block_weight = kLeastBlockWeight;
  for (int i = 0; i < kParts; ++i) {
    const kvlathe_part& part = a.parts[i];
    p.part[i] = {part.page_table, part.lengths, part.page_stride, part.lengths_stride, part.page_table_stride};
  }
  for (size_t h = 0; h < heads.size(); ++h) {
    const Head& head = heads[h];
    p.head[h] = {int32_t(head.q_offset), int32_t(head.o_offset), uint16_t(head.rank_k), uint16_t(head.rank_v), {}};
    for (int i = 0; i < kParts; ++i) {
      if (!head.lane[i]) continue;
      const LaneRow& row = *head.lane[i];
      const int32_t bytes = kUnitTokens * 2 * (row.rank_k + row.rank_v), weight = bytes / kWeight;
      int32_t units = 1;
      const int32_t copies = std::max(row.rank_k, row.rank_v) / 16;
      while (2 * units * bytes <= kTileBytes && 2 * units * copies <= kMostCopies &&
             p.units_per_page % (2 * units) == 0)
        units *= 2;
      p.head[h].lane[i] = {row.k, row.v, uint16_t(weight), uint16_t(units)};
      p.part_weight[i] += weight;
      p.least_block_weight = std::max(p.least_block_weight, weight * units);
    }
  }
  return p;
}

struct Launch {
  int grid, warps, shared_bytes;
};

// As many warps as leave each a ring of one and a half of the widest tiles, or of one.
template <int kParts>
Launch fit(Params<kParts>& p, const Device& device) {
  int widest = 0, elements = 0;
  for (int h = 0; h < p.heads; ++h) {
    for (const LaneParams& lane : p.head[h].lane) widest = std::max(widest, lane.unit_bytes() * lane.tile_units);
    elements = std::max(elements, p.group_size * p.head[h].rank_v);
  }
  for (const int halves : {3, 2}) {
    for (int blocks = kBlocksPerSM; blocks >= 1; --blocks) {
      for (int warps = kMaxWarps; warps >= 4 && warps * 128 >= elements; warps /= 2) {
        const int grid = device.sms * blocks;
        p.merge_floats =
            (std::max(warps * elements, 2 * grid * p.group_size + 4 + std::max(128 * warps, elements)) + 31) / 32 * 32;
        const int room =
            std::min(device.shared_per_block, device.shared_per_sm / blocks - device.shared_reserved) - 1024;
        const int left = room - 4 * p.merge_floats;
        p.ring_bytes = std::max(0, left) / warps / 512 * 512;
        if (2 * p.ring_bytes >= halves * widest) return {grid, warps, warps * p.ring_bytes + 4 * p.merge_floats};
      }
    }
  }
  throw Refusal(KVLATHE_UNSUPPORTED, "the device's shared memory holds no tile of ranks this wide");
}

template <class E, int kParts, int kSteps>
void launch(const kvlathe_attend_decode_args& a, const std::vector<Head>& heads, const Device& device,
            const Workspace& space) {
  Params<kParts> p = params_of<kParts>(a, heads);
  p.arrivals = static_cast<int32_t*>(a.workspace);
  p.partials = reinterpret_cast<Partial*>(static_cast<char*>(a.workspace) + space.arrivals);
  const Launch at = fit(p, device);
  const auto kernel = attend_decode<E, kParts, kSteps>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, at.shared_bytes),
             "reserving shared memory");
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = at.grid;
  config.blockDim = at.warps * 32;
  config.dynamicSmemBytes = at.shared_bytes;
  config.stream = static_cast<cudaStream_t>(a.stream);
  config.attrs = &overlap;
  config.numAttrs = (a.flags & KVLATHE_OVERLAP) && device.major >= 9 ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, p), "launching attend_decode");
}

// The kernel is compiled for two widths of its registers: ranks to 96 and to 128.
template <class E>
void launch(const kvlathe_attend_decode_args& a, const std::vector<Head>& heads, const Device& device,
            const Workspace& space, int widest) {
  using Launcher =
      void (*)(const kvlathe_attend_decode_args&, const std::vector<Head>&, const Device&, const Workspace&);
  static constexpr Launcher launchers[KVLATHE_MAX_PARTS][2] = {
      {launch<E, 1, 6>, launch<E, 1, 8>}, {launch<E, 2, 6>, launch<E, 2, 8>}, {launch<E, 3, 6>, launch<E, 3, 8>}};
  launchers[a.part_count - 1][widest > 96](a, heads, device, space);
}

void attend_decode(const kvlathe_attend_decode_args& a) {
  const std::vector<Head> heads = checked_heads(a);
  const Device device = Device::current();
  check_cuda_limits(a, device, heads);
  if (a.batch == 0) return;
  const Workspace space = workspace_of(device, a.batch, int64_t(heads.size()));
  require(a.workspace && a.workspace_bytes >= space.bytes(), KVLATHE_TOO_SMALL,
          "the workspace has " + std::to_string(a.workspace_bytes) + " bytes and this call needs " +
              std::to_string(space.bytes()));
  require(reinterpret_cast<uintptr_t>(a.workspace) % 128 == 0 && reinterpret_cast<uintptr_t>(a.pool) % 128 == 0,
          KVLATHE_MISALIGNED, "the workspace or the pool is not aligned to 128 bytes");
  int32_t widest = 0;
  for (const Head& head : heads) widest = std::max({widest, head.rank_k, head.rank_v});
  if (a.element == KVLATHE_F16) {
    launch<Half>(a, heads, device, space, widest);
  } else {
    launch<Bfloat>(a, heads, device, space, widest);
  }
}

}  // namespace
}  // namespace kvlathe::cuda

extern "C" int32_t kvlathe_has_cuda(void) { return 1; }

extern "C" int32_t kvlathe_cuda_attend_decode(const kvlathe_attend_decode_args* args, kvlathe_status* status) {
  return kvlathe::run(status, [&] {
    if (!args) throw kvlathe::Refusal(KVLATHE_BAD_ARGUMENT, "args is null");
    kvlathe::cuda::attend_decode(*args);
  });
}

extern "C" int32_t kvlathe_cuda_workspace_bytes(int32_t batch, int32_t heads, int64_t* bytes, kvlathe_status* status) {
  return kvlathe::run(status, [&] {
    if (!bytes || batch < 0 || heads < 1)
      throw kvlathe::Refusal(KVLATHE_BAD_ARGUMENT, "batch or heads is not positive, or bytes is null");
    *bytes = kvlathe::cuda::workspace_of(kvlathe::cuda::Device::current(), batch, heads).bytes();
  });
}
