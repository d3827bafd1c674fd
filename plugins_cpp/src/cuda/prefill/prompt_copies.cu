// 16-bit copies of the sealed pages that the chunks of a step attend, made once a layer.
//
// attend_prompt would convert a page again for each of its tiles, and a chunk of 8,192 tokens with
// groups of 4 has 171 of them a lane. A copy costs one more read and two writes of the past, which
// is little beside those tiles. It is the same numbers: CodesLane converts here, too.
//
// The room: a count, then where the copies of each sequence begin, then the (part, page) of each
// copy, then the copies. Copies of a page have K [tokens][rank] and then V of each lane. Sequences
// take room in their order while it lasts.
#include <algorithm>

#include "cuda/host.h"
#include "cuda/prefill/prompt_codes.cuh"

namespace kvlathe::cuda {
namespace {

constexpr int kPlaceThreads = 256, kCopyThreads = 128;
// New tokens of a sequence from which its past is copied. Fewer have few tiles.
constexpr int kLeastCopied = 128;

struct CopyParams {
  PromptParams prompts;
  int32_t* count;
  int2* owners;
  int32_t slots;
};
static_assert(sizeof(CopyParams) <= 4096);

// Pages of sequence b in a part that are to be copied.
__device__ int pages_to_copy(const PromptParams& p, int part, int b) {
  if (p.part[part].bits == 16 || p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b] < kLeastCopied) return 0;
  const int tokens = p.part[part].lengths[b * p.part[part].lengths_stride];
  return (tokens + p.page_tokens - 1) / p.page_tokens;
}

// The sum of `own` over the threads of the block up to this one; `whole` is that over all.
__device__ int summed(int own, int& whole) {
  __shared__ int sums[kPlaceThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int upto = own;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, upto, step);
    if (lane >= step) upto += other;
  }
  __syncthreads();  // the sums of the call before are read
  if (lane == 31) sums[warp] = upto;
  __syncthreads();
  whole = 0;
  for (int i = 0; i < kPlaceThreads / 32; ++i) {
    if (i < warp) upto += sums[i];
    whole += sums[i];
  }
  return upto;
}

// Gives sequences their places. One block.
__global__ void __launch_bounds__(kPlaceThreads)
    place_copies(const __grid_constant__ CopyParams c) {
  const PromptParams& p = c.prompts;
  auto base = const_cast<int32_t*>(p.copy_base);
  int placed = 0;
  for (int part = 0; part < p.parts; ++part) {
    for (int from = 0; from < p.batch; from += kPlaceThreads) {
      const int b = from + threadIdx.x, pages = b < p.batch ? pages_to_copy(p, part, b) : 0;
      int whole;
      const int end = placed + summed(pages, whole);
      if (b < p.batch) base[part * p.batch + b] = pages && end <= c.slots ? end - pages : -1;
      placed += whole;
    }
  }
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < p.parts * p.batch; i += kPlaceThreads / 32) {
    const int begin = base[i], part = i / p.batch, b = i % p.batch;
    if (begin < 0) continue;
    const int pages = pages_to_copy(p, part, b);
    const int32_t* table = p.part[part].page_table + int64_t{b} * p.part[part].table_stride;
    for (int n = lane; n < pages; n += 32) c.owners[begin + n] = {part, table[n]};
    if (lane == 0) atomicMax(&count, begin + pages);
  }
  __syncthreads();
  if (threadIdx.x == 0) *c.count = count;
}

#ifdef KVLATHE_WGMMA

// K or V of a stage to rows of `steps` x 32 bytes.
__device__ void write_rows_of(char* to, uint32_t from, int steps) {
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 8 + threadIdx.x % 32 / 16 * 8,
            half = threadIdx.x / 8 % 2;
  to += row * steps * 32 + half * 16;
  for (int i = 0; i < steps; ++i)
    *reinterpret_cast<uint4*>(to + 32 * i) =
        shared_at<uint4>(from + piece_at(block_steps(steps), row, 2 * i + half));
}

template <class E, int kBits>
__device__ void copy_piece(const PromptParams& p, const PromptHead& head, int part, int page,
                           int token, char* copy, uint32_t buffer) {
  const CodesLane<kBits> lane{p, head, part, p.part[part]};
  const uint32_t stage = buffer + p.codes_bytes, values = stage + head.steps_k * kStageUnit;
  lane.copy(buffer, page, token);
  close_copy_group();
  wait_copy_groups<0>();
  __syncthreads();
  lane.template convert_keys<E>(buffer, stage);
  lane.template convert_values<E>(buffer, values, token, 64);
  __syncthreads();
  const int row = 32 * p.page_tokens;
  copy += head.steps_before * row;
  write_rows_of(copy + token * head.steps_k * 32, stage, head.steps_k);
  write_rows_of(copy + head.steps_k * row + token * head.steps_v * 32, values, head.steps_v);
}

