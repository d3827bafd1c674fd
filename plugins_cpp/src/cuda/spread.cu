// What every query of a packed step may read: one small kernel a step.
#include "host.h"
#include "kvlathe/cache.h"

namespace kvlathe::cuda {
namespace {

struct SpreadParams {
  const int32_t *query_starts, *lengths;
  int32_t *sequence_of, *visible;
  int32_t tokens, batch, buckets;
  uint32_t fresh;
  const int32_t* table[KVLATHE_MAX_PARTS];
  int32_t* out[KVLATHE_MAX_PARTS];
  int32_t width[KVLATHE_MAX_PARTS];
};

// The last sequence that starts at or before token t and has it; -1 past the last.
__device__ int sequence_of(const SpreadParams& p, int t) {
  if (t >= p.query_starts[p.batch]) return -1;
  int low = 0, high = p.batch - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (p.query_starts[middle] <= t) low = middle;
    else high = middle - 1;
  }
  return low;
}

// A block takes one token.
__global__ void spread_rows(const SpreadParams p) {
  const int t = blockIdx.x, b = sequence_of(p, t);
  if (threadIdx.x == 0) p.sequence_of[t] = b;
  if (threadIdx.x < p.buckets) {
    const int s = threadIdx.x, own = p.fresh >> s & 1 ? t + 1 : 0;
    p.visible[int64_t{t} * p.buckets + s] = b < 0 ? 0 : p.lengths[int64_t{b} * p.buckets + s] + (own ? own - p.query_starts[b] : 0);
  }
  for (int s = 0; s < p.buckets; ++s) {
    if (!p.out[s]) continue;
    const int32_t* row = p.table[s] + int64_t{max(b, 0)} * p.width[s];
    for (int i = threadIdx.x; i < p.width[s]; i += blockDim.x) p.out[s][int64_t{t} * p.width[s] + i] = row[i];
  }
}

void spread(const kvlathe_spread_args& a) {
  check_version(a.abi_version);
  require(a.tokens >= 0 && a.batch >= 1, KVLATHE_BAD_ARGUMENT, "tokens is negative or batch below 1");
  require(a.buckets >= 1 && a.buckets <= KVLATHE_MAX_PARTS, KVLATHE_UNSUPPORTED,
          std::to_string(a.buckets) + " buckets: 1 to " + std::to_string(KVLATHE_MAX_PARTS) + " are possible");
  require(a.query_starts && a.lengths && a.page_tables && a.page_table_widths && a.sequence_of && a.visible && a.spread_tables,
          KVLATHE_BAD_ARGUMENT, "a pointer is null");
  if (a.tokens == 0) return;
  SpreadParams p{a.query_starts, a.lengths, a.sequence_of, a.visible, a.tokens, a.batch, a.buckets, a.fresh, {}, {}, {}};
  for (int s = 0; s < a.buckets; ++s) p.table[s] = a.page_tables[s], p.out[s] = a.spread_tables[s], p.width[s] = a.page_table_widths[s];
  spread_rows<<<a.tokens, 128, 0, static_cast<cudaStream_t>(a.stream)>>>(p);
  check_cuda(cudaGetLastError(), "launching spread");
}

}  // namespace
}  // namespace kvlathe::cuda

extern "C" int32_t kvlathe_cuda_spread(const kvlathe_spread_args* args, kvlathe_status* status) {
  return kvlathe::run(status, [&] {
    if (!args) throw kvlathe::Refusal(KVLATHE_BAD_ARGUMENT, "args is null");
    kvlathe::cuda::spread(*args);
  });
}
