// Plans the calls of a step in one launch. A warp finds the work of one block of one call.
//
// Without it every block of every layer finds its work itself, which takes time that all of them
// have in common.
#include <algorithm>
#include <utility>
#include <vector>

#include "cuda/decode/kernels.h"
#include "cuda/decode/plan.h"
#include "cuda/host.h"

namespace kvlathe::cuda {
namespace {

constexpr int kWarps = 8, kMostHeads = 512;  // a launch

template <int kParts>
struct PlannedCall : SlotTable<(kParts > KVLATHE_MAX_SLOTS)> {
  PlanSizes<kParts> sizes;
  int32_t first_head;
  PlanRecord* out;
};

// What calls with bundles have beside that. Calls of one launch have one of each.
template <int kColumns_>
struct BundleSizes {
  static constexpr int kColumns = kColumns_;
  int32_t group_size, tiles;
};
template <>
struct BundleSizes<0> {};

// kParts: KVLATHE_MAX_SLOTS, or KVLATHE_MAX_PARTS where lanes name their parts. kColumns: of a tile of
// calls with bundles; 0 without.
template <int kParts, int kColumns>
struct PlanParams : BundleSizes<kColumns> {
  static constexpr int kMostCalls = kParts > KVLATHE_MAX_SLOTS ? 8 : 32;
  PlannedCall<kParts> call[kMostCalls];
  PlanHead head[kMostHeads];
};
static_assert(sizeof(PlanParams<KVLATHE_MAX_PARTS, 1>) <= 32764,
              "a kernel takes no more parameters");

// A call with the fields of Params that schedule.cuh reads.
template <int kParts, int kColumns>
struct View : BundleSizes<kColumns> {
  static constexpr bool kNamed = kParts > KVLATHE_MAX_SLOTS, kBundled = kColumns > 0;
  const SlotTable<kNamed>& slots;
  const PartParams* part;
  const int32_t* part_weight;
  const PlanHead* head;
  int least_block_weight, spare_blocks, batch, heads, parts;

