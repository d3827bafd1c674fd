// Products of a few rows with weights that are codes. All their time is spent on reading weights, each once. So
// codes become halves in registers, and tensor cores multiply, which leaves the other units to
// that.
#include "cuda/host.h"
#include "cuda/warp.cuh"
#include "kvlathe/products.h"

namespace kvlathe::cuda {
namespace {

constexpr int kWarps = 8;          // of a block; they share the inputs of the same outputs
constexpr int kTile = 16;          // outputs of an MMA
constexpr int kColumns = 8;        // rows of x of an MMA
constexpr int kPiece = 16;         // bytes of codes that a lane reads at once
constexpr int kSpan = 4 * kPiece;  // bytes of an output's codes that a warp reads at once

struct ProductParams {
  const char* codes;
  const void* scales;
  const uint8_t* zeros;
  const uint16_t *x, *residual;
  uint16_t* out;
  int64_t x_stride, out_stride;
  int32_t rows, outputs;
  int32_t row_bytes;    // of an output's codes
  int32_t group_shift;  // 4 bits: a group has 1 << group_shift pieces
  int32_t scale_stride;
  bool overlaps;  // the kernel before it
};

__device__ inline uint32_t twice(uint32_t half) { return half * 0x10001u; }

__device__ inline uint32_t word_of(const uint4& piece, int i) {
  return i == 0 ? piece.x : i == 1 ? piece.y : i == 2 ? piece.z : piece.w;
}

// Codes of e4m3, four a word. A byte's sign, exponent and fraction are those of a half that is
// 2^8 times smaller, whether it is subnormal or not.
struct E4m3 {
  static constexpr int kInputs = 16;  // of a piece
  static constexpr int kPairs = 2;    // of a word
  static constexpr float kUnit = 256.f;
  static constexpr int kResident = 3;  // blocks of a multiprocessor, by their registers

  struct Stored {};
  struct Grid {
    __device__ Grid(Stored) {}
  };
  __device__ static Stored stored(const ProductParams&, int, int) { return {}; }

  // Inputs (0, 2) and (1, 3).
  __device__ static void widen(uint32_t (&x)[kPairs], uint32_t codes, const Grid&) {
    x[0] = (codes << 8 & 0x80008000u) | (codes << 7 & 0x3f803f80u);
    x[1] = (codes & 0x80008000u) | (codes >> 1 & 0x3f803f80u);
  }
  // The same inputs of a row of x: words of inputs (0, 1) and (2, 3).
  __device__ static void pairs(uint32_t (&y)[kPairs], const uint32_t* x) {
    y[0] = picked_bytes(x[0], x[1], 0x5410);
    y[1] = picked_bytes(x[0], x[1], 0x7632);
  }
  __device__ static float scale(const ProductParams& p, int output) {
    return static_cast<const float*>(p.scales)[output] * kUnit;
  }
};

// Codes of 4 bits, eight a word.
struct Nibbles {
  static constexpr int kInputs = 32;
  static constexpr int kPairs = 4;
  static constexpr int kResident = 2;

  struct Stored {
    uint32_t x;  // a scale, and above it a zero
  };
  __device__ static Stored stored(const ProductParams& p, int output, int piece) {
    const int64_t at = int64_t{piece >> p.group_shift} * p.scale_stride + output;
    const uint32_t zero = p.zeros ? p.zeros[at] : 8u;
    return {static_cast<const uint16_t*>(p.scales)[at] | zero << 16};
  }
  // Two halves each: the scale, 1024 + zero, and -(64 + zero).
  struct Grid {
    uint32_t scale, low, high;
    __device__ Grid(Stored stored)
        : scale(twice(stored.x & 0xffffu)),
          low(twice(0x6400u + (stored.x >> 16))),
          high(twice(0xd400u + (stored.x >> 16 << 4))) {}
  };

