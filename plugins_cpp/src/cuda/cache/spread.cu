// What every query of a packed step may read, and the list of its prompt chunks. One or two small
// kernels find it once a step, and all layers use it.
#include <algorithm>

#include "common/windows.h"
#include "cuda/host.h"
#include "cuda/prefill/prompts.h"
#include "kvlathe/cache.h"

namespace kvlathe::cuda {
namespace {

struct SpreadParams {
  const int32_t *cu_seqlens_q, *lengths;
  int32_t *sequence_of, *visible, *row_lengths, *list;
  int32_t tokens, batch, buckets, group_size;
  uint32_t fresh;
  int32_t least_chunk;
  const int32_t* table[KVLATHE_MAX_PARTS];
  int32_t* out[KVLATHE_MAX_PARTS];
  int32_t width[KVLATHE_MAX_PARTS];
};

// The sequence that has token t: the last one that starts at or before it. -1 past the last token.
__device__ int sequence_of(const SpreadParams& p, int t) {
  if (t >= p.cu_seqlens_q[p.batch]) return -1;
  int low = 0, high = p.batch - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (p.cu_seqlens_q[middle] <= t)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// Whether the rows of a sequence are a chunk, which the list names.
__device__ bool listed(const SpreadParams& p, int b) {
  return p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b] >= p.least_chunk;
}

// A block takes one token.
__global__ void spread_rows(SpreadParams p) {
  const int t = blockIdx.x, b = sequence_of(p, t);
  const bool chunk = b >= 0 && p.list && listed(p, b);
  if (threadIdx.x == 0) p.sequence_of[t] = b;
  if (threadIdx.x < p.buckets) {
    const int s = threadIdx.x, own = p.fresh >> s & 1 ? t + 1 : 0;
    const int visible =
        b < 0 ? 0 : p.lengths[int64_t{b} * p.buckets + s] + (own ? own - p.cu_seqlens_q[b] : 0);
    p.visible[int64_t{t} * p.buckets + s] = visible;
    if (p.list) p.row_lengths[int64_t{t} * p.buckets + s] = chunk ? 0 : visible;
  }
  if (chunk || b < 0) return;
  for (int s = 0; s < p.buckets; ++s) {
    if (!p.out[s]) continue;
    const int32_t* row = p.table[s] + int64_t{b} * p.width[s];
    for (int i = threadIdx.x; i < p.width[s]; i += blockDim.x)
      p.out[s][int64_t{t} * p.width[s] + i] = row[i];
  }
}

// The same where buckets have windows.
struct WindowedSpread : SpreadParams {
  int32_t page_tokens, parts;
  int32_t* hidden;
  int8_t bucket[KVLATHE_MAX_PARTS];  // of each part
  kvlathe_window window[KVLATHE_MAX_PARTS];
};

// Tokens of bucket s that token t of sequence b and those before it make.
__device__ int visible_to(const SpreadParams& p, int t, int b, int s) {
  const int own = p.fresh >> s & 1 ? t + 1 - p.cu_seqlens_q[b] : 0;
  return p.lengths[int64_t{b} * p.buckets + s] + own;
}

// What token t of sequence b keeps of part i.
__device__ Kept kept_of_row(const WindowedSpread& p, int t, int b, int i) {
  const kvlathe_window& window = p.window[i];
  const int32_t* lengths = p.lengths + int64_t{b} * p.buckets;
  const int s = p.bucket[i], sealed = window.sealed < 0 ? 0 : lengths[window.sealed];
  const int place = sealed + lengths[window.fresh] + t - p.cu_seqlens_q[b];
  return kept_of(window, place, s == window.fresh ? sealed : 0, visible_to(p, t, b, s),
                 p.page_tokens);
}

// A block takes one token, and each of its warps a part.
__global__ void spread_windows(WindowedSpread p) {
  __shared__ Kept kept[KVLATHE_MAX_PARTS];
  const int t = blockIdx.x, b = sequence_of(p, t), own = threadIdx.x;
  const bool chunk = b >= 0 && p.list && listed(p, b);
  if (own == 0) p.sequence_of[t] = b;
  if (own < p.buckets)
    p.visible[int64_t{t} * p.buckets + own] = b < 0 ? 0 : visible_to(p, t, b, own);
  if (own < p.parts) {
    const int64_t at = int64_t{t} * p.parts + own;
    kept[own] = b < 0 ? Kept{} : kept_of_row(p, t, b, own);
    p.row_lengths[at] = chunk ? 0 : kept[own].tokens;
    if (p.hidden)
      p.hidden[2 * at] = kept[own].hidden.begin, p.hidden[2 * at + 1] = kept[own].hidden.end;
  }
  if (chunk || b < 0) return;
  __syncthreads();
  for (int i = own / 32; i < p.parts; i += blockDim.x / 32) {
    if (!p.out[i]) continue;
    const int s = p.bucket[i], width = p.width[s];
    const int32_t* row = p.table[s] + int64_t{b} * width;
    const int pages = min((kept[i].tokens + p.page_tokens - 1) / p.page_tokens, width);
    for (int n = own % 32; n < pages; n += 32)
      p.out[i][int64_t{t} * width + n] = row[n < kept[i].sink ? n : n + kept[i].gone];
  }
}

// With windows, else with no page_tokens.
struct BundleParams : WindowedSpread {
  const int32_t* from;
  int32_t most;
};

// Gives row t the pages of a part that row `last` has beyond it. Both see the same first ones.
__device__ void add_pages(const BundleParams& p, int t, int last, int part, int tokens, int more) {
  const int width = p.width[p.bucket[part]], page = p.page_tokens;
  for (int n = (tokens + page - 1) / page; n < (more + page - 1) / page; ++n)
    p.out[part][int64_t{t} * width + n] = p.out[part][int64_t{last} * width + n];
}

// The lengths of bundles (KVLATHE_BUNDLES) from those of single rows, `from`. A warp takes each
// most-th row of a sequence and those up to the next, and its lanes the parts. Rows that see other
// pages than the first of them in some part stay alone.
__global__ void bundle_rows(BundleParams p) {
  const int32_t* from = p.from;
  const int parts = p.parts, t = blockIdx.x, b = sequence_of(p, t), part = threadIdx.x;
  const int before = b < 0 ? 0 : (t - p.cu_seqlens_q[b]) % p.most;
  if (before || (b >= 0 && listed(p, b))) return;
  const int rows = b < 0 ? 1 : min(p.most, p.cu_seqlens_q[b + 1] - t), last = t + rows - 1;
  const int64_t at = int64_t{t} * parts + part;
  const int least = part < parts ? from[at] : 0,
            length = part < parts ? from[int64_t{last} * parts + part] : 0;
  const bool stepped = length != least;
  const bool together = __all_sync(~0u, !stepped || length == least + rows - 1);
  if (part >= parts) return;
  if (together && p.page_tokens && p.out[part]) add_pages(p, t, last, part, least, length);
  for (int i = 1; i < rows; ++i)
    p.row_lengths[at + i * parts] = together ? -1 : from[at + i * parts];
  p.row_lengths[at] =
      together ? length | (stepped ? KVLATHE_STEPPED : 0) | (rows - 1) << KVLATHE_BUNDLE_SHIFT
               : least;
}

constexpr int kBins = 1024;

// The bin of a tile. Tiles with more keys come in earlier bins, one for each 1/32 of a power of
// two: the bits of a float say which.
__device__ int bin_of(const SpreadParams& p, int b, int first, int rows) {
  int keys = (min(first + kPromptRows, rows) - 1) / p.group_size + 1;
  for (int s = 0; s < p.buckets; ++s) keys += p.lengths[int64_t{b} * p.buckets + s];
  return kBins - 1 - min(kBins - 1, (__float_as_int(float(keys)) >> 18) - (127 << 5));
}

// Runs body(sequence, first row, bin) for each tile of each chunk. A warp takes a sequence, and its
// lanes the tiles.
template <class Body>
__device__ void each_tile(const SpreadParams& p, Body body) {
  for (int b = threadIdx.x / 32; b < p.batch; b += blockDim.x / 32) {
    if (!listed(p, b)) continue;
    const int rows = (p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b]) * p.group_size;
    for (int first = threadIdx.x % 32 * kPromptRows; first < rows; first += 32 * kPromptRows)
      body(b, first, bin_of(p, b, first, rows));
  }
}

// Lists the tiles, the longest first: counts those of each bin, finds where bins start, and puts
// the tiles there. One block of kBins threads.
__global__ void __launch_bounds__(kBins) list_prompts(SpreadParams p) {
  __shared__ int start[kBins], sums[32];
  const int t = threadIdx.x, lane = t % 32;
  start[t] = 0;
  __syncthreads();
  each_tile(p, [&](int, int, int bin) { atomicAdd(&start[bin], 1); });
  __syncthreads();
  const int own = start[t];
  int upto = own;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, upto, step);
    if (lane >= step) upto += other;
  }
  if (lane == 31) sums[t / 32] = upto;
  __syncthreads();
  for (int warp = 0; warp < t / 32; ++warp) upto += sums[warp];
  start[t] = upto - own;
  if (t == kBins - 1) p.list[kTiles] = upto, p.list[kTaken] = p.list[kDone] = 0;
  __syncthreads();
  each_tile(p, [&](int b, int first, int bin) {
    int32_t* at = p.list + kListHeader + 2 * atomicAdd(&start[bin], 1);
    at[0] = b, at[1] = first;
  });
}

