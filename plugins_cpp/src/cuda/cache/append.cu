// Appends a layer's fresh tokens: RoPE, projection, centre and rounding, then each row goes to its
// place. It is one kernel, because separate ones would pass every row through memory again.
//
// A block takes 16 rows of one lane at a time: query heads of a few tokens (z = 0), keys of 16
// tokens (z = 1), or their values (z = 2): neither waits for the other. RoPE turns the rows on their
// way into shared memory. Tensor cores multiply them there with the lane's matrix. That is larger
// than the rows, so in large steps a block keeps it for several of them. A layer that reads the
// pages of another has queries alone.
//
// Where no lane is projected, rows need no shared memory: a thread takes 16 bytes of each half of a
// row, turns them and writes them (append_pieces).
#include <algorithm>
#include <limits>

#include "common/layer_table.h"
#include "common/limits.h"
#include "cuda/decode/params.h"
#include "cuda/host.h"
#include "cuda/warp.cuh"
#include "kvlathe/cache.h"

namespace kvlathe::cuda {
namespace {

constexpr int kRows = 16;  // the M of mma.m16n8k16
constexpr int kWarps = 8;
constexpr int kBlocksAnSm = 16;  // of a launch: twice what an SM has threads for
constexpr int kPad = 8;  // elements between rows in shared memory: no bank conflicts in ldmatrix

struct AppendLane {
  int32_t q_at, k_at, v_at, q_out_at, rows_k_at, rows_v_at;  // elements
  int32_t k, v;                                              // bytes from the page's start
  int32_t planes_at;                                         // 0: pair i turns by plane i
  uint16_t input_dim, rank_k, rank_v;
  uint8_t rope, projected, fresh, index;
};

struct AppendTable {
  const int32_t* pages;
  int64_t page_stride;
  int32_t width;
};

struct AppendParams {
  const uint16_t *q, *k, *v, *cos, *sin, *proj_q, *proj_k, *centre_k;
  int64_t q_stride, k_stride, v_stride, q_out_stride, rows_stride;
  const int32_t *sequence_of, *visible, *layout;
  char* pool;
  uint16_t *q_out, *rows;
  int32_t tokens, buckets, group_size, page_tokens, planes, proj_rows, proj_columns;
  AppendTable table[KVLATHE_MAX_PARTS];
  AppendLane lane[KVLATHE_MAX_HEADS];
};
static_assert(sizeof(AppendParams) <= 4096);

__host__ __device__ inline int padded(int n) { return (n + 15) / 16 * 16; }

// Where token t of the step puts its row of a lane's K or V, which has `rank` elements a token from
// byte `offset` of the page on.
__device__ char* place_of(const AppendParams& p, const AppendLane& lane, int t, int offset,
                          int rank) {
  const AppendTable& table = p.table[lane.fresh];
  const int place = p.visible[int64_t{t} * p.buckets + lane.fresh] - 1;
  const int64_t page = table.pages[int64_t{p.sequence_of[t]} * table.width + place / p.page_tokens];
  return p.pool + page * table.page_stride + offset + place % p.page_tokens * rank * 2;
}

// As turn_row, where pairs of neighbours lie side by side and so do their angles: two at a time.
template <class E>
__device__ void turn_neighbours(const AppendLane& lane, const uint16_t* from, const uint16_t* cos,
                                const uint16_t* sin, uint16_t* to) {
  const int half = lane.input_dim / 2;
  const auto at = [](const uint16_t* x) { return *reinterpret_cast<const uint32_t*>(x); };
  for (int pair = threadIdx.x % 32 * 2; pair < half; pair += 64) {
    const uint32_t a = at(from + pair), b = at(from + half + pair), c = at(cos + pair),
                   s = at(sin + pair);
    float turned[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto widened = [i](uint32_t x) { return E::widen(uint16_t(x >> 16 * i)); };
      const float x = widened(a), y = widened(b), u = widened(c), v = widened(s);
      turned[0][i] = x * u - y * v, turned[1][i] = y * u + x * v;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
      *reinterpret_cast<uint32_t*>(to + i * half + pair) = E::pack(turned[i][0], turned[i][1]);
  }
}

// Turns a row of a lane's input into shared memory, with zeros up to `inner`. One warp. A lane asks
// for kPairs pairs before it needs the first.
template <class E>
__device__ void turn_row(const AppendParams& p, const AppendLane& lane, const uint16_t* from, int t,
                         int inner, uint16_t* to) {
  constexpr int kPairs = 2;
  const int half = lane.input_dim / 2;
  const uint16_t *cos = p.cos + int64_t{t} * p.planes, *sin = p.sin + int64_t{t} * p.planes;
  for (int i = lane.input_dim + threadIdx.x % 32; i < inner; i += 32) to[i] = 0;
  const auto even = [](const void* x) { return reinterpret_cast<uintptr_t>(x) % 4 == 0; };
  if (lane.rope && !lane.planes_at && half % 2 == 0 && even(from) && even(cos) && even(sin))
    return turn_neighbours<E>(lane, from, cos, sin, to);
  for (int first = threadIdx.x % 32; first < half; first += 32 * kPairs) {
    uint16_t a[kPairs], b[kPairs], c[kPairs], s[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int pair = min(first + 32 * i, half - 1),
                plane = lane.planes_at ? p.layout[lane.planes_at + pair] : pair;
      a[i] = from[pair], b[i] = from[pair + half];
      if (lane.rope) c[i] = cos[plane], s[i] = sin[plane];
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int pair = first + 32 * i;
      if (pair >= half) continue;
      const float x = E::widen(a[i]), y = E::widen(b[i]), u = E::widen(c[i]), v = E::widen(s[i]);
      to[pair] = lane.rope ? E::round(x * u - y * v) : a[i];
      to[pair + half] = lane.rope ? E::round(y * u + x * v) : b[i];
    }
  }
}

// Fetches the lane's matrix [padded input_dim, rank_k] into shared memory. Rows past input_dim are
// zeros.
__device__ void fetch_matrix(const AppendParams& p, const AppendLane& lane, const uint16_t* matrix,
                             uint16_t* shared) {
  const int chunks = lane.rank_k / 8, count = padded(lane.input_dim) * chunks;
  matrix += int64_t{lane.index} * p.proj_rows * p.proj_columns;
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int row = i / chunks, chunk = i % chunks;
    copy16(shared_address(shared + row * (lane.rank_k + kPad) + chunk * 8),
           matrix + int64_t{row} * p.proj_columns + chunk * 8, row < lane.input_dim);
  }
  close_copy_group();
}

// out [16, rank] = x [16, inner] * matrix [inner, rank] - centre, rounded. All lie in shared memory
// but the centre.
template <class E>
__device__ void multiply(const uint16_t* x, const uint16_t* matrix, const uint16_t* centre,
                         uint16_t* out, int inner, int rank) {
  const int lane = threadIdx.x % 32;
  for (int column = threadIdx.x / 32 * 16; column < rank; column += kWarps * 16) {
    float sums[2][4] = {};
    for (int step = 0; step < inner; step += 16) {
      uint32_t a[4], b[4];
      load_matrices(a, shared_address(x + lane % 16 * (inner + kPad) + step + lane / 16 * 8));
      load_matrices_transposed(
          b, shared_address(matrix + (step + lane % 16) * (rank + kPad) + column + lane / 16 * 8));
      multiply_tiles<E>(sums[0], a, b[0], b[1]);
      multiply_tiles<E>(sums[1], a, b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = lane / 4 + i / 2 % 2 * 8, c = column + i / 4 * 8 + lane % 4 * 2 + i % 2;
      out[row * (rank + kPad) + c] =
          E::round(sums[i / 4][i % 4] - (centre ? E::widen(centre[c]) : 0.f));
    }
  }
}

__device__ void copy_row(void* to, const void* from, int elements, int begin, int step) {
  for (int i = begin; i < elements / 8; i += step)
    static_cast<uint4*>(to)[i] = static_cast<const uint4*>(from)[i];
}

__device__ void append_values(const AppendParams& p, const AppendLane& lane, int first, int count) {
  const int warp = threadIdx.x / 32;
  for (int i = warp; i < count; i += kWarps) {
    const int t = first + i;
    if (p.sequence_of[t] < 0) continue;
    const uint16_t* from = p.v + t * p.v_stride + lane.v_at;
    copy_row(place_of(p, lane, t, lane.v, lane.rank_v), from, lane.rank_v, threadIdx.x % 32, 32);
    if (p.rows)
      copy_row(p.rows + t * p.rows_stride + lane.rows_v_at, from, lane.rank_v, threadIdx.x % 32,
               32);
  }
}

template <class E>
__global__ void __launch_bounds__(kWarps * 32, 5)
    append_rows(const __grid_constant__ AppendParams p) {
  KVLATHE_DYNAMIC_SHARED(bytes);
  auto* shared = reinterpret_cast<uint16_t*>(bytes);  // matrix | x [16, inner] | out [16, rank]
#if __CUDA_ARCH__ >= 900
  // Attention may start now: it prepares itself, and waits for the end of this kernel.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  const AppendLane& lane = p.lane[blockIdx.y];
  const bool keys = blockIdx.z == 1;
  const int heads = blockIdx.z ? 1 : p.group_size, inner = padded(lane.input_dim),
            rank = lane.rank_k;
  const int all = p.tokens * heads;
  if (int(blockIdx.x) * kRows >= all) return;
  uint16_t *matrix = shared, *x = matrix + (lane.projected ? inner * (rank + kPad) : 0),
           *out = x + kRows * (inner + kPad);
  if (lane.projected && blockIdx.z < 2) fetch_matrix(p, lane, keys ? p.proj_k : p.proj_q, matrix);
#pragma unroll 1
  for (int first = blockIdx.x * kRows; first < all; first += gridDim.x * kRows) {
    const int rows = min(kRows, all - first);
    if (blockIdx.z == 2) {
      append_values(p, lane, first, rows);
      continue;
    }
#pragma unroll
    for (int i = 0; i < kRows / kWarps; ++i) {
      // Rows past the last one: the last once more.
      const int row = threadIdx.x / 32 + i * kWarps, at = first + min(row, rows - 1),
                t = at / heads;
      const uint16_t* from = keys ? p.k + t * p.k_stride + lane.k_at
                                  : p.q + t * p.q_stride + lane.q_at + at % heads * lane.input_dim;
      turn_row<E>(p, lane, from, t, inner, x + row * (inner + kPad));
    }
    if (lane.projected) {
      wait_copy_groups<0>();
      __syncthreads();
      multiply<E>(x, matrix, keys ? p.centre_k + int64_t{lane.index} * p.proj_columns : nullptr,
                  out, inner, rank);
      __syncthreads();
    }
    __syncwarp();  // a warp writes the rows that it turned, where none was projected
    const uint16_t* done = lane.projected ? out : x;  // unprojected: rank is inner
    for (int row = threadIdx.x / 32; row < rows; row += kWarps) {
      const uint16_t* from = done + row * (rank + kPad);
      const int t = (first + row) / heads, l = threadIdx.x % 32;
      if (!keys) {
        copy_row(p.q_out + t * p.q_out_stride + lane.q_out_at + (first + row) % heads * rank, from,
                 rank, l, 32);
      } else if (p.sequence_of[t] >= 0) {
        copy_row(place_of(p, lane, t, lane.k, rank), from, rank, l, 32);
        if (p.rows) copy_row(p.rows + t * p.rows_stride + lane.rows_k_at, from, rank, l, 32);
      }
    }
    __syncwarp();  // and turns its next rows where these were
  }
}

constexpr int kPiece = 8;         // elements of 16 bytes
constexpr int kPiecesAtOnce = 2;  // which a thread asks for before it needs the first

// 8 pairs of a row: what a thread takes of it, of Q or K.
struct Pairs {
  uint4 first, second, cos, sin;
};

template <class E>
__device__ void turn_pairs(Pairs& x) {
  uint32_t *first = &x.first.x, *second = &x.second.x;
  const uint32_t *cos = &x.cos.x, *sin = &x.sin.x;
#pragma unroll
  for (int word = 0; word < kPiece / 2; ++word) {
    float turned[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto widened = [&](const uint32_t* from) {
        return E::widen(uint16_t(from[word] >> 16 * i));
      };
      const float a = widened(first), b = widened(second), c = widened(cos), s = widened(sin);
      turned[0][i] = a * c - b * s, turned[1][i] = b * c + a * s;
    }
    first[word] = E::pack(turned[0][0], turned[0][1]);
    second[word] = E::pack(turned[1][0], turned[1][1]);
  }
}

__device__ inline uint4 piece_at(const uint16_t* row, int piece) {
  return reinterpret_cast<const uint4*>(row)[piece];
}

// Appends rows of a layer without projections, whose pieces are aligned (has_pieces). As
// append_rows; z has the same roles.
template <class E>
__global__ void __launch_bounds__(kWarps * 32, 4)
    append_pieces(const __grid_constant__ AppendParams p) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  const AppendLane& lane = p.lane[blockIdx.y];
  const bool keys = blockIdx.z == 1, values = blockIdx.z == 2;
  const int heads = blockIdx.z ? 1 : p.group_size, half = lane.input_dim / 2,
            pieces = values ? lane.rank_v / kPiece : half / kPiece, all = p.tokens * heads * pieces,
            step = gridDim.x * blockDim.x;
#pragma unroll 1
  for (int first = blockIdx.x * blockDim.x + threadIdx.x; first < all;
       first += step * kPiecesAtOnce) {
    Pairs x[kPiecesAtOnce];
#pragma unroll
    for (int i = 0; i < kPiecesAtOnce; ++i) {
      const int at = min(first + i * step, all - 1), row = at / pieces, piece = at % pieces,
                t = row / heads;
      if (values) {
        x[i].first = piece_at(p.v + t * p.v_stride + lane.v_at, piece);
        continue;
      }
      const uint16_t* from = keys ? p.k + t * p.k_stride + lane.k_at
                                  : p.q + t * p.q_stride + lane.q_at + row % heads * lane.input_dim;
      x[i].first = piece_at(from, piece), x[i].second = piece_at(from + half, piece);
      if (!lane.rope) continue;
      x[i].cos = piece_at(p.cos + int64_t{t} * p.planes, piece);
      x[i].sin = piece_at(p.sin + int64_t{t} * p.planes, piece);
    }
#pragma unroll
    for (int i = 0; i < kPiecesAtOnce; ++i) {
      const int at = first + i * step, row = at / pieces, piece = at % pieces, t = row / heads;
      if (at >= all) break;
      uint4* to;
      if (blockIdx.z == 0) {
        to = reinterpret_cast<uint4*>(p.q_out + t * p.q_out_stride + lane.q_out_at +
                                      row % heads * lane.input_dim);
      } else if (p.sequence_of[t] < 0) {
        continue;
      } else {
        to = reinterpret_cast<uint4*>(
            place_of(p, lane, t, values ? lane.v : lane.k, values ? lane.rank_v : lane.rank_k));
      }
      if (lane.rope && !values) turn_pairs<E>(x[i]);
      to[piece] = x[i].first;
      if (!values) to[half / kPiece + piece] = x[i].second;
    }
  }
}

// -- host ---------------------------------------------------------------------

// The products run on tensor cores, which take bfloat16 from 8.0 on.
void check_device(int32_t element) {
  const int major = attribute(cudaDevAttrComputeCapabilityMajor);
  require(major >= 8 || element == KVLATHE_F16, KVLATHE_UNSUPPORTED,
          "this device has compute capability " + std::to_string(major) + ".x: bfloat16 needs 8.0");
}

void check(const Layer& layer, const kvlathe_append_args& a) {
  const TableHeader& t = layer.head;
  check_version(a.abi_version);
  check_element(a.element);
  check_device(a.element);
  require(a.tokens >= 0, KVLATHE_BAD_ARGUMENT, "tokens is negative");
  require(is_half(t.hot_bits), KVLATHE_UNSUPPORTED,
          "the CUDA kernels append to 16-bit pages and the plan's hot pages have 32 bits");
  check_bucket_count(t.buckets);
  check_lane_count(t.lanes);
  if (a.tokens == 0) return;
  require(a.q && a.sequence_of && a.visible && a.page_tables && a.page_table_widths && a.pool &&
              a.q_out,
          KVLATHE_BAD_ARGUMENT, "q, sequence_of, visible, page_tables, pool or q_out is null");
  require(!a.k == !a.v && (a.k || !a.rows), KVLATHE_BAD_ARGUMENT,
          "one of k and v is null, or both and rows is not");
  require(!t.rope || (a.cos && a.sin), KVLATHE_BAD_ARGUMENT,
          "the layer has RoPE and cos or sin is null");
  require(!t.projected || (a.proj_q && a.proj_k && a.centre_k), KVLATHE_BAD_ARGUMENT,
          "the layer projects and a projection is null");
  check_aligned(a.pool, 128, "the pool");
  for (const void* pointer : {a.v, a.proj_q, a.proj_k, static_cast<const void*>(a.q_out),
                              static_cast<const void*>(a.rows)}) {
    check_aligned(pointer, 16, "v, a projection, q_out or rows");
  }
  require(a.v_stride % 8 == 0 && a.q_out_stride % 8 == 0, KVLATHE_MISALIGNED,
          "rows of v and q_out must start at multiples of 16 bytes");
  require(a.q_stride >= layer.q_width &&
              (!a.k || (a.k_stride >= layer.k_width && a.v_stride >= layer.v_width)),
          KVLATHE_TOO_SMALL, "a row of q, k or v is shorter than the lanes need");
  for (const Bucket& bucket : layer.buckets) {
    require(bucket.page_stride <= a.pool_bytes, KVLATHE_TOO_SMALL,
            "the pool is smaller than one page");
  }
}

AppendLane lane_of(const Layer& layer, size_t h, int64_t q_out_at, const kvlathe_append_args& a) {
  const Lane& lane = layer.lanes[h];
  const std::string where = "the lane of head " + std::to_string(lane.head);
  check_cuda_lane(lane.rank_k, lane.rank_v);
  require(lane.input_dim <= kMaxInput, KVLATHE_UNSUPPORTED,
          where + " is wider than " + std::to_string(kMaxInput) + " before its projection");
  require(lane.projected || padded(lane.input_dim) == lane.rank_k, KVLATHE_BAD_ARGUMENT,
          where + " is not projected and pads more than it must");
  require(!lane.planes_at || a.layout, KVLATHE_BAD_ARGUMENT,
          where + " keeps chosen RoPE planes and layout is null");
  const LaneRow& slab = *layer.buckets[lane.fresh].rows[h];
  AppendLane out{};
  out.q_at = int32_t(lane.q_at), out.k_at = int32_t(lane.k_at), out.v_at = int32_t(lane.v_at),
  out.q_out_at = int32_t(q_out_at);
  out.rows_k_at = int32_t(lane.rows_k_at), out.rows_v_at = int32_t(lane.rows_v_at);
  out.k = slab.k, out.v = slab.v, out.planes_at = lane.planes_at;
  out.input_dim = uint16_t(lane.input_dim), out.rank_k = uint16_t(lane.rank_k),
  out.rank_v = uint16_t(lane.values_in_keys ? 0 : lane.rank_v);  // else K's rows have them
  out.rope = lane.rope != 0, out.projected = lane.projected != 0, out.fresh = uint8_t(lane.fresh),
  out.index = uint8_t(h);
  return out;
}

AppendParams params_of(const Layer& layer, const kvlathe_append_args& a) {
  const TableHeader& t = layer.head;
  const auto elements = [](const void* x) { return static_cast<const uint16_t*>(x); };
  AppendParams p{};
  p.q = elements(a.q), p.k = elements(a.k), p.v = elements(a.v), p.cos = elements(a.cos),
  p.sin = elements(a.sin);
  p.proj_q = elements(a.proj_q), p.proj_k = elements(a.proj_k), p.centre_k = elements(a.centre_k);
  p.q_stride = a.q_stride, p.k_stride = a.k_stride, p.v_stride = a.v_stride,
  p.q_out_stride = a.q_out_stride;
  p.rows_stride = layer.rows_width;
  p.sequence_of = a.sequence_of, p.visible = a.visible, p.layout = a.layout;
  p.pool = static_cast<char*>(a.pool), p.q_out = static_cast<uint16_t*>(a.q_out),
  p.rows = static_cast<uint16_t*>(a.rows);
  p.tokens = a.tokens, p.buckets = t.buckets, p.group_size = t.group_size,
  p.page_tokens = t.page_tokens, p.planes = t.planes;
  p.proj_rows = t.input_dim, p.proj_columns = t.rank_k;
  for (int32_t s = 0; s < t.buckets; ++s)
    p.table[s] = {a.page_tables[s], layer.buckets[s].page_stride, a.page_table_widths[s]};
  int64_t q_out_at = 0;
  for (size_t h = 0; h < layer.lanes.size(); ++h) {
    p.lane[h] = lane_of(layer, h, q_out_at, a);
    q_out_at += int64_t{t.group_size} * layer.lanes[h].rank_k;
  }
  require(q_out_at <= a.q_out_stride, KVLATHE_TOO_SMALL,
          "a row of q_out is shorter than the lanes' ranks need");
  return p;
}

void launch(void (*kernel)(AppendParams), dim3 grid, int shared, AppendParams p,
            const kvlathe_append_args& a) {
  void* arguments[] = {&p};
  check_cuda(cudaLaunchKernel(kernel, grid, dim3(kWarps * 32), arguments, size_t(shared),
                              static_cast<cudaStream_t>(a.stream)),
             "launching append");
}

// Whether append_pieces takes a call: rows as they are, in whole pieces of 16 bytes. `rows` would be
// a second place to write to.
bool has_pieces(const Layer& layer, const AppendParams& p) {
  if (p.rows || p.planes % kPiece) return false;
  for (const void* rows : {p.q, p.k, p.cos, p.sin}) {
    if (reinterpret_cast<uintptr_t>(rows) % 16) return false;
  }
  if (p.q_stride % kPiece || (p.k && p.k_stride % kPiece)) return false;
  return std::all_of(p.lane, p.lane + layer.lanes.size(), [](const AppendLane& lane) {
    const int places = lane.q_at | lane.k_at | lane.v_at | lane.q_out_at;
    return !lane.projected && !lane.planes_at && lane.input_dim % (2 * kPiece) == 0 &&
           lane.input_dim == lane.rank_k && places % kPiece == 0;
  });
}

void launch_pieces(const Layer& layer, const AppendParams& p, const kvlathe_append_args& a) {
  int widest = 0;  // pieces of a row of Q or V
  for (const AppendLane* lane = p.lane; lane < p.lane + layer.lanes.size(); ++lane) {
    const int pieces = p.group_size * lane->input_dim / (2 * kPiece);
    widest = std::max({widest, pieces, lane->rank_v / kPiece});
  }
  const int threads = kWarps * 32, lanes = layer.head.lanes,
            most =
                std::max(1, kBlocksAnSm * attribute(cudaDevAttrMultiProcessorCount) / (2 * lanes));
  const int64_t blocks = (int64_t{a.tokens} * widest + threads - 1) / threads;
  const dim3 grid(unsigned(std::min<int64_t>(blocks, most)), lanes, a.k ? 3 : 1);
  launch(a.element == KVLATHE_F16 ? append_pieces<Half> : append_pieces<Bfloat>, grid, 0, p, a);
}

void append(const Layer& layer, const kvlathe_append_args& a) {
  check(layer, a);
  const AppendParams p = params_of(layer, a);
  if (a.tokens == 0) return;
  if (has_pieces(layer, p)) return launch_pieces(layer, p, a);
  int elements = 0;
  for (const AppendLane* lane = p.lane; lane < p.lane + layer.lanes.size(); ++lane) {
    const int inner = padded(lane->input_dim), rank = lane->rank_k;
    elements = std::max(
        elements, (lane->projected ? inner + kRows : 0) * (rank + kPad) + kRows * (inner + kPad));
  }
  const int lanes = layer.head.lanes, tiles = (a.tokens * p.group_size + kRows - 1) / kRows,
            most =
                std::max(1, kBlocksAnSm * attribute(cudaDevAttrMultiProcessorCount) / (3 * lanes));
  const dim3 grid(std::min(tiles, most), lanes, a.k ? 3 : 1);
  const auto kernel = a.element == KVLATHE_F16 ? append_rows<Half> : append_rows<Bfloat>;
  check_shared(elements * 2, "rows and projections of ranks this large");
  reserve_shared(kernel, elements * 2);
  launch(kernel, grid, elements * 2, p, a);
}

}  // namespace
}  // namespace kvlathe::cuda

extern "C" int32_t kvlathe_cuda_append(const kvlathe_layer* layer, const kvlathe_append_args* args,
                                       kvlathe_status* status) {
  return kvlathe::run(status, [&] {
    if (!layer || !args) throw kvlathe::Refusal(KVLATHE_BAD_ARGUMENT, "layer or args is null");
    kvlathe::cuda::append(*layer, *args);
  });
}