  // Inputs (0, 4), (1, 5), (2, 6) and (3, 7). A code in the low bits of 1024 is 1024 + code; four
  // bits further up 1024 + 16 code, of which a sixteenth is 64 + code. All exact but the scale.
  __device__ static void widen(uint32_t (&x)[kPairs], uint32_t codes, const Grid& grid) {
    constexpr uint32_t kSixteenth = 0x2c002c00u;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t low = (codes >> 8 * i & 0x000f000fu) | 0x64006400u;
      const uint32_t high = (codes >> 8 * i & 0x00f000f0u) | 0x64006400u;
      x[2 * i] = fma_halves(sub_halves(low, grid.low), grid.scale, 0);
      x[2 * i + 1] = fma_halves(fma_halves(high, kSixteenth, grid.high), grid.scale, 0);
    }
  }
  __device__ static void pairs(uint32_t (&y)[kPairs], const uint32_t* x) {
    y[0] = picked_bytes(x[0], x[2], 0x5410);
    y[1] = picked_bytes(x[0], x[2], 0x7632);
    y[2] = picked_bytes(x[1], x[3], 0x5410);
    y[3] = picked_bytes(x[1], x[3], 0x7632);
  }
  __device__ static float scale(const ProductParams&, int) { return 1.f; }
};

// What a lane holds of its outputs' codes: of 2 outputs a tile, kSpans pieces each.
template <class W, int kTiles, int kSpans>
struct Held {
  uint4 codes[kTiles][kSpans][2];
  typename W::Stored grids[kTiles][kSpans][2];

  // ``at``: the lane's first piece; ``first``: its first output.
  __device__ void fetch(const ProductParams& p, int first, int at) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kSpans; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int output = first + tile * kTile + half * 8;
          const int piece = at + 4 * i;
          codes[tile][i][half] = {0, 0, 0, 0};
          grids[tile][i][half] = {};
          if (output >= p.outputs || piece * kPiece >= p.row_bytes) continue;
          const char* row = p.codes + int64_t{output} * p.row_bytes;
          codes[tile][i][half] = load_once(row + piece * kPiece);
          grids[tile][i][half] = W::stored(p, output, piece);
        }
      }
    }
  }
};

// A block takes kTiles tiles of outputs and up to kBlocks * 8 rows of x. Lane t has outputs t / 4
// and t / 4 + 8 of a tile, row t / 4 of x, and every fourth piece of inputs: the MMA adds inputs in
// any order, as long as both sides have the same.
template <class W, int kTiles, int kSpans, int kBlocks>
__global__ void __launch_bounds__(kWarps * 32, kTiles == 1 ? W::kResident : 2)
    multiply_rows(const ProductParams p) {
  using Own = Held<W, kTiles, kSpans>;
  constexpr int kWords = W::kInputs / 2;
  constexpr int kOutputs = kTiles * kTile, kRows = kBlocks * kColumns;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = blockIdx.x * kOutputs + lane / 4;
  Own next;
  next.fetch(p, first, warp * kSpans * 4 + lane % 4);
  // The branch keeps what was asked for in front of it: without, the assembler waits first.
  if (p.overlaps) wait_for_previous_kernel();
  float sums[kTiles][kBlocks][4]{};
  for (int span = warp * kSpans; span * kSpan < p.row_bytes; span += kWarps * kSpans) {
    const Own own = next;
    const int piece = span * 4 + lane % 4;
    next.fetch(p, first, piece + kWarps * kSpans * 4);
#pragma unroll
    for (int i = 0; i < kSpans; ++i) {
      const int at = piece + 4 * i;
      uint32_t x[kBlocks][kWords];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int row = block * kColumns + lane / 4;
        const bool is_there = row < p.rows && at * kPiece < p.row_bytes;
        const uint16_t* from = p.x + row * p.x_stride + int64_t{at} * W::kInputs;
#pragma unroll
        for (int j = 0; j < kWords / 4; ++j) {
          uint4 words{0, 0, 0, 0};
          if (is_there) words = reinterpret_cast<const uint4*>(from)[j];
#pragma unroll
          for (int k = 0; k < 4; ++k) x[block][4 * j + k] = word_of(words, k);
        }
      }
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        uint32_t b[kBlocks][W::kPairs];
#pragma unroll
        for (int block = 0; block < kBlocks; ++block)
          W::pairs(b[block], x[block] + word * W::kPairs);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          uint32_t a[2][W::kPairs];
#pragma unroll
          for (int half = 0; half < 2; ++half)
            W::widen(a[half], word_of(own.codes[tile][i][half], word), own.grids[tile][i][half]);
#pragma unroll
          for (int k = 0; k < W::kPairs; k += 2) {
            const uint32_t both[4] = {a[0][k], a[1][k], a[0][k + 1], a[1][k + 1]};
#pragma unroll
            for (int block = 0; block < kBlocks; ++block)
              multiply_tiles<Half>(sums[tile][block], both, b[block][k], b[block][k + 1]);
          }
        }
      }
    }
  }
  // The sums of all warps, by row and output.
  KVLATHE_DYNAMIC_SHARED(shared);
  float* all = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < kBlocks * 4; ++i) {
      const int row = i / 4 * kColumns + lane % 4 * 2 + i % 2;
      const int output = tile * kTile + lane / 4 + i % 4 / 2 * 8;
      all[(warp * kRows + row) * kOutputs + output] = sums[tile][i / 4][i % 4];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * kOutputs; i += kWarps * 32) {
    const int row = i / kOutputs, output = blockIdx.x * kOutputs + i % kOutputs;
    if (row >= p.rows || output >= p.outputs) continue;
    float sum = 0;
#pragma unroll
    for (int other = 0; other < kWarps; ++other) sum += all[other * kRows * kOutputs + i];
    const int64_t to = row * p.out_stride + output;
    sum *= W::scale(p, output);
    if (p.residual) sum += Half::widen(p.residual[to]);
    p.out[to] = Half::round(sum);
  }
}

