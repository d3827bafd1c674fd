// Seals full 16-bit pages: quantizes them into the bytes of kvlathe/plan/codec.py.
//
// A block takes K or V of one lane of one page, and reads the slab into shared memory. Then one
// thread for each quantization group finds its range, and writes its (scale, minimum) and its
// codes. The compiler may contract nothing and divide nothing fast here: codes must not depend on
// who computes them.
#include <algorithm>

#include "common/float8.h"
#include "common/hash.h"
#include "cuda/cache/pages.h"
#include "cuda/warp.cuh"
#include "kvlathe/cache.h"

namespace kvlathe::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kLanesAtOnce = 256, kListedLanesAtOnce = 32;
constexpr int kPagesAtOnce = 512, kListedPagesAtOnce = 65535;

// K or V of one lane. Offsets are bytes from the page's start. Of the groups of a row the first
// `extra` have 16 (steps + 1) elements, the others 16 steps. Along the tokens the last one has what
// is left.
struct SealSlab {
  int32_t source, target, meta;
  uint32_t key;      // of the noise
  float span, past;  // of a group's range: what codes cover, and what lies below that
  uint16_t rank, bits, groups, steps, extra, by_token;

  // What stands in the place of a span, where codes have none.
  static constexpr float kFixedLevels = 0, kFloats = -1;
};

// What codes the pages of a call may have beside even levels of 8, 4 and 2 bits: none; fixed levels
// and 3 bits; floats of 8 bits, too. Each has a kernel of its own, whose code is as short.
enum class SealKinds { kEven, kAny, kFloats };

struct SealForm {
  char* pool;
  int64_t source_stride, target_stride;
  int32_t page_tokens, stochastic;
};
struct SealParams : SealForm {
  static constexpr int kMostLanes = kLanesAtOnce, kMostPages = kPagesAtOnce;
  SealSlab slab[kMostLanes][2];
  kvlathe_cuda_seal_page page[kMostPages];

  void take(const kvlathe_cuda_seal_page* pages, int count) { std::copy_n(pages, count, page); }
};
static_assert(sizeof(SealParams) <= 32764, "a kernel takes no more parameters");

// Pages that lie in device memory. Few lanes: a CUDA graph of many layers keeps its parameters.
struct ListedParams : SealForm {
  static constexpr int kMostLanes = kListedLanesAtOnce, kMostPages = kListedPagesAtOnce;
  SealSlab slab[kMostLanes][2];
  const kvlathe_cuda_seal_page* page;

  void take(const kvlathe_cuda_seal_page* pages, int) { page = pages; }
};

// One group of a row of codes: elements [begin, end) along the axis.
struct Group {
  int row, begin, end;

  __device__ Group(const SealSlab& slab, int index, int inner) {
    row = index / slab.groups;
    const int g = index % slab.groups, wide = g < slab.extra ? g : slab.extra;
    begin = 16 * (slab.steps * g + wide);
    end = min(inner, begin + 16 * (slab.steps + (g < slab.extra)));
  }
};

// rint(x / step), as dividing gives it. A product with 1 / step is off by 2^-22 of its size at most.
// That decides only beside the middle of two integers, and there the division is done.
__device__ inline float nearest_code(float x, float step, float inverse) {
  constexpr float kBesideMiddle = 0x1p-11f;  // of codes up to 1024
  const float about = __fmul_rn(x, inverse), code = rintf(about);
  if (fabsf(fabsf(__fsub_rn(about, code)) - 0.5f) > kBesideMiddle) return code;
  return rintf(__fdiv_rn(x, step));
}

