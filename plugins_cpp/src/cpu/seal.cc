// A full page of one number format into another, lane by lane: the bytes of kvlathe/plan/codec.py.
#include <algorithm>
#include <string>
#include <vector>

#include "common/hash.h"
#include "common/lanes.h"
#include "common/limits.h"
#include "cpu/rows.h"
#include "cpu/select.h"
#include "cpu/work.h"

namespace kvlathe {
namespace {

// Where the last sum of K or V ends; 0 where the format has no codes.
int64_t sums_end(int64_t meta, int64_t groups, const Format& format) {
  return format.quantized() ? sums_at(meta, groups) + groups * sum_bytes(format.bits, format.group)
                            : 0;
}

// Where the last sum of a lane ends.
int64_t sums_end(const LaneRow& lane, const kvlathe_part& part) {
  return std::max(sums_end(lane.k_meta, lane.groups_k, format_k(part)),
                  sums_end(lane.v_meta, lane.groups_v, format_v(part)));
}

void check_page(const kvlathe_cpu_seal_page& page, bool stochastic) {
  require(page.source && page.target, KVLATHE_BAD_ARGUMENT, "a page is null");
  check_aligned(page.source, 64, "a page");
  check_aligned(page.target, 64, "a page");
  require(!stochastic || page.positions, KVLATHE_BAD_ARGUMENT,
          "rounding is stochastic and positions is null");
}

void check(const kvlathe_cpu_seal_args& a) {
  check_version(a.abi_version);
  require(a.source && a.target && a.page_count >= 0 && (a.pages || a.page_count == 0),
          KVLATHE_BAD_ARGUMENT, "a part or pages is null");
  require(a.page_tokens > 0 && a.page_tokens % kRankMultiple == 0 && a.page_tokens <= kMostRow,
          KVLATHE_BAD_ARGUMENT,
          "page_tokens is no multiple of 16 up to " + std::to_string(kMostRow));
  for (int64_t i = 0; i < a.page_count; ++i) check_page(a.pages[i], a.stochastic);
  check_lanes(*a.source, a.page_tokens);
  check_lanes(*a.target, a.page_tokens);
  require(a.span_k > 0 && a.span_k <= 1 && a.span_v > 0 && a.span_v <= 1, KVLATHE_BAD_ARGUMENT,
          "a span is not above 0 and at most 1");
  require(!any_quantized(*a.source), KVLATHE_UNSUPPORTED, "the source is quantized already");
  for (int32_t i = 0; i < a.target->lane_count; ++i) {
    const LaneRow& lane = lanes_of(*a.target)[i];
    require(find_lane(*a.source, lane), KVLATHE_BAD_ARGUMENT,
            "the source lacks a lane of the target");
    require(!a.sums || sums_end(lane, *a.target) <= a.target->page_stride, KVLATHE_TOO_SMALL,
            "the target's pages have no room for sums of codes");
  }
}

// The noise of lane `to`'s tokens, K (0) or V (1); empty where codes are the nearest.
std::vector<uint32_t> noise_of(const kvlathe_cpu_seal_args& a, const uint32_t* positions,
                               const LaneRow& to, uint32_t which) {
  if (!a.stochastic) return {};
  std::vector<uint32_t> drawn(size_t(a.page_tokens));
  const uint32_t key = noise_key(a.seed, to.layer, to.head, which);
  positions += (&to - lanes_of(*a.target)) * a.positions_stride;
  for (size_t i = 0; i < drawn.size(); ++i) drawn[i] = hashed(key, positions[i]);
  return drawn;
}

// K or V of one lane.
void seal(const Kernels& kernels, const Rows& from, const Rows& to,
          const QuantizeOptions& options) {
  thread_local Buffer buffer;
  const int64_t size = int64_t{from.rows} * from.inner;
  float *packed = buffer.floats(size_t(2 * size)), *turned = packed + size;
  int64_t ld;
  const float* x = kernels.unpack(from, packed, &ld);
  if (!is_quantized(to.bits)) {
    for (int64_t r = 0; r < to.rows; ++r)
      kernels.store(x + r * ld, nullptr, to.inner, to.bits,
                    const_cast<uint8_t*>(to.data) + r * to.stride);
    return;
  }
  if (to.by_channel)
    kernels.transpose(x, ld, turned, from.rows, from.rows, from.inner), x = turned, ld = from.rows;
  kernels.quantize(x, ld, to, options);
}

// K (which 0) or V (1) of one lane of one page.
void seal_slab(const kvlathe_cpu_seal_args& a, const Kernels& kernels,
               const kvlathe_cpu_seal_page& page, const LaneRow& to, uint32_t which) {
  const LaneRow& from = *find_lane(*a.source, to);
  const auto* source = static_cast<const uint8_t*>(page.source);
  auto* target = static_cast<uint8_t*>(page.target);
  const int32_t p = a.page_tokens;
  const double span = which ? a.span_v : a.span_k;
  const Format was = which ? format_v(*a.source) : format_k(*a.source);
  const Format now = which ? format_v(*a.target) : format_k(*a.target);
  const int64_t at = which ? from.v : from.k, meta = which ? from.v_meta : from.k_meta;
  const int64_t to_at = which ? to.v : to.k, to_meta = which ? to.v_meta : to.k_meta;
  const int32_t groups = which ? to.groups_v : to.groups_k, rank = which ? to.rank_v : to.rank_k;
  const std::vector<uint32_t> noise = noise_of(a, page.positions, to, which);
  QuantizeOptions options{};
  options.span = float(span);
  options.edge = float((1 - span) / 2);
  options.noise = noise.empty() ? nullptr : noise.data();
  if (a.sums) {
    options.sums = target + sums_at(to_meta, groups);
    options.sum_bytes = sum_bytes(now.bits, now.group);
  }
  seal(kernels, rows_of(source, at, meta, rank, was, p, 0, p),
       rows_of(target, to_at, to_meta, rank, now, p, 0, p), options);
}

}  // namespace
}  // namespace kvlathe

extern "C" int32_t kvlathe_cpu_seal(const kvlathe_cpu_seal_args* args, kvlathe_status* status) {
  using namespace kvlathe;
  return kvlathe::run(status, [&] {
    require(args, KVLATHE_BAD_ARGUMENT, "args is null");
    check(*args);
    const Kernels& kernels = kernels_for(args->isa);
    const int64_t lanes = args->target->lane_count;
    run_items({}, args->threads, lanes * args->page_count, [&](int64_t i) {
      const LaneRow& lane = lanes_of(*args->target)[i % lanes];
      seal_slab(*args, kernels, args->pages[i / lanes], lane, 0);
      if (!values_in_keys(lane)) seal_slab(*args, kernels, args->pages[i / lanes], lane, 1);
    });
  });
}