// A thread takes a piece of an output's codes. Blocks lie along the inputs, and then the outputs.
__global__ void widen_weights(const ProductParams p) {
  constexpr int kWords = Nibbles::kInputs / 2;
  const int piece = blockIdx.x * blockDim.x + threadIdx.x, output = blockIdx.y;
  if (piece * kPiece >= p.row_bytes) return;
  const int64_t at = int64_t{output} * p.row_bytes + piece * kPiece;
  const uint4 codes = load_once(p.codes + at);
  const Nibbles::Grid grid = Nibbles::stored(p, output, piece);
  uint4* to = reinterpret_cast<uint4*>(p.out + 2 * at);
#pragma unroll
  for (int i = 0; i < kWords / 4; ++i) {
    uint32_t x[Nibbles::kPairs];
    Nibbles::widen(x, word_of(codes, i), grid);
    to[i] = {picked_bytes(x[0], x[1], 0x5410), picked_bytes(x[2], x[3], 0x5410),
             picked_bytes(x[0], x[1], 0x7632), picked_bytes(x[2], x[3], 0x7632)};
  }
}

// -- host ---------------------------------------------------------------------

ProductParams params_of(const kvlathe_product_args& a) {
  check_version(a.abi_version);
  require(a.element == KVLATHE_F16, KVLATHE_UNSUPPORTED,
          "products with codes compute with F16 elements only");
  require(is_byte(a.bits) || is_nibble(a.bits), KVLATHE_UNSUPPORTED, "codes must have 8 bits or 4");
  const int inputs = is_byte(a.bits) ? E4m3::kInputs : Nibbles::kInputs;
  require(a.inputs > 0 && a.inputs % inputs == 0 && a.outputs > 0 && a.outputs % kTile == 0,
          KVLATHE_BAD_ARGUMENT,
          "inputs must be a multiple of " + std::to_string(inputs) + " and outputs of 16");
  require(is_byte(a.bits) ||
              (is_power_of_two(a.group) && a.group >= Nibbles::kInputs && a.inputs % a.group == 0),
          KVLATHE_BAD_ARGUMENT, "groups must be a power of two from 32 on that divides inputs");
  require(is_byte(a.bits) || a.scale_stride >= a.outputs, KVLATHE_BAD_ARGUMENT,
          "scales of a group must hold all outputs");
  require(a.codes && a.scales && a.out, KVLATHE_BAD_ARGUMENT, "codes, scales or out is null");
  for (const void* pointer : {a.x, a.codes, static_cast<const void*>(a.out)})
    check_aligned(pointer, 16, "x, codes or out");
  int group_shift = 0;
  while (is_nibble(a.bits) && Nibbles::kInputs << group_shift < a.group) ++group_shift;
  return {static_cast<const char*>(a.codes),
          a.scales,
          a.zeros,
          static_cast<const uint16_t*>(a.x),
          static_cast<const uint16_t*>(a.residual),
          static_cast<uint16_t*>(a.out),
          a.x_stride,
          a.out_stride,
          a.rows,
          a.outputs,
          a.inputs * a.bits / 8,
          group_shift,
          a.scale_stride,
          false};
}