  __device__ const PartParams& part_of(int head, int slot) const {
    return part[slots.part_in(head, slot)];
  }
};

// Writes the page ids at the start of a plan's first span. Whole warp.
template <class V>
__device__ void write_ids(const V& p, const Span<KVLATHE_MAX_SLOTS>& span, PlanRecord& out) {
  int slot = 0, unit = span.first, units = span.pair.units(p, span.head, 0);
  while (unit >= units) unit -= units, units = span.pair.units(p, span.head, ++slot);
  const PartParams& at = p.part_of(span.head, slot);
  const int first = unit / at.units_per_page,
            pages = (units + at.units_per_page - 1) / at.units_per_page;
  const int32_t* table = at.page_table + int64_t{span.sequence} * at.table_stride;
  for (int i = threadIdx.x % 32; i < kPlannedIds; i += 32)
    out.ids[i] = first + i < pages ? table[first + i] : 0;
  if (threadIdx.x % 32 == 0) out.header.slot = slot, out.header.first_page = first;
}

template <int kParts, int kColumns>
__global__ void __launch_bounds__(kWarps * 32)
    plan_calls(const __grid_constant__ PlanParams<kParts, kColumns> p) {
  const PlannedCall<kParts>& call = p.call[blockIdx.y];
  const PlanSizes<kParts>& sizes = call.sizes;
  const int block = blockIdx.x * kWarps + threadIdx.x / 32;
  if (block >= sizes.blocks) return;
  using Own = View<kParts, kColumns>;
  Own view{p,
           call,
           sizes.part,
           sizes.part_weight,
           p.head + call.first_head,
           sizes.least_block_weight,
           sizes.spare_blocks,
           sizes.batch,
           sizes.heads,
           kParts};
  if constexpr (Own::kNamed) view.parts = call.parts;
  const Plan<KVLATHE_MAX_SLOTS> plan(view, block, sizes.blocks);
  PlanRecord& out = call.out[block];
  if (threadIdx.x % 32 == 0) out.header = {sizes.tag, -1, 0, plan};
  __syncwarp();
  if (plan.walk.valid) write_ids(view, plan.walk.span, out);
}

// A call that is planned, and where to.
struct Job {
  PlanCall call;
  PlanRecord* out;
};

template <int kParts>
PlannedCall<kParts> planned_of(const Job& job, int first_head) {
  PlannedCall<kParts> planned{};
  if constexpr (kParts > KVLATHE_MAX_SLOTS) static_cast<SlotTable<true>&>(planned) = job.call.slots;
  const auto& from = job.call.sizes;
  auto& to = planned.sizes;
  std::copy(from.part, from.part + kParts, to.part);
  std::copy(from.part_weight, from.part_weight + kParts, to.part_weight);
  to.least_block_weight = from.least_block_weight, to.spare_blocks = from.spare_blocks;
  to.batch = from.batch, to.heads = from.heads, to.blocks = from.blocks, to.tag = from.tag;
  planned.first_head = first_head, planned.out = job.out;
  return planned;
}

// As many launches as the jobs take.
template <int kParts, int kColumns = 0>
void launch(std::vector<Job>& jobs, cudaStream_t stream) {
  PlanParams<kParts, kColumns> p;
  const auto kind = [](const Job& job) { return std::pair(job.call.group_size, job.call.tiles); };
  // Layers of a model may have unlike heads.
  std::stable_sort(jobs.begin(), jobs.end(),
                   [&](const Job& a, const Job& b) { return kind(a) < kind(b); });
  for (size_t at = 0; at < jobs.size();) {
    const auto own = kind(jobs[at]);
    if constexpr (kColumns > 0) p.group_size = own.first, p.tiles = own.second;
    int heads = 0, blocks = 0, n = 0;
    for (; at < jobs.size() && n < p.kMostCalls; ++at, ++n) {
      const PlanCall& call = jobs[at].call;
      if (heads + call.sizes.heads > kMostHeads || kind(jobs[at]) != own) break;
      p.call[n] = planned_of<kParts>(jobs[at], heads);
      std::copy(call.head, call.head + call.sizes.heads, p.head + heads);
      heads += call.sizes.heads, blocks = std::max(blocks, call.sizes.blocks);
    }
    const dim3 grid((blocks + kWarps - 1) / kWarps, n);
    void* arguments[] = {&p};
    check_cuda(cudaLaunchKernel(plan_calls<kParts, kColumns>, grid, dim3(kWarps * 32), arguments, 0,
                                stream),
               "launching plan");
  }
}

void plan(const kvlathe_attend_decode_args* calls, int32_t count) {
  std::vector<Job> few, named, bundled, bundled_codes, bundled_named, teams;
  for (int32_t i = 0; i < count; ++i) {
    require(calls[i].plan && calls[i].batch > 0, KVLATHE_BAD_ARGUMENT,
            "call " + std::to_string(i) + " has no rows, or no memory for its plan");
    const Job job{plan_call_of(calls[i]), static_cast<PlanRecord*>(calls[i].plan)};
    const bool coded = job.call.columns == BundledCodes::kColumns;
    if (job.call.columns == BundledTeam::kColumns)
      teams.push_back(job);
    else if (job.call.columns)
      (job.call.named ? bundled_named : coded ? bundled_codes : bundled).push_back(job);
    else
      (job.call.named ? named : few).push_back(job);
  }
  if (!count) return;
  const auto stream = static_cast<cudaStream_t>(calls[0].stream);
  launch<KVLATHE_MAX_SLOTS>(few, stream);
  launch<KVLATHE_MAX_PARTS>(named, stream);
  launch<KVLATHE_MAX_SLOTS, Bundled16::kColumns>(bundled, stream);
  launch<KVLATHE_MAX_SLOTS, BundledCodes::kColumns>(bundled_codes, stream);
  launch<KVLATHE_MAX_PARTS, BundledGeneral::kColumns>(bundled_named, stream);
  launch<KVLATHE_MAX_PARTS, BundledTeam::kColumns>(teams, stream);
}

}  // namespace
}  // namespace kvlathe::cuda

extern "C" int32_t kvlathe_cuda_plan(const kvlathe_attend_decode_args* calls, int32_t count,
                                     kvlathe_status* status) {
  return kvlathe::run(status, [&] {
    if (count < 0 || (count && !calls))
      throw kvlathe::Refusal(KVLATHE_BAD_ARGUMENT, "calls is null, or count negative");
    kvlathe::cuda::plan(calls, count);
  });
}

extern "C" int32_t kvlathe_cuda_plan_bytes(int64_t* bytes, kvlathe_status* status) {
  return kvlathe::run(status, [&] {
    if (!bytes) throw kvlathe::Refusal(KVLATHE_BAD_ARGUMENT, "bytes is null");
    *bytes = int64_t{kvlathe::cuda::most_blocks()} * int64_t{sizeof(kvlathe::cuda::PlanRecord)};
  });
}