template <class E>
__device__ void seal_group(const SealForm& p, const SealSlab& slab, const Group& group, int index,
                           const uint16_t* values, int pitch, int inner, int position, char* page) {
  const int stride = slab.by_token ? pitch : 1;
  const uint16_t* row = values + (slab.by_token ? group.row : group.row * pitch);
  const auto value = [&](int i) { return E::widen(row[i * stride]); };
  float low = value(group.begin), high = low;
#pragma unroll 8
  for (int i = group.begin + 1; i < group.end; ++i)
    low = fminf(low, value(i)), high = fmaxf(high, value(i));
  const float levels = float(levels_of(slab.bits)), width = __fsub_rn(high, low);
  const __half scale = __float2half_rn(__fdiv_rn(__fmul_rn(width, slab.span), levels));
  const __half minimum = __float2half_rn(__fadd_rn(low, __fmul_rn(width, slab.past)));
  reinterpret_cast<__half2*>(page + slab.meta)[index] = __halves2half2(scale, minimum);
  const float step = __half2float(scale), from = __half2float(minimum),
              inverse = step > 0 ? __fdiv_rn(1.f, step) : 0.f;
  auto* words =
      reinterpret_cast<uint32_t*>(page + slab.target + int64_t{group.row} * inner * slab.bits / 8);
  for (int i = group.begin; i < group.end;) {
    uint32_t word = 0;
#pragma unroll 4
    for (int shift = 0; shift < 32; shift += slab.bits, ++i) {
      const float above = __fsub_rn(value(i), from);
      float x = 0;
      if (p.stochastic) {
        if (step > 0) x = __fdiv_rn(above, step);
        const int token = slab.by_token ? i : group.row, channel = slab.by_token ? group.row : i;
        const uint32_t noise =
            hashed(hashed(slab.key, uint32_t(position + token)), uint32_t(channel)) >> 8;
        x = float(floor(double(x) + noise * 0x1p-24));  // a double is exact: no rounding decides
      } else if (step > 0) {
        x = nearest_code(above, step, inverse);
      }
      word |= uint32_t(fminf(fmaxf(x, 0.f), levels)) << shift;
    }
    words[i * slab.bits / 32 - 1] = word;
  }
}

// Writes codes i .. i + 7 of a row of `count` codes of 4, 3 or 2 bits.
__device__ void store_eight(char* row, int bits, int i, int count, const uint32_t (&codes)[8]) {
  if (in_blocks(bits)) {  // kvlathe/plan/packing.py
    const Threes place = threes_at(i, count);
    const uint32_t six = codes[6], seven = codes[7];
    const uint32_t last[3] = {six & 3, seven & 3, six >> 2 | seven >> 2 << 1};
    for (int run = 0; run < 3; ++run)
      row[place.at + run * place.run] =
          char(codes[2 * run] | codes[2 * run + 1] << 3 | last[run] << 6);
    return;
  }
  uint32_t word = 0;
  for (int k = 0; k < 8; ++k) word |= codes[k] << k * bits;
  if (is_nibble(bits))
    *reinterpret_cast<uint32_t*>(row + i / 2) = word;
  else
    *reinterpret_cast<uint16_t*>(row + i / 4) = uint16_t(word);
}

// One group of 3 bits with even levels. round(x, i): the integer for element i.
template <class Value, class Round>
__device__ void seal_threes(const SealSlab& slab, const Group& group, int index, int inner,
                            char* page, Value value, Round round) {
  float low = value(group.begin), high = low;
  for (int i = group.begin + 1; i < group.end; ++i)
    low = fminf(low, value(i)), high = fmaxf(high, value(i));
  const float levels = float(levels_of(3)), width = __fsub_rn(high, low);
  const __half scale = __float2half_rn(__fdiv_rn(__fmul_rn(width, slab.span), levels));
  const __half minimum = __float2half_rn(__fadd_rn(low, __fmul_rn(width, slab.past)));
  reinterpret_cast<__half2*>(page + slab.meta)[index] = __halves2half2(scale, minimum);
  const float step = __half2float(scale), from = __half2float(minimum);
  char* row = page + slab.target + int64_t{group.row} * inner * 3 / 8;
  for (int i = group.begin; i < group.end; i += 8) {
    uint32_t codes[8];
    for (int k = 0; k < 8; ++k) {
      const float x = step > 0 ? __fdiv_rn(__fsub_rn(value(i + k), from), step) : 0.f;
      codes[k] = uint32_t(fminf(fmaxf(round(x, i + k), 0.f), levels));
    }
    store_eight(row, 3, i, inner, codes);
  }
}

// The code of the level nearest to x, and its level in `worth`: fit_codes of cpu/quantize.h.
template <int kBits>
__device__ uint32_t nearest_level(float x, float magnitude, float scale, int& worth) {
  constexpr uint32_t words[4] = {normal_levels(kBits, 0), normal_levels(kBits, 1),
                                 normal_levels(kBits, 2), normal_levels(kBits, 3)};
  const float exact = scale > 0 ? __fdiv_rn(__fadd_rn(x, magnitude), scale) : 0.f;
  const int whole = int(rintf(fminf(fmaxf(exact, 0.f), 255.f)));
  uint32_t code = 0;
  worth = 0;
#pragma unroll
  for (int i = 1; i <= levels_of(kBits); ++i) {
    const int below = words[(i - 1) / 4] >> (i - 1) % 4 * 8 & 255,
              own = words[i / 4] >> i % 4 * 8 & 255;
    if (2 * whole > below + own) code = i, worth = own;
  }
  return code;
}