SpreadParams params_of(const kvlathe_spread_args& a) {
  SpreadParams p{};
  p.cu_seqlens_q = a.cu_seqlens_q, p.lengths = a.lengths, p.sequence_of = a.sequence_of,
  p.visible = a.visible;
  p.row_lengths = a.row_lengths, p.list = a.prompts;
  p.tokens = a.tokens, p.batch = a.batch, p.buckets = a.buckets, p.group_size = a.group_size;
  p.fresh = a.fresh;
  p.least_chunk = a.prompts && prompt_kernel_here() ? kLeastChunk : INT32_MAX;
  for (int s = 0; s < a.buckets; ++s)
    p.table[s] = a.page_tables[s], p.width[s] = a.page_table_widths[s];
  std::copy_n(a.spread_tables, a.parts, p.out);
  return p;
}

bool is_bucket(int32_t s, const kvlathe_spread_args& a) { return s >= 0 && s < a.buckets; }

WindowedSpread windowed_params_of(const kvlathe_spread_args& a) {
  WindowedSpread p{params_of(a), a.page_tokens, a.parts, a.hidden, {}, {}};
  require(a.row_lengths && a.part_buckets && a.page_tokens >= 1, KVLATHE_BAD_ARGUMENT,
          "windows without row_lengths, part_buckets or page_tokens");
  for (int i = 0; i < a.parts; ++i) {
    const kvlathe_window& window = p.window[i] = a.windows[i];
    p.bucket[i] = int8_t(a.part_buckets[i]);
    require(is_bucket(a.part_buckets[i], a) && is_bucket(window.fresh, a) &&
                (window.sealed == -1 || is_bucket(window.sealed, a)),
            KVLATHE_BAD_ARGUMENT, "a window names a bucket that is not there");
    require(window.sink >= 0 && window.recent >= 0 && window.exact >= 0, KVLATHE_BAD_ARGUMENT,
            "a window has a negative length");
  }
  return p;
}

