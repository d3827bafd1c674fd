// The host's side of attend_prompt.cuh: what a call's prompt chunks need, and the launch.
#include "attend_prompt.cuh"

#include <algorithm>

#include "host.h"
#include "kvlathe/cache.h"

namespace kvlathe::cuda {
namespace {

int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  check_cuda(cudaGetDevice(&device), "no CUDA device");
  check_cuda(cudaDeviceGetAttribute(&value, which, device), "reading a device attribute");
  return value;
}

void check_prompts(const kvlathe_attend_decode_args& a, const std::vector<Head>& heads) {
  const kvlathe_prompts& prompts = *a.prompts;
  check_element(a.element);
  for (const Head& head : heads) {
    require(head.rank_k <= kMaxRank && head.rank_v <= kMaxRank, KVLATHE_UNSUPPORTED, "a rank is above 128");
  }
  require(prompts.list && prompts.query_starts && prompts.parts && prompts.batch >= 1, KVLATHE_BAD_ARGUMENT,
          "the prompts have no list, query_starts or parts");
  for (int i = 0; i < a.part_count; ++i) {
    require(prompts.parts[i].page_table && prompts.parts[i].lengths, KVLATHE_BAD_ARGUMENT,
            "a part of the prompts has no page table or no lengths");
  }
}

PromptParams params_of(const kvlathe_attend_decode_args& a, std::vector<Head> heads) {
  const kvlathe_prompts& prompts = *a.prompts;
  PromptParams p{};
  p.pool = static_cast<const char*>(a.pool), p.q = static_cast<const uint16_t*>(a.q), p.o = static_cast<uint16_t*>(a.o);
  p.q_stride = a.q_stride, p.o_stride = a.o_stride;
  p.list = prompts.list, p.query_starts = prompts.query_starts;
  p.scale_log2 = a.scale * 1.4426950408889634f;
  p.heads = int32_t(heads.size()), p.group_size = a.group_size, p.page_tokens = a.page_tokens, p.parts = a.part_count;
  for (int i = 0; i < a.part_count; ++i) {
    const kvlathe_prompt_part& part = prompts.parts[i];
    p.part[i] = {part.page_table,     part.lengths,           a.parts[i].page_stride,
                 part.lengths_stride, part.page_table_stride, part.fresh};
  }
  std::stable_sort(heads.begin(), heads.end(),
                   [](const Head& x, const Head& y) { return x.rank_k + x.rank_v > y.rank_k + y.rank_v; });
  int rank_k = 0;
  for (size_t h = 0; h < heads.size(); ++h) {
    PromptHead& head = p.head[h];
    head.q_offset = int32_t(heads[h].q_offset), head.o_offset = int32_t(heads[h].o_offset);
    head.steps_k = uint8_t(heads[h].rank_k / 16), head.steps_v = uint8_t(heads[h].rank_v / 16);
    rank_k = std::max(rank_k, heads[h].rank_k);
    for (int i = 0; i < a.part_count; ++i) {
      const LaneRow* row = heads[h].lane[i];
      if (!row || a.parts[i].bits_k < 16 || a.parts[i].bits_v < 16) continue;  // listed chunks have no tokens there
      head.k[i] = row->k, head.v[i] = row->v, head.parts |= uint8_t(1 << i);
    }
  }
  p.query_bytes = kPromptRows * 2 * rank_k;
  return p;
}

const void* kernel_of(int32_t element) {
  return element == KVLATHE_F16 ? reinterpret_cast<const void*>(attend_prompt<Half>)
                                : reinterpret_cast<const void*>(attend_prompt<Bfloat>);
}

}  // namespace

bool prompt_kernel_here() {
  cudaFuncAttributes attributes{};
  return attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
         cudaFuncGetAttributes(&attributes, kernel_of(KVLATHE_F16)) == cudaSuccess && attributes.sharedSizeBytes > 0;
}

void attend_prompts(const kvlathe_attend_decode_args& a) {
  const std::vector<Head> heads = checked_heads(a);
  check_prompts(a, heads);
  if (a.batch == 0) return;
  PromptParams p = params_of(a, heads);
  const void* kernel = kernel_of(a.element);
  cudaFuncAttributes attributes{};
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), "this library has no kernel for this device");
  const int room = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - int(attributes.sharedSizeBytes) - 2 * p.query_bytes;
  p.stage_units = room / kStageUnit;
  const int bytes = 2 * p.query_bytes + p.stage_units * kStageUnit;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "reserving shared memory");
  const int64_t most = prompt_tiles_most(a.batch, a.prompts->batch, a.group_size) * p.heads;
  const int grid = int(std::min<int64_t>(most, attribute(cudaDevAttrMultiProcessorCount)));
  void* arguments[] = {&p};
  check_cuda(cudaLaunchKernel(kernel, dim3(grid), dim3(kPromptThreads), arguments, bytes, static_cast<cudaStream_t>(a.stream)),
             "launching attend_prompt");
}

}  // namespace kvlathe::cuda

extern "C" int32_t kvlathe_cuda_has_prompt_kernel(void) {
  try {
    return kvlathe::cuda::prompt_kernel_here();
  } catch (const kvlathe::Refusal&) {
    return 0;
  }
}

extern "C" int64_t kvlathe_cuda_prompt_list_bytes(int32_t tokens, int32_t batch, int32_t group_size) {
  return 4 * (kvlathe::cuda::kListHeader + 2 * kvlathe::cuda::prompt_tiles_most(tokens, batch, group_size));
}