// One group of fixed levels: one magnitude, of least squared error. Sums are double, so that the
// order of adding decides nothing.
template <int kBits, class Value>
__device__ void seal_fixed(const SealSlab& slab, const Group& group, int index, int inner,
                           char* page, Value value) {
  double energy = 0;
  for (int i = group.begin; i < group.end; ++i) energy += double(value(i)) * double(value(i));
  double magnitude =
      __dmul_rn(kNormalTop[kBits - 2], __dsqrt_rn(__ddiv_rn(energy, group.end - group.begin)));
  char* row = page + slab.target + int64_t{group.row} * inner * kBits / 8;
  for (int fit = 0; fit < kFits; ++fit) {
    const __half rounded = __float2half_rn(__double2float_rn(magnitude));
    const float most = __half2float(rounded), scale = __fmul_rn(most, kTwo255ths);
    double along = 0, squares = 0;
    for (int i = group.begin; i < group.end; i += 8) {
      uint32_t codes[8];
      for (int k = 0; k < 8; ++k) {
        int worth;
        codes[k] = nearest_level<kBits>(value(i + k), most, scale, worth);
        const double level = worth - 127.5;
        along += double(value(i + k)) * level, squares += level * level;
      }
      if (fit == kFits - 1) store_eight(row, kBits, i, inner, codes);
    }
    reinterpret_cast<__half*>(page + slab.meta)[index] = rounded;
    magnitude = fabs(__ddiv_rn(__dmul_rn(127.5, along), squares));
  }
}

// One group of floats of 8 bits: quantize_floats of cpu/quantize.h.
template <class Value>
__device__ void seal_floats(const SealSlab& slab, const Group& group, int index, int inner,
                            char* page, Value value) {
  float most = 0;
  for (int i = group.begin; i < group.end; ++i) most = fmaxf(most, fabsf(value(i)));
  const float wanted = __fdiv_rn(most, kFloat8Top);
  const uint16_t nearest = Half::round(wanted),
                 half = least_half(wanted, nearest, Half::widen(nearest));
  reinterpret_cast<uint16_t*>(page + slab.meta)[index] = half;
  const float scale = Half::widen(half);
  char* row = page + slab.target + int64_t{group.row} * inner;
  for (int i = group.begin; i < group.end; i += 4) {
    uint32_t word = 0;
    for (int k = 0; k < 4 && scale > 0; ++k)
      word |= uint32_t(float8_of(__fdiv_rn(value(i + k), scale))) << 8 * k;
    *reinterpret_cast<uint32_t*>(row + i) = word;
  }
}

// One group of any form. It is apart from seal_group, whose code is that of the other forms alone.
template <class E, SealKinds kKinds>
__device__ void seal_any_group(const SealForm& p, const SealSlab& slab, const Group& group,
                               int index, const uint16_t* values, int pitch, int inner,
                               int position, char* page) {
  const auto value = [&](int i) {
    return E::widen(slab.by_token ? values[i * pitch + group.row] : values[group.row * pitch + i]);
  };
  if constexpr (kKinds == SealKinds::kFloats) {
    if (slab.span == SealSlab::kFloats) return seal_floats(slab, group, index, inner, page, value);
  }
  if (slab.span == SealSlab::kFixedLevels) {
    if (is_nibble(slab.bits)) seal_fixed<4>(slab, group, index, inner, page, value);
    if (in_blocks(slab.bits)) seal_fixed<3>(slab, group, index, inner, page, value);
    if (is_crumb(slab.bits)) seal_fixed<2>(slab, group, index, inner, page, value);
    return;
  }
  if (!in_blocks(slab.bits))
    return seal_group<E>(p, slab, group, index, values, pitch, inner, position, page);
  seal_threes(slab, group, index, inner, page, value, [&](float x, int i) {
    if (!p.stochastic) return rintf(x);
    const int token = slab.by_token ? i : group.row, channel = slab.by_token ? group.row : i;
    const uint32_t noise =
        hashed(hashed(slab.key, uint32_t(position + token)), uint32_t(channel)) >> 8;
    return float(floor(double(x) + noise * 0x1p-24));
  });
}