#endif

// Takes 64 tokens of a page of a lane at a time.
template <class E>
__global__ void __launch_bounds__(kCopyThreads) copy_codes(const __grid_constant__ CopyParams c) {
#ifdef KVLATHE_WGMMA
  extern __shared__ __align__(128) char dynamic[];
  const PromptParams& p = c.prompts;
  const uint32_t buffer = shared_address(dynamic);
  const int pieces = p.page_tokens / 64, items = *c.count * pieces * p.heads;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int slot = item / p.heads / pieces, token = item / p.heads % pieces * 64;
    const PromptHead& head = p.head[item % p.heads];
    const int2 owner = c.owners[slot];
    if (!(head.parts >> owner.x & 1)) continue;
    char* copy = const_cast<char*>(p.copies) + slot * p.copy_stride;
    switch (p.part[owner.x].bits) {
      case 8: copy_piece<E, 8>(p, head, owner.x, owner.y, token, copy, buffer); break;
      case 4: copy_piece<E, 4>(p, head, owner.x, owner.y, token, copy, buffer); break;
      case 2: copy_piece<E, 2>(p, head, owner.x, owner.y, token, copy, buffer); break;
    }
    __syncthreads();  // the next piece goes where this one was
  }
#endif
}

auto kernel_of(int32_t element) {
  return element == KVLATHE_F16 ? copy_codes<Half> : copy_codes<Bfloat>;
}

int64_t aligned(int64_t bytes) { return (bytes + kOffsetBytes - 1) / kOffsetBytes * kOffsetBytes; }

}  // namespace

CopyLaunch copy_launch_of(const kvlathe_attend_decode_args& a, PromptParams& p) {
  const kvlathe_prompts& prompts = *a.prompts;
  bool coded = false;
  for (int i = 0; i < p.parts; ++i) coded |= p.part[i].bits < 16;
  if (!coded || !prompts.copies || !a.batch) return {};
  require(reinterpret_cast<uintptr_t>(prompts.copies) % kOffsetBytes == 0, KVLATHE_MISALIGNED,
          "the room for copies is not aligned to 128 bytes");
  int steps = 0;
  for (int h = 0; h < p.heads; ++h) steps += p.head[h].steps_k + p.head[h].steps_v;
  p.copy_stride = int64_t{32} * p.page_tokens * steps;
  const int64_t bases = aligned(4 * int64_t{p.parts} * p.batch), first = kOffsetBytes + bases,
                room = prompts.copies_bytes - first - kOffsetBytes;
  const int64_t slots = room / (p.copy_stride + int64_t{sizeof(int2)});
  if (slots < 1) return {};
  char* at = static_cast<char*>(prompts.copies);
  p.copy_base = reinterpret_cast<int32_t*>(at + kOffsetBytes);
  p.copies = at + first + aligned(slots * int64_t{sizeof(int2)});
  return {int32_t(std::min<int64_t>(slots, INT32_MAX)), reinterpret_cast<int32_t*>(at),
          reinterpret_cast<int2*>(at + first), a.element, 0};
}

void reserve_copies(PromptLaunch& launch) {
  CopyLaunch& copies = launch.copies;
  if (!copies.slots) return;
  int stage = 0;
  for (int h = 0; h < launch.params.heads; ++h) {
    const PromptHead& head = launch.params.head[h];
    stage = std::max(stage, (head.steps_k + head.steps_v) * kStageUnit);
  }
  copies.shared_bytes = launch.params.codes_bytes + stage;
  check_cuda(cudaFuncSetAttribute(kernel_of(copies.element),
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, copies.shared_bytes),
             "reserving shared memory for copies");
}

void copy_pages(const PromptLaunch& launch, void* stream) {
  const CopyLaunch& copies = launch.copies;
  if (!copies.slots || !launch.grid) return;
  const CopyParams c{launch.params, copies.count, copies.owners, copies.slots};
  const auto on = static_cast<cudaStream_t>(stream);
  place_copies<<<1, kPlaceThreads, 0, on>>>(c);
  kernel_of(copies.element)<<<8 * launch.grid, kCopyThreads, copies.shared_bytes, on>>>(c);
  check_cuda(cudaGetLastError(), "launching copies of pages");
}

}  // namespace kvlathe::cuda
