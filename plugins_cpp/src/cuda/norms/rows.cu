// Row-wise ops of a decoder layer: RMS norm, SiLU(gate) * up, and rows as codes of fp8. With few rows they wait for
// memory more than they move it. So each is one kernel, which asks for all it needs at once, in
// pieces of 16 bytes.
#include <cuda_fp8.h>

#include "cuda/device.cuh"
#include "cuda/host.h"
#include "kvlathe/rows.h"

namespace kvlathe::cuda {
namespace {

constexpr int kPiece = 8;  // elements
constexpr int kHeld = 2;   // pieces that a thread of the norm holds
constexpr int kMostThreads = 1024;
constexpr int kHeadThreads = 256;
constexpr float kOneCode = 1.f / 448.f;            // e4m3 ends at 448
constexpr float kLeastLargest = 6.103515625e-05f;  // of a row, whatever it holds
static_assert(kHeld * kMostThreads * kPiece == kMaxColumns);

struct RowsParams {
  const uint16_t *x, *weight;
  uint16_t* out;
  int64_t x_stride;
  int32_t rows, pieces;  // of a row
  float eps;
  int32_t heads;
};

__device__ inline uint16_t element(const uint4& piece, int i) {
  const uint32_t word = i < 2 ? piece.x : i < 4 ? piece.y : i < 6 ? piece.z : piece.w;
  return uint16_t(word >> 16 * (i % 2));
}

// Eight numbers, rounded.
template <class E>
__device__ inline uint4 packed(const float (&x)[kPiece]) {
  return {E::pack(x[0], x[1]), E::pack(x[2], x[3]), E::pack(x[4], x[5]), E::pack(x[6], x[7])};
}

// The sum over the block of one number a thread.
__device__ inline float block_sum(float x) {
  __shared__ float sums[kMostThreads / 32];
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  x = threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0.f;
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// A block takes a row.
template <class E>
__global__ void __launch_bounds__(kMostThreads) norm_rows(const RowsParams p) {
  const uint4* from = reinterpret_cast<const uint4*>(p.x + blockIdx.x * p.x_stride);
  const uint4* weight = reinterpret_cast<const uint4*>(p.weight);
  uint4* to = reinterpret_cast<uint4*>(p.out) + int64_t{blockIdx.x} * p.pieces;
  uint4 x[kHeld]{}, w[kHeld]{};
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at < p.pieces) x[i] = from[at], w[i] = weight[at];
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kHeld * kPiece; ++i) {
    const float one = E::widen(element(x[i / kPiece], i % kPiece));
    sum += one * one;
  }
  const float scale = rsqrtf(block_sum(sum) / float(p.pieces * kPiece) + p.eps);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    float out[kPiece];
#pragma unroll
    for (int j = 0; j < kPiece; ++j)
      out[j] = E::widen(element(x[i], j)) * scale * E::widen(element(w[i], j));
    if (at < p.pieces) to[at] = packed<E>(out);
  }
}

// A warp takes a head of a row: of a token's heads none is wide.
template <class E>
__global__ void __launch_bounds__(kHeadThreads) norm_heads(const RowsParams p) {
  const int64_t at = int64_t{blockIdx.x} * (kHeadThreads / 32) + threadIdx.x / 32;
  if (at >= int64_t{p.rows} * p.heads) return;
  const int64_t row = at / p.heads;
  const int head = int(at % p.heads), lane = threadIdx.x % 32;
  const uint16_t* from = p.x + row * p.x_stride + int64_t{head} * p.pieces * kPiece;
  uint4 x{}, w{};
  if (lane < p.pieces)
    x = reinterpret_cast<const uint4*>(from)[lane],
    w = reinterpret_cast<const uint4*>(p.weight)[lane];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    const float one = E::widen(element(x, i));
    sum += one * one;
  }
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  const float scale = rsqrtf(sum / float(p.pieces * kPiece) + p.eps);
  float out[kPiece];
