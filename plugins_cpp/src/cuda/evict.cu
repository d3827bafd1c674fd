// Compaction of a sequence's lanes: the kept tokens move to the front, in place.
//
// A block takes one field (codes or metadata of K or V) of one lane. Kept places ascend, so a chunk that is read whole
// before it is written never overwrites what a later chunk reads.
#include <algorithm>

#include "kvlathe/cache.h"
#include "pages.h"

namespace kvlathe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLanesAtOnce = 64;
constexpr int kMost = 8;  // words that a thread holds of a chunk

// What each token has contiguously, in 4-byte words: field f of a lane starts at byte `at` of a page.
struct Field {
  int32_t at, words;
};

struct EvictParams {
  char* pool;
  const int32_t* pages;
  const int64_t* keep;  // of the first lane of the launch
  int64_t page_stride;
  int32_t page_tokens, kept;
  Field field[kLanesAtOnce][4];
};

__device__ uint32_t* word_of(const EvictParams& p, const Field& field, int64_t place, int word) {
  char* page = p.pool + p.pages[place / p.page_tokens] * p.page_stride + field.at;
  return reinterpret_cast<uint32_t*>(page) + place % p.page_tokens * field.words + word;
}

__global__ void __launch_bounds__(kThreads) evict_lanes(const __grid_constant__ EvictParams p) {
  const Field& field = p.field[blockIdx.x][blockIdx.y];
  if (!field.words) return;
  const int64_t* keep = p.keep + int64_t{blockIdx.x} * p.kept;
  const int64_t total = int64_t{p.kept} * field.words;
  for (int64_t first = 0; first < total; first += kThreads * kMost) {
    uint32_t held[kMost];
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int64_t at = first + i * kThreads + threadIdx.x;
      if (at < total) held[i] = *word_of(p, field, keep[at / field.words], int(at % field.words));
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int64_t at = first + i * kThreads + threadIdx.x;
      if (at < total) *word_of(p, field, at / field.words, int(at % field.words)) = held[i];
    }
    __syncthreads();
  }
}

// -- host -------------------------------------------------------------------------------------------------------------

void check(const kvlathe_cuda_evict_args& a) {
  check_version(a.abi_version);
  check_element(a.element);
  require(a.part && a.kept >= 0 && (a.kept == 0 || (a.pages && a.keep)), KVLATHE_BAD_ARGUMENT,
          "part, pages or keep is null");
  check_pages(*a.part, a.page_tokens, a.pool, a.pool_bytes);
  const bool along_tokens = (a.part->bits_k < 16 && a.part->axis_k == KVLATHE_AXIS_TOKEN) ||
                            (a.part->bits_v < 16 && a.part->axis_v == KVLATHE_AXIS_TOKEN);
  require(!along_tokens, KVLATHE_UNSUPPORTED, "tokens cannot be dropped: quantization groups run along them");
}

void set_fields(Field (&field)[4], const kvlathe_part& part, const LaneRow& row, int32_t page_tokens) {
  field[0] = {row.k, row.rank_k * part.bits_k / 32};
  field[1] = {row.v, row.rank_v * part.bits_v / 32};
  field[2] = {row.k_meta, part.bits_k < 16 ? row.groups_k / page_tokens : 0};
  field[3] = {row.v_meta, part.bits_v < 16 ? row.groups_v / page_tokens : 0};
}

void evict(const kvlathe_cuda_evict_args& a) {
  check(a);
  if (a.kept == 0) return;
  EvictParams p{static_cast<char*>(a.pool), a.pages, a.keep, a.part->page_stride, a.page_tokens, a.kept, {}};
  for (int32_t lane = 0; lane < a.part->lane_count; lane += kLanesAtOnce) {
    const int lanes = std::min(kLanesAtOnce, a.part->lane_count - lane);
    for (int i = 0; i < lanes; ++i) set_fields(p.field[i], *a.part, lanes_of(*a.part)[lane + i], a.page_tokens);
    p.keep = a.keep + int64_t{lane} * a.kept;
    evict_lanes<<<dim3(lanes, 4), kThreads, 0, static_cast<cudaStream_t>(a.stream)>>>(p);
    check_cuda(cudaGetLastError(), "launching evict");
  }
}

}  // namespace
}  // namespace kvlathe::cuda

extern "C" int32_t kvlathe_cuda_evict(const kvlathe_cuda_evict_args* args, kvlathe_status* status) {
  return kvlathe::run(status, [&] {
    if (!args) throw kvlathe::Refusal(KVLATHE_BAD_ARGUMENT, "args is null");
    kvlathe::cuda::evict(*args);
  });
}
