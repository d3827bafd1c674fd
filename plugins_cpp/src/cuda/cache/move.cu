// Tokens of a sequence into other pages of the same layout. A block takes one lane and one target
// page; what it writes is contiguous, field by field.
#include <algorithm>
#include <string>

#include "common/limits.h"
#include "cuda/host.h"
#include "kvlathe/cache.h"

namespace kvlathe::cuda {
namespace {

constexpr int kMoveThreads = 128;
// Fields of all lanes are launch parameters.
constexpr int kFieldsAtOnce = 1024;

struct MoveField {
  int32_t at, size;
};

struct MoveParams {
  char* pool;
  int64_t page_stride, places_stride;
  const int32_t *source_pages, *target_pages, *places;
  int32_t page_tokens, kept, fields;
  MoveField field[kFieldsAtOnce];
};
static_assert(sizeof(MoveParams) <= 32764, "a kernel takes no more parameters");

// Unit: a load, which divides sizes and places.
template <class Unit>
__device__ void move_field(const MoveParams& p, const MoveField& f, const int32_t* places,
                           int first, char* to) {
  const int units = f.size / int(sizeof(Unit));
  for (int i = threadIdx.x; i < p.page_tokens * units; i += kMoveThreads) {
    const int token = i / units, unit = i % units;
    Unit x{};
    if (first + token < p.kept) {
      const int place = places[first + token];
      const int64_t page = p.source_pages[place / p.page_tokens];
      const char* from = p.pool + page * p.page_stride + f.at;
      x = reinterpret_cast<const Unit*>(from + int64_t{place % p.page_tokens} * f.size)[unit];
    }
    reinterpret_cast<Unit*>(to + f.at)[i] = x;
  }
}

// Block (lane, target page).
__global__ void __launch_bounds__(kMoveThreads, 8)
    move_tokens(const __grid_constant__ MoveParams p) {
  const int lane = blockIdx.x, first = int(blockIdx.y) * p.page_tokens;
  const int32_t* places = p.places + lane * p.places_stride;
  char* to = p.pool + int64_t{p.target_pages[blockIdx.y]} * p.page_stride;
  for (int i = 0; i < p.fields; ++i) {
    const MoveField& f = p.field[lane * p.fields + i];
    const int even = f.at | f.size;
    if (even % 16 == 0)
      move_field<uint4>(p, f, places, first, to);
    else if (even % 4 == 0)
      move_field<uint32_t>(p, f, places, first, to);
    else
      move_field<uint16_t>(p, f, places, first, to);
  }
}

void check(const kvlathe_cuda_move_args& a) {
  check_version(a.abi_version);
  require(a.page_tokens > 0 && a.page_stride > 0 && a.lanes >= 0 && a.fields >= 0 && a.kept >= 0 &&
              a.target_count >= 0 && a.places_stride >= 0,
          KVLATHE_BAD_ARGUMENT, "a size is negative");
  require(a.pool && a.field && a.source_pages && a.target_pages && a.places, KVLATHE_BAD_ARGUMENT,
          "pool, pages, places or field is null");
  check_aligned(a.pool, kOffsetBytes, "the pool");
  require(a.page_stride % kOffsetBytes == 0, KVLATHE_MISALIGNED,
          "a page stride is no multiple of 128 bytes");
  require(a.fields <= kFieldsAtOnce, KVLATHE_UNSUPPORTED, "a lane has too many fields");
  require(a.kept <= int64_t{a.target_count} * a.page_tokens, KVLATHE_TOO_SMALL,
          std::to_string(a.kept) + " tokens do not fit into " + std::to_string(a.target_count) +
              " pages");
  for (int64_t i = 0; i < int64_t{a.lanes} * a.fields; ++i) {
    const kvlathe_token_field& f = a.field[i];
    require(f.at >= 0 && f.size > 0 && f.at + f.size * a.page_tokens <= a.page_stride,
            KVLATHE_TOO_SMALL, "a field ends past the page stride");
    require((f.at | f.size) % 2 == 0, KVLATHE_MISALIGNED, "a field has an odd place or size");
  }
}

void move(const kvlathe_cuda_move_args& a) {
  if (!a.lanes || !a.fields || !a.target_count) return;
  check(a);
  MoveParams p{static_cast<char*>(a.pool),
               a.page_stride,
               a.places_stride,
               a.source_pages,
               a.target_pages,
               a.places,
               a.page_tokens,
               a.kept,
               a.fields,
               {}};
  const int most = kFieldsAtOnce / a.fields;
  for (int lane = 0; lane < a.lanes; lane += most) {
    const int lanes = std::min(most, a.lanes - lane);
    for (int i = 0; i < lanes * a.fields; ++i) {
      const kvlathe_token_field& f = a.field[lane * a.fields + i];
      p.field[i] = {int32_t(f.at), int32_t(f.size)};
    }
    p.places = a.places + lane * a.places_stride;
    void* arguments[] = {&p};
    check_cuda(cudaLaunchKernel(move_tokens, dim3(lanes, a.target_count), dim3(kMoveThreads),
                                arguments, 0, static_cast<cudaStream_t>(a.stream)),
               "launching move");
  }
}

}  // namespace
}  // namespace kvlathe::cuda

extern "C" int32_t kvlathe_cuda_move(const kvlathe_cuda_move_args* args, kvlathe_status* status) {
  return kvlathe::run(status, [&] {
    if (!args) throw kvlathe::Refusal(KVLATHE_BAD_ARGUMENT, "args is null");
    kvlathe::cuda::move(*args);
  });
}
