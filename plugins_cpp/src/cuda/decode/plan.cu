// Plans the calls of a step in one launch. A warp finds the work of one block of one call.
//
// Without it every block of every layer finds its work itself, which takes time that all of them
// have in common.
#include <algorithm>
#include <vector>

#include "cuda/decode/plan.h"
#include "cuda/host.h"

namespace kvlathe::cuda {
namespace {

constexpr int kWarps = 8, kMostCalls = 32, kMostHeads = 512;  // a launch

struct PlannedCall {
  PlanSizes sizes;
  int32_t first_head;
  PlanRecord* out;
};

struct PlanParams {
  PlannedCall call[kMostCalls];
  PlanHead head[kMostHeads];
};
static_assert(sizeof(PlanParams) <= 16 << 10);

// A call with the fields of Params that schedule.cuh reads.
struct View {
  const PartParams* part;
  const int32_t* part_weight;
  const PlanHead* head;
  int least_block_weight, spare_blocks, batch, heads;
};

// Writes the page ids at the start of a plan's first span. Whole warp.
__device__ void write_ids(const PlanSizes& p, const Span<KVLATHE_MAX_PARTS>& span,
                          PlanRecord& out) {
  int part = 0, unit = span.first, units = span.pair.units(p, 0);
  while (unit >= units) unit -= units, units = span.pair.units(p, ++part);
  const PartParams& at = p.part[part];
  const int first = unit / at.units_per_page,
            pages = (units + at.units_per_page - 1) / at.units_per_page;
  const int32_t* table = at.page_table + int64_t{span.sequence} * at.table_stride;
  for (int i = threadIdx.x % 32; i < kPlannedIds; i += 32)
    out.ids[i] = first + i < pages ? table[first + i] : 0;
  if (threadIdx.x % 32 == 0) out.header.part = part, out.header.first_page = first;
}

__global__ void __launch_bounds__(kWarps * 32) plan_calls(const __grid_constant__ PlanParams p) {
  const PlannedCall& call = p.call[blockIdx.y];
  const PlanSizes& sizes = call.sizes;
  const int block = blockIdx.x * kWarps + threadIdx.x / 32;
  if (block >= sizes.blocks) return;
  const View view{sizes.part,
                  sizes.part_weight,
                  p.head + call.first_head,
                  sizes.least_block_weight,
                  sizes.spare_blocks,
                  sizes.batch,
                  sizes.heads};
  const Plan<KVLATHE_MAX_PARTS> plan(view, block, sizes.blocks);
  PlanRecord& out = call.out[block];
  if (threadIdx.x % 32 == 0) out.header = {sizes.tag, -1, 0, plan};
  __syncwarp();
  if (plan.walk.valid) write_ids(sizes, plan.walk.span, out);
}

void plan(const kvlathe_attend_decode_args* calls, int32_t count) {
  std::vector<PlanCall> made(count);
  for (int32_t i = 0; i < count; ++i) {
    require(calls[i].plan && calls[i].batch > 0, KVLATHE_BAD_ARGUMENT,
            "call " + std::to_string(i) + " has no rows, or no memory for its plan");
    made[i] = plan_call_of(calls[i]);
  }
  PlanParams p;
  for (int32_t at = 0; at < count;) {
    int heads = 0, blocks = 0, n = 0;
    for (; at < count && n < kMostCalls && heads + made[at].sizes.heads <= kMostHeads; ++at, ++n) {
      const PlanCall& call = made[at];
      p.call[n] = {call.sizes, heads, static_cast<PlanRecord*>(calls[at].plan)};
      std::copy(call.head, call.head + call.sizes.heads, p.head + heads);
      heads += call.sizes.heads, blocks = std::max(blocks, call.sizes.blocks);
    }
    plan_calls<<<dim3((blocks + kWarps - 1) / kWarps, n), kWarps * 32, 0,
                 static_cast<cudaStream_t>(calls[0].stream)>>>(p);
  }
  check_cuda(cudaGetLastError(), "launching plan");
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