#pragma unroll
  for (int i = 0; i < kPiece; ++i)
    out[i] = E::widen(element(x, i)) * scale * E::widen(element(w, i));
  if (lane < p.pieces) reinterpret_cast<uint4*>(p.out)[at * p.pieces + lane] = packed<E>(out);
}

// A thread takes a piece.
template <class E>
__global__ void silu_rows(const RowsParams p) {
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= p.pieces) return;
  const uint4* row = reinterpret_cast<const uint4*>(p.x + blockIdx.y * p.x_stride);
  const uint4 gate = row[at], up = row[at + p.pieces];
  float out[kPiece];
#pragma unroll
  for (int j = 0; j < kPiece; ++j) {
    const float x = E::widen(element(gate, j));
    out[j] = x / (1.f + __expf(-x)) * E::widen(element(up, j));
  }
  reinterpret_cast<uint4*>(p.out)[int64_t{blockIdx.y} * p.pieces + at] = packed<E>(out);
}

// The largest over the block of one number a thread, none below 0.
__device__ inline float block_most(float x) {
  __shared__ float most[kMostThreads / 32];
  for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = x;
  __syncthreads();
  x = threadIdx.x % 32 < blockDim.x / 32 ? most[threadIdx.x % 32] : 0.f;
  for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// A block takes a row.
template <class E>
__global__ void __launch_bounds__(kMostThreads) code_rows(const RowsParams p) {
  const uint4* from = reinterpret_cast<const uint4*>(p.x + blockIdx.x * p.x_stride);
  uint2* to = reinterpret_cast<uint2*>(p.out) + int64_t{blockIdx.x} * p.pieces;
  uint4 x[kHeld]{};
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at < p.pieces) x[i] = from[at];
  }
  float most = kLeastLargest;
#pragma unroll
  for (int i = 0; i < kHeld * kPiece; ++i)
    most = fmaxf(most, fabsf(E::widen(element(x[i / kPiece], i % kPiece))));
  const float scale = block_most(most) * kOneCode;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    uint32_t words[2]{};
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      const float one = E::widen(element(x[i], j)) / scale;
      const uint32_t code = __nv_cvt_float_to_fp8(one, __NV_SATFINITE, __NV_E4M3);
      words[j / 4] |= code << 8 * (j % 4);
    }
    if (at < p.pieces) to[at] = {words[0], words[1]};
  }
  float* scales =
      reinterpret_cast<float*>(reinterpret_cast<uint2*>(p.out) + int64_t{p.rows} * p.pieces);
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
}

// -- host ---------------------------------------------------------------------

RowsParams params_of(const kvlathe_rows_args& a, int64_t width) {
  check_version(a.abi_version);
  check_element(a.element);
  require(a.rows >= 0 && a.rows <= 65535 && a.columns >= kPiece && a.columns % kPiece == 0,
          KVLATHE_BAD_ARGUMENT, "rows must be 0 to 65535 and columns a multiple of 8");
  require(!a.rows || (a.x && a.out), KVLATHE_BAD_ARGUMENT, "x or out is null");
  require(a.x_stride % kPiece == 0 && a.x_stride >= width, KVLATHE_MISALIGNED,
          "rows of x must start at multiples of 16 bytes and hold all columns");
  for (const void* pointer : {a.x, a.weight, static_cast<const void*>(a.out)})
    check_aligned(pointer, 16, "x, weight or out");
  const auto elements = [](const void* x) { return static_cast<const uint16_t*>(x); };
  return {elements(a.x),
          elements(a.weight),
          static_cast<uint16_t*>(a.out),
          a.x_stride,
          a.rows,
          a.columns / kPiece,
          a.eps,
          a.heads};
}

// Threads of a block that holds a whole row.
int threads_of(const RowsParams& p) {
  const int columns = p.pieces * kPiece;
  require(columns <= kMaxColumns, KVLATHE_UNSUPPORTED,
          "a row has more than " + std::to_string(kMaxColumns) + " columns");
  return p.pieces <= kMostThreads ? (p.pieces + 31) / 32 * 32 : kMostThreads;
}

