// 16-bit copies of the sealed pages that the chunks of a step attend, made once a layer.
//
// attend_prompt would convert a page again for each of its tiles, and a chunk of 8,192 tokens with
// groups of 4 has 171 of them a lane. A copy costs one more read and two writes of the past, which
// is little beside those tiles. It is the same numbers: CodesLane and FormLane convert here, too.
// Of lanes with windows few pages are held, and those are copied, too: each tile of the chunk's first
// tokens would convert them all.
//
// Sequences whose pages are the first pages of another one's read its copies (copies_of): a host may
// give each page of a prompt as a sequence of its own.
//
// The room: two counts, then where the copies of each sequence begin, then the (part, page) of each
// copy, then the copies. Copies of a page have K [tokens][rank] and then V of each lane. Sequences
// take room in their order while it lasts.
#include <algorithm>
#include <type_traits>

#include "cuda/host.h"
#include "cuda/prefill/prompt_general.cuh"

namespace kvlathe::cuda {
namespace {

constexpr int kPlaceThreads = 256, kCopyThreads = 128;
// New tokens of a sequence from which its past is copied. Fewer have few tiles.
constexpr int kLeastCopied = 128;

// The parameters of a general call with floats of 8 bits.
struct NamedFloat8 : NamedPrompts {
  static constexpr bool kFloat8 = true;
};

// P: PromptParams, or NamedPrompts or NamedFloat8 for a general call.
template <class P>
struct CopyParams {
  P prompts;
  int32_t *count, *left;
  int2* owners;
  const int32_t* copies_of;  // of kvlathe_prompts
  int32_t slots, parts;
  uint32_t copied;
};
static_assert(sizeof(CopyParams<NamedPrompts>) <= 32764);

// Whether copies are made of sequence b's own pages.
template <class P>
__device__ bool has_own_copies(const CopyParams<P>& c, int b) {
  if (c.copies_of) return c.copies_of[b] == b;
  const int32_t* starts = c.prompts.cu_seqlens_q;
  return starts[b + 1] - starts[b] >= kLeastCopied;
}

// Pages of sequence b in a part that are to be copied.
template <class P>
__device__ int pages_to_copy(const CopyParams<P>& c, int i, int b) {
  const P& p = c.prompts;
  if (!(c.copied >> i & 1) || !has_own_copies(c, b)) return 0;
  const int tokens = p.call_part(i).lengths[b * p.call_part(i).lengths_stride];
  return (tokens + p.page_tokens - 1) / p.page_tokens;
}

// Whether a sequence has sealed pages and not all of them are copied.
template <class P>
__device__ bool reads_codes(const CopyParams<P>& c, int b) {
  const P& p = c.prompts;
  for (int i = 0; i < c.parts; ++i) {
    const PromptPart& part = p.call_part(i);
    if (c.copied >> i & 1 && part.lengths[b * part.lengths_stride] &&
        p.copy_base[i * p.batch + b] < 0)
      return true;
  }
  return false;
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
template <class P>
__global__ void __launch_bounds__(kPlaceThreads)
    place_copies(const __grid_constant__ CopyParams<P> c) {
  const P& p = c.prompts;
  auto base = const_cast<int32_t*>(p.copy_base);
  int placed = 0;
  for (int part = 0; part < c.parts; ++part) {
    for (int from = 0; from < p.batch; from += kPlaceThreads) {
      const int b = from + threadIdx.x, pages = b < p.batch ? pages_to_copy(c, part, b) : 0;
      int whole;
      const int end = placed + summed(pages, whole);
      if (b < p.batch) base[part * p.batch + b] = pages && end <= c.slots ? end - pages : -1;
      placed += whole;
    }
  }
  __shared__ int count, left;
  if (threadIdx.x == 0) count = left = 0;
  __syncthreads();
  if (c.copies_of) {
    for (int i = threadIdx.x; i < c.parts * p.batch; i += kPlaceThreads) {
      const int b = i % p.batch, of = c.copies_of[b];
      if (of >= 0 && of != b) base[i] = base[i - b + of];
    }
    __syncthreads();
  }
  for (int n = threadIdx.x; n < p.list[kTiles]; n += kPlaceThreads) {
    if (reads_codes(c, p.list[kListHeader + 2 * n])) left = 1;
  }
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < c.parts * p.batch; i += kPlaceThreads / 32) {
    const int begin = base[i], part = i / p.batch, b = i % p.batch;
    if (begin < 0) continue;
    const int pages = pages_to_copy(c, part, b);
    const PromptPart& of = p.call_part(part);
    const int32_t* table = of.page_table + int64_t{b} * of.table_stride;
    for (int n = lane; n < pages; n += 32) c.owners[begin + n] = {part, table[n]};
    if (lane == 0) atomicMax(&count, begin + pages);
  }
  __syncthreads();
  if (threadIdx.x == 0) *c.count = count, *c.left = left;
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

template <class E, class Lane>
__device__ void copy_piece(const PromptParams& p, const PromptHead& head, const Lane& lane,
                           int page, int token, char* copy, uint32_t buffer) {
  const uint32_t stage = buffer + p.codes_bytes, values = stage + head.steps_k * kStageUnit;
  lane.copy(buffer, page, token);
  close_copy_group();
  wait_copy_groups<0>();
  __syncthreads();
  lane.template convert<E>(buffer, stage, values, token, 64);
  __syncthreads();
  const int row = 32 * p.page_tokens;
  copy += head.steps_before * row;
  write_rows_of(copy + token * head.steps_k * 32, stage, head.steps_k);
  write_rows_of(copy + head.steps_k * row + token * head.steps_v * 32, values, head.steps_v);
}

// The slot of a head in which a part of the call is; -1: none.
template <class P>
__device__ int slot_of(const P& p, int head, int part) {
  for (int i = 0; i < KVLATHE_MAX_SLOTS; ++i) {
    if (p.head[head].parts >> i & 1 && p.call_part_of(head, i) == part) return i;
  }
  return -1;
}

#endif

// Takes 64 tokens of a page of a lane at a time.
template <class E, class P>
__global__ void __launch_bounds__(kCopyThreads)
    copy_codes(const __grid_constant__ CopyParams<P> c) {
#ifdef KVLATHE_WGMMA
  extern __shared__ __align__(128) char dynamic[];
  const P& p = c.prompts;
  const uint32_t buffer = shared_address(dynamic);
  const int pieces = p.page_tokens / 64, items = *c.count * pieces * p.heads;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int copied = item / p.heads / pieces, token = item / p.heads % pieces * 64,
              h = item % p.heads;
    const PromptHead& head = p.head[h];
    const int2 owner = c.owners[copied];
    const int slot = slot_of(p, h, owner.x);
    if (slot < 0) continue;
    const PromptPart& of = p.part_of(h, slot);
    char* copy = const_cast<char*>(p.copies) + copied * p.copy_stride;
    const auto take = [&](const auto& lane) {
      copy_piece<E>(p, head, lane, owner.y, token, copy, buffer);
    };
    switch (of.bits) {
      case 8: take(KnownLane<8>{p, head, slot, of}); break;
      case 4: take(KnownLane<4>{p, head, slot, of}); break;
      case 2: take(KnownLane<2>{p, head, slot, of}); break;
      default:
        if constexpr (P::kGeneral)
          take(FormLane<P::kFloat8>{p, head, slot, of, p.sides_of(h, slot), p.groups[h][slot]});
    }
    __syncthreads();  // the next piece goes where this one was
  }
#endif
}

template <class P>
auto kernel_of(int32_t element) {
  return element == KVLATHE_F16 ? copy_codes<Half, P> : copy_codes<Bfloat, P>;
}

// Runs body(parameters of that kind) for a launch.
template <class Body>
void with_params(const PromptLaunch& launch, Body body) {
  const CopyLaunch& copies = launch.copies;
  const auto with = [&](const auto& prompts) {
    using P = std::decay_t<decltype(prompts)>;
    body(CopyParams<P>{prompts, copies.count, copies.left, copies.owners, copies.copies_of,
                       copies.slots, copies.parts, copies.copied});
  };
  const NamedPrompts& named = launch.params;
  if (copies.float8) return with(NamedFloat8{named});
  if (copies.general) return with(named);
  with(static_cast<const PromptParams&>(launch.params));
}

int64_t aligned(int64_t bytes) { return (bytes + kOffsetBytes - 1) / kOffsetBytes * kOffsetBytes; }

}  // namespace

CopyLaunch copy_launch_of(const kvlathe_attend_decode_args& a, NamedPrompts& p, bool general) {
  const kvlathe_prompts& prompts = *a.prompts;
  uint32_t copied = 0;
  for (int i = 0; i < a.part_count; ++i) {
    if (any_quantized(a.parts[i])) copied |= 1u << i;
  }
  if (!copied || !prompts.copies || !a.batch) return {};
  require(reinterpret_cast<uintptr_t>(prompts.copies) % kOffsetBytes == 0, KVLATHE_MISALIGNED,
          "the room for copies is not aligned to 128 bytes");
  int steps = 0;
  for (int h = 0; h < p.heads; ++h) steps += p.head[h].steps_k + p.head[h].steps_v;
  p.copy_stride = int64_t{32} * p.page_tokens * steps;
  const int64_t bases = aligned(4 * int64_t{a.part_count} * p.batch), first = kOffsetBytes + bases,
                room = prompts.copies_bytes - first - kOffsetBytes;
  const int64_t slots = room / (p.copy_stride + int64_t{sizeof(int2)});
  if (slots < 1) return {};
  char* at = static_cast<char*>(prompts.copies);
  p.copy_base = reinterpret_cast<int32_t*>(at + kOffsetBytes);
  p.copies = at + first + aligned(slots * int64_t{sizeof(int2)});
  const auto counts = reinterpret_cast<int32_t*>(at);
  p.codes_left = counts + 1;
  return {int32_t(std::min<int64_t>(slots, INT32_MAX)),
          a.part_count,
          copied,
          general,
          any_float8(a),
          counts,
          counts + 1,
          reinterpret_cast<int2*>(at + first),
          prompts.copies_of,
          a.element,
          0};
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
  with_params(launch, [&](const auto& params) {
    using P = std::decay_t<decltype(params.prompts)>;
    check_cuda(
        cudaFuncSetAttribute(kernel_of<P>(copies.element),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, copies.shared_bytes),
        "reserving shared memory for copies");
  });
}

void copy_pages(const PromptLaunch& launch, void* stream) {
  const CopyLaunch& copies = launch.copies;
  if (!copies.slots || !launch.grid) return;
  const auto on = static_cast<cudaStream_t>(stream);
  with_params(launch, [&](const auto& params) {
    using P = std::decay_t<decltype(params.prompts)>;
    CopyParams<P> given = params;
    void* arguments[] = {&given};
    const char* what = "launching copies of pages";
    check_cuda(cudaLaunchKernel(place_copies<P>, dim3(1), dim3(kPlaceThreads), arguments, 0, on),
               what);
    check_cuda(cudaLaunchKernel(kernel_of<P>(copies.element), dim3(8 * launch.grid),
                                dim3(kCopyThreads), arguments, copies.shared_bytes, on),
               what);
  });
}

}  // namespace kvlathe::cuda