// The weights that a block asks for first do not wait for the kernel before this one.
template <class W, int kTiles, int kSpans, int kBlocks>
void launch(ProductParams p, void* stream) {
  int device = 0, major = 0;
  check_cuda(cudaGetDevice(&device), "asking for the device");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
             "asking for the device's compute capability");
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = (p.outputs + kTiles * kTile - 1) / (kTiles * kTile);
  config.blockDim = kWarps * 32;
  config.dynamicSmemBytes = kWarps * kTiles * kTile * kBlocks * kColumns * sizeof(float);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  p.overlaps = major >= 9;
  config.numAttrs = p.overlaps ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, multiply_rows<W, kTiles, kSpans, kBlocks>, p),
             "launching multiply_rows");
}

template <class W>
void multiply(const ProductParams& p, void* stream) {
  // With more rows of x, more outputs share them.
  if (p.rows <= kColumns / 2) return launch<W, 1, 4, 1>(p, stream);
  if (p.rows <= kColumns) return launch<W, 2, 2, 1>(p, stream);
  launch<W, 2, W::kResident - 1, 2>(p, stream);
}

void product(const kvlathe_product_args& a) {
  const ProductParams p = params_of(a);
  require(a.rows >= 0 && a.rows <= KVLATHE_MAX_PRODUCT_ROWS, KVLATHE_UNSUPPORTED,
          "a product takes up to " + std::to_string(KVLATHE_MAX_PRODUCT_ROWS) + " rows of x");
  require(a.x, KVLATHE_BAD_ARGUMENT, "x is null");
  require(a.x_stride % 8 == 0 && a.x_stride >= a.inputs && a.out_stride >= a.outputs,
          KVLATHE_MISALIGNED,
          "rows of x must start at multiples of 16 bytes, and rows hold all columns");
  if (!a.rows) return;
  if (is_byte(a.bits)) return multiply<E4m3>(p, a.stream);
  multiply<Nibbles>(p, a.stream);
}

void widen(const kvlathe_product_args& a) {
  const ProductParams p = params_of(a);
  require(is_nibble(a.bits) && a.outputs <= 65535, KVLATHE_UNSUPPORTED,
          "up to 65535 outputs of 4 bits are widened at once");
  constexpr int kThreads = 128;
  const int pieces = p.row_bytes / kPiece;
  const dim3 grid((pieces + kThreads - 1) / kThreads, p.outputs);
  ProductParams copy = p;
  void* arguments[] = {&copy};
  check_cuda(cudaLaunchKernel(widen_weights, grid, dim3(kThreads), arguments, 0,
                              static_cast<cudaStream_t>(a.stream)),
             "launching widen_weights");
}

int32_t run_on(const kvlathe_product_args* args, kvlathe_status* status,
               void (*body)(const kvlathe_product_args&)) {
  return kvlathe::run(status, [&] {
    if (!args) throw kvlathe::Refusal(KVLATHE_BAD_ARGUMENT, "args is null");
    body(*args);
  });
}

}  // namespace
}  // namespace kvlathe::cuda

extern "C" int32_t kvlathe_cuda_product(const kvlathe_product_args* args, kvlathe_status* status) {
  return kvlathe::cuda::run_on(args, status, kvlathe::cuda::product);
}

extern "C" int32_t kvlathe_cuda_widen(const kvlathe_product_args* args, kvlathe_status* status) {
  return kvlathe::cuda::run_on(args, status, kvlathe::cuda::widen);
}