void rms_norm(const kvlathe_rows_args& a) {
  const RowsParams p = params_of(a, a.columns);
  require(a.weight, KVLATHE_BAD_ARGUMENT, "weight is null");
  const int threads = threads_of(p);
  if (!a.rows) return;
  const auto kernel = a.element == KVLATHE_F16 ? norm_rows<Half> : norm_rows<Bfloat>;
  kernel<<<a.rows, threads, 0, static_cast<cudaStream_t>(a.stream)>>>(p);
  check_cuda(cudaGetLastError(), "launching rms_norm");
}

void norm_heads(const kvlathe_rows_args& a) {
  require(a.heads >= 1 && a.heads <= 1 << 16 && a.columns <= 32 * kPiece, KVLATHE_BAD_ARGUMENT,
          "a row must have 1 to 65536 heads of at most 256 columns");
  const RowsParams p = params_of(a, int64_t{a.heads} * a.columns);
  require(a.weight, KVLATHE_BAD_ARGUMENT, "weight is null");
  if (!a.rows) return;
  constexpr int64_t kWarps = kHeadThreads / 32;
  const int64_t blocks = (int64_t{a.rows} * a.heads + kWarps - 1) / kWarps;
  const auto kernel = a.element == KVLATHE_F16 ? norm_heads<Half> : norm_heads<Bfloat>;
  kernel<<<unsigned(blocks), kHeadThreads, 0, static_cast<cudaStream_t>(a.stream)>>>(p);
  check_cuda(cudaGetLastError(), "launching norm_heads");
}

void silu_product(const kvlathe_rows_args& a) {
  const RowsParams p = params_of(a, 2 * a.columns);
  if (!a.rows) return;
  const dim3 grid((p.pieces + 255) / 256, a.rows);
  const auto kernel = a.element == KVLATHE_F16 ? silu_rows<Half> : silu_rows<Bfloat>;
  kernel<<<grid, 256, 0, static_cast<cudaStream_t>(a.stream)>>>(p);
  check_cuda(cudaGetLastError(), "launching silu_product");
}

void fp8_rows(const kvlathe_rows_args& a) {
  const RowsParams p = params_of(a, a.columns);
  const int threads = threads_of(p);
  if (!a.rows) return;
  const auto kernel = a.element == KVLATHE_F16 ? code_rows<Half> : code_rows<Bfloat>;
  kernel<<<a.rows, threads, 0, static_cast<cudaStream_t>(a.stream)>>>(p);
  check_cuda(cudaGetLastError(), "launching fp8_rows");
}

int32_t run_on(const kvlathe_rows_args* args, kvlathe_status* status,
               void (*body)(const kvlathe_rows_args&)) {
  return kvlathe::run(status, [&] {
    if (!args) throw kvlathe::Refusal(KVLATHE_BAD_ARGUMENT, "args is null");
    body(*args);
  });
}

}  // namespace
}  // namespace kvlathe::cuda

extern "C" int32_t kvlathe_cuda_rms_norm(const kvlathe_rows_args* args, kvlathe_status* status) {
  return kvlathe::cuda::run_on(args, status, kvlathe::cuda::rms_norm);
}

extern "C" int32_t kvlathe_cuda_norm_heads(const kvlathe_rows_args* args, kvlathe_status* status) {
  return kvlathe::cuda::run_on(args, status, kvlathe::cuda::norm_heads);
}

extern "C" int32_t kvlathe_cuda_silu_product(const kvlathe_rows_args* args,
                                             kvlathe_status* status) {
  return kvlathe::cuda::run_on(args, status, kvlathe::cuda::silu_product);
}

extern "C" int32_t kvlathe_cuda_fp8_rows(const kvlathe_rows_args* args, kvlathe_status* status) {
  return kvlathe::cuda::run_on(args, status, kvlathe::cuda::fp8_rows);
}