template <class P>
void launch(void (*kernel)(P), int blocks, int threads, P params, void* stream) {
  void* arguments[] = {&params};
  check_cuda(cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), arguments, 0,
                              static_cast<cudaStream_t>(stream)),
             "launching spread");
}

void spread(const kvlathe_spread_args& a) {
  check_version(a.abi_version);
  require(a.tokens >= 0 && a.batch >= 1, KVLATHE_BAD_ARGUMENT,
          "tokens is negative or batch below 1");
  check_bucket_count(a.parts);
  require(a.buckets >= 1 && a.buckets <= a.parts && (a.windows || a.buckets == a.parts),
          KVLATHE_BAD_ARGUMENT, "the parts are not those of the buckets");
  require(a.cu_seqlens_q && a.lengths && a.page_tables && a.page_table_widths && a.sequence_of &&
              a.visible && a.spread_tables,
          KVLATHE_BAD_ARGUMENT, "a pointer is null");
  require(!a.prompts || (a.row_lengths && a.group_size >= 1), KVLATHE_BAD_ARGUMENT,
          "prompts without row_lengths or group_size");
  require(a.windows || !a.hidden, KVLATHE_BAD_ARGUMENT, "hidden without windows");
  require(a.most_bundled >= 0 && a.most_bundled <= KVLATHE_MAX_BUNDLE, KVLATHE_BAD_ARGUMENT,
          "most_bundled is negative or above " + std::to_string(KVLATHE_MAX_BUNDLE));
  require(a.most_bundled < 2 || a.row_lengths, KVLATHE_BAD_ARGUMENT, "bundles without row_lengths");
  const WindowedSpread windowed = a.windows ? windowed_params_of(a) : WindowedSpread{};
  if (a.tokens == 0) return;
  const SpreadParams p = params_of(a);
  if (a.windows)
    launch(spread_windows, a.tokens, 128, windowed, a.stream);
  else
    launch(spread_rows, a.tokens, 128, p, a.stream);
  if (a.prompts) launch(list_prompts, 1, kBins, p, a.stream);
  BundleParams bundles{windowed, a.prompts || a.windows ? a.row_lengths : a.visible,
                       a.most_bundled};
  if (!a.windows) static_cast<SpreadParams&>(bundles) = p, bundles.parts = a.parts;
  if (a.most_bundled > 1) launch(bundle_rows, a.tokens, 32, bundles, a.stream);
}

}  // namespace
}  // namespace kvlathe::cuda

extern "C" int32_t kvlathe_cuda_spread(const kvlathe_spread_args* args, kvlathe_status* status) {
  return kvlathe::run(status, [&] {
    if (!args) throw kvlathe::Refusal(KVLATHE_BAD_ARGUMENT, "args is null");
    kvlathe::cuda::spread(*args);
  });
}