template <class P, class E, SealKinds kKinds>
__global__ void __launch_bounds__(kThreads) seal_pages(const __grid_constant__ P p) {
  KVLATHE_DYNAMIC_SHARED(shared);
  auto* values = reinterpret_cast<uint16_t*>(shared);  // [tokens, pitch]
  const SealSlab& slab = p.slab[blockIdx.x / 2][blockIdx.x % 2];
  const kvlathe_cuda_seal_page& job = p.page[blockIdx.y];
  if (job.source < 0) return;
  const char* source = p.pool + job.source * p.source_stride + slab.source;
  char* page = p.pool + job.target * p.target_stride;
  const int count = p.page_tokens * slab.rank,
            pitch = slab.rank + 2;  // rows four bytes apart in the banks
  if (!is_quantized(slab.bits)) {
    for (int i = threadIdx.x; i < count / 8; i += kThreads) {
      reinterpret_cast<uint4*>(page + slab.target)[i] = reinterpret_cast<const uint4*>(source)[i];
    }
    return;
  }
  // Eight elements at a time; ranks are multiples of 16.
  const int pieces = slab.rank / 8;
#pragma unroll 4
  for (int i = threadIdx.x; i < count / 8; i += kThreads) {
    const uint4 piece = reinterpret_cast<const uint4*>(source)[i];
    auto* to = reinterpret_cast<uint32_t*>(values + i / pieces * pitch + i % pieces * 8);
    to[0] = piece.x, to[1] = piece.y, to[2] = piece.z, to[3] = piece.w;
  }
  __syncthreads();
  const int rows = slab.by_token ? slab.rank : p.page_tokens,
            inner = slab.by_token ? p.page_tokens : slab.rank;
  for (int i = threadIdx.x; i < rows * slab.groups; i += kThreads) {
    const Group group(slab, i, inner);
    if constexpr (kKinds != SealKinds::kEven)
      seal_any_group<E, kKinds>(p, slab, group, i, values, pitch, inner, job.position, page);
    else
      seal_group<E>(p, slab, group, i, values, pitch, inner, job.position, page);
  }
}

// -- host ---------------------------------------------------------------------

void set_groups(SealSlab& slab, int32_t group, int32_t page_tokens) {
  if (slab.by_token) {
    slab.groups = uint16_t(token_groups(page_tokens, group));
    slab.steps = uint16_t(group / 16);
    slab.extra = 0;
    return;
  }
  const RankGroups groups(slab.rank, group);
  slab.groups = uint16_t(groups.count);
  slab.steps = uint16_t(groups.steps);
  slab.extra = uint16_t(groups.extra);
}

// K (which 0) or V (1) of one lane.
void set_slab(SealSlab& slab, const kvlathe_cuda_seal_args& a, const LaneRow& from,
              const LaneRow& to, uint32_t which) {
  const Format format = which ? format_v(*a.target) : format_k(*a.target);
  const double span = which ? a.span_v : a.span_k;
  slab.source = which ? from.v : from.k;
  slab.target = which ? to.v : to.k;
  slab.meta = which ? to.v_meta : to.k_meta;
  slab.key = noise_key(a.seed, to.layer, to.head, which);
  slab.span = format.fixed_levels() ? SealSlab::kFixedLevels
              : format.float8()     ? SealSlab::kFloats
                                    : float(span);
  slab.past = float((1 - span) / 2);
  slab.rank = uint16_t(which ? to.rank_v : to.rank_k);
  slab.bits = uint16_t(format.bits);
  slab.groups = 1;
  slab.steps = slab.extra = 0;
  slab.by_token = uint16_t(format.axis == KVLATHE_AXIS_TOKEN);
  if (format.quantized()) set_groups(slab, format.group, a.page_tokens);
}

void set_lane(SealSlab (&slab)[2], const kvlathe_cuda_seal_args& a, const LaneRow& to) {
  const LaneRow* from = find_lane(*a.source, to);
  require(from, KVLATHE_BAD_ARGUMENT, "the source lacks a lane of the target");
  set_slab(slab[0], a, *from, to, 0);
  set_slab(slab[1], a, *from, to, 1);
  if (values_in_keys(to)) slab[1].rank = slab[1].groups = 0;  // K's slab has them
}

// The widest row of a lane that is quantized.
int widest_rank(const kvlathe_part& part) {
  int widest = 0;
  for (const LaneRow* row = lanes_of(part); row < lanes_of(part) + part.lane_count; ++row)
    widest = std::max({widest, row->rank_k, row->rank_v});
  return widest;
}

void check_ids(const kvlathe_cuda_seal_args& a) {
  for (int32_t i = 0; i < a.page_count; ++i) {
    const kvlathe_cuda_seal_page& page = a.pages[i];
    require(page.source >= 0 && page.target >= 0 &&
                (page.source + int64_t{1}) * a.source->page_stride <= a.pool_bytes &&
                (page.target + int64_t{1}) * a.target->page_stride <= a.pool_bytes,
            KVLATHE_TOO_SMALL, "a page id lies outside the pool");
  }
}

void check(const kvlathe_cuda_seal_args& a) {
  check_version(a.abi_version);
  check_element(a.element);
  require(a.source && a.target && a.page_count >= 0 && (a.pages || a.page_count == 0),
          KVLATHE_BAD_ARGUMENT, "a part or pages is null");
  check_pages(*a.source, a.page_tokens, a.pool, a.pool_bytes);
  check_pages(*a.target, a.page_tokens, a.pool, a.pool_bytes);
  require(a.span_k > 0 && a.span_k <= 1 && a.span_v > 0 && a.span_v <= 1, KVLATHE_BAD_ARGUMENT,
          "a span is not above 0 and at most 1");
  require(!any_quantized(*a.source), KVLATHE_UNSUPPORTED, "the source is quantized already");
}

template <class P, class E, SealKinds kKinds>
void launch(const kvlathe_cuda_seal_args& a, P& p, int lanes, int pages, int shared) {
  reserve_shared(seal_pages<P, E, kKinds>, shared);
  void* arguments[] = {&p};
  check_cuda(cudaLaunchKernel(seal_pages<P, E, kKinds>, dim3(2 * lanes, pages), dim3(kThreads),
                              arguments, size_t(shared), static_cast<cudaStream_t>(a.stream)),
             "launching seal");
}

template <class P, class E>
auto launcher_of(SealKinds kinds) {
  return kinds == SealKinds::kEven  ? launch<P, E, SealKinds::kEven>
         : kinds == SealKinds::kAny ? launch<P, E, SealKinds::kAny>
                                    : launch<P, E, SealKinds::kFloats>;
}

SealKinds kinds_of(const kvlathe_part& target) {
  if (any_float8(target)) return SealKinds::kFloats;
  for (const Format& format : {format_k(target), format_v(target)})
    if (in_blocks(format.bits) || format.fixed_levels()) return SealKinds::kAny;
  return SealKinds::kEven;
}

template <class P>
void seal(const kvlathe_cuda_seal_args& a) {
  P p{};
  static_cast<SealForm&>(p) = {static_cast<char*>(a.pool), a.source->page_stride,
                               a.target->page_stride, a.page_tokens, a.stochastic};
  const int shared =
      any_quantized(*a.target) ? a.page_tokens * (widest_rank(*a.target) + 2) * 2 : 0;
  check_shared(shared, "pages of " + std::to_string(a.page_tokens) + " tokens and such ranks");
  const SealKinds kinds = kinds_of(*a.target);
  for (int32_t lane = 0; lane < a.target->lane_count; lane += P::kMostLanes) {
    const int lanes = std::min(P::kMostLanes, a.target->lane_count - lane);
    for (int i = 0; i < lanes; ++i) set_lane(p.slab[i], a, lanes_of(*a.target)[lane + i]);
    for (int32_t page = 0; page < a.page_count; page += P::kMostPages) {
      const int pages = std::min(P::kMostPages, a.page_count - page);
      p.take(a.pages + page, pages);
      const auto launcher =
          a.element == KVLATHE_F16 ? launcher_of<P, Half>(kinds) : launcher_of<P, Bfloat>(kinds);
      launcher(a, p, lanes, pages, shared);
    }
  }
}

}  // namespace
}  // namespace kvlathe::cuda

extern "C" int32_t kvlathe_cuda_seal(const kvlathe_cuda_seal_args* args, kvlathe_status* status) {
  return kvlathe::run(status, [&] {
    if (!args) throw kvlathe::Refusal(KVLATHE_BAD_ARGUMENT, "args is null");
    kvlathe::cuda::check(*args);
    kvlathe::cuda::check_ids(*args);
    kvlathe::cuda::seal<kvlathe::cuda::SealParams>(*args);
  });
}

extern "C" int32_t kvlathe_cuda_seal_listed(const kvlathe_cuda_seal_args* args,
                                            kvlathe_status* status) {
  return kvlathe::run(status, [&] {
    if (!args) throw kvlathe::Refusal(KVLATHE_BAD_ARGUMENT, "args is null");
    kvlathe::cuda::check(*args);
    kvlathe::cuda::seal<kvlathe::cuda::ListedParams>(*args);
  });
}
