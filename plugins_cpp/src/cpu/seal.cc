// A full page of one number format into another, lane by lane: the bytes of runtime/codec.py.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "layer.h"
#include "rows.h"
#include "select.h"
#include "work.h"

namespace kvlathe {
namespace {

void require(bool ok, kvlathe_code code, const std::string& message) {
  if (!ok) throw Refusal(code, message);
}

const LaneRow* lanes_of(const kvlathe_part& part) { return reinterpret_cast<const LaneRow*>(part.lanes); }

const LaneRow* find(const kvlathe_part& part, const LaneRow& lane) {
  for (const LaneRow* row = lanes_of(part); row < lanes_of(part) + part.lane_count; ++row) {
    if (row->layer == lane.layer && row->head == lane.head) return row;
  }
  return nullptr;
}

void check_part(const kvlathe_part& part, int32_t page_tokens) {
  require(part.lanes && part.lane_count >= 1, KVLATHE_BAD_ARGUMENT, "a part has no lanes");
  for (const auto& [bits, group] : {std::pair{part.bits_k, part.group_k}, std::pair{part.bits_v, part.group_v}}) {
    require(bits == 32 || bits == 16 || bits == 8 || bits == 4 || bits == 2, KVLATHE_BAD_ARGUMENT,
            "a part has " + std::to_string(bits) + " bits");
    require(bits >= 16 || (group > 0 && group % 16 == 0), KVLATHE_UNSUPPORTED,
            "a quantization group is no multiple of 16");
  }
  for (int32_t i = 0; i < part.lane_count; ++i)
    check_slab(lanes_of(part)[i], part.bits_k, part.bits_v, page_tokens, part.page_stride);
}

// Behind the metadata of `groups` groups, and how wide each is (sum_bytes of export/layout.py).
int64_t sums_at(int64_t meta, int32_t groups) { return meta + (4 * int64_t{groups} + 127) / 128 * 128; }
int sum_bytes(int32_t bits, int32_t group) { return (bits + int(std::ceil(std::log2(group))) + 7) / 8; }

// Where the last sum of a lane ends.
int64_t sums_end(const LaneRow& lane, const kvlathe_part& part) {
  const int64_t k = part.bits_k < 16 ? sums_at(lane.k_meta, lane.groups_k) +
                                           int64_t{lane.groups_k} * sum_bytes(part.bits_k, part.group_k)
                                     : 0;
  const int64_t v = part.bits_v < 16 ? sums_at(lane.v_meta, lane.groups_v) +
                                           int64_t{lane.groups_v} * sum_bytes(part.bits_v, part.group_v)
                                     : 0;
  return std::max(k, v);
}

void check(const kvlathe_seal_args& a) {
  require(a.abi_version == KVLATHE_ABI_VERSION, KVLATHE_BAD_VERSION,
          "the caller was built for another kvlathe ABI: rebuild one of them");
  require(a.source && a.target && a.source_page && a.target_page, KVLATHE_BAD_ARGUMENT, "a part or a page is null");
  require(a.page_tokens > 0 && a.page_tokens % 16 == 0 && a.page_tokens <= 1024, KVLATHE_BAD_ARGUMENT,
          "page_tokens is no multiple of 16 up to 1024");
  require(reinterpret_cast<uintptr_t>(a.source_page) % 64 == 0 && reinterpret_cast<uintptr_t>(a.target_page) % 64 == 0,
          KVLATHE_MISALIGNED, "a page is not aligned to 64 bytes");
  check_part(*a.source, a.page_tokens);
  check_part(*a.target, a.page_tokens);
  require(a.span_k > 0 && a.span_k <= 1 && a.span_v > 0 && a.span_v <= 1, KVLATHE_BAD_ARGUMENT,
          "a span is not above 0 and at most 1");
  require(!a.stochastic || a.positions, KVLATHE_BAD_ARGUMENT, "rounding is stochastic and positions is null");
  require(a.source->bits_k >= 16 && a.source->bits_v >= 16, KVLATHE_UNSUPPORTED, "the source is quantized already");
  for (int32_t i = 0; i < a.target->lane_count; ++i) {
    const LaneRow &lane = lanes_of(*a.target)[i], *from = find(*a.source, lane);
    require(from && from->rank_k == lane.rank_k && from->rank_v == lane.rank_v, KVLATHE_BAD_ARGUMENT,
            "the source lacks a lane of the target");
    require(!a.sums || sums_end(lane, *a.target) <= a.target->page_stride, KVLATHE_TOO_SMALL,
            "the target's pages have no room for sums of codes");
  }
}

uint32_t mixed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

uint32_t hashed(uint32_t key, uint32_t number) { return mixed((key ^ number) + 0x9E3779B9u); }

// The noise of lane `to`'s tokens, K (0) or V (1); empty where codes are the nearest.
std::vector<uint32_t> noise(const kvlathe_seal_args& a, const LaneRow& to, uint32_t which) {
  std::vector<uint32_t> found(a.stochastic ? size_t(a.page_tokens) : 0);
  const uint32_t key =
      hashed(hashed(hashed(hashed(0, uint32_t(a.seed)), uint32_t(to.layer)), uint32_t(to.head)), which);
  const uint32_t* positions = a.positions + (&to - lanes_of(*a.target)) * a.positions_stride;
  for (size_t i = 0; i < found.size(); ++i) found[i] = hashed(key, positions[i]);
  return found;
}

// K or V of one lane.
void seal(const Kernels& kernels, const Rows& from, const Rows& to, const Coding& coding) {
  thread_local Buffer buffer;
  const int64_t size = int64_t{from.rows} * from.inner;
  float *packed = buffer.floats(size_t(2 * size)), *turned = packed + size;
  int64_t ld;
  const float* x = kernels.unpack(from, packed, &ld);
  if (to.bits >= 16) {
    for (int64_t r = 0; r < to.rows; ++r)
      kernels.store(x + r * ld, nullptr, to.inner, to.bits, const_cast<uint8_t*>(to.data) + r * to.stride);
    return;
  }
  if (to.by_channel) kernels.transpose(x, ld, turned, from.rows, from.rows, from.inner), x = turned, ld = from.rows;
  kernels.quantize(x, ld, to, coding);
}

void seal_lane(const kvlathe_seal_args& a, const Kernels& kernels, const LaneRow& to) {
  const LaneRow& from = *find(*a.source, to);
  const kvlathe_part &s = *a.source, &t = *a.target;
  const auto* source = static_cast<const uint8_t*>(a.source_page);
  auto* target = static_cast<uint8_t*>(a.target_page);
  const int32_t p = a.page_tokens;
  const auto side = [&](uint32_t which, double span, int64_t at, int64_t meta, int64_t to_at, int64_t to_meta,
                        int32_t groups, int32_t rank, const Format& was, const Format& now) {
    const std::vector<uint32_t> drawn = noise(a, to, which);
    const Coding coding{float(span), float((1 - span) / 2), drawn.empty() ? nullptr : drawn.data(),
                        a.sums ? target + sums_at(to_meta, groups) : nullptr,
                        a.sums ? sum_bytes(now.bits, now.group) : 0};
    seal(kernels, rows_of(source, at, meta, rank, was, p, 0, p), rows_of(target, to_at, to_meta, rank, now, p, 0, p),
         coding);
  };
  side(0, a.span_k, from.k, from.k_meta, to.k, to.k_meta, to.groups_k, to.rank_k, {s.bits_k, s.axis_k, s.group_k},
       {t.bits_k, t.axis_k, t.group_k});
  side(1, a.span_v, from.v, from.v_meta, to.v, to.v_meta, to.groups_v, to.rank_v, {s.bits_v, s.axis_v, s.group_v},
       {t.bits_v, t.axis_v, t.group_v});
}

}  // namespace
}  // namespace kvlathe

extern "C" int32_t kvlathe_cpu_seal(const kvlathe_seal_args* args, kvlathe_status* status) {
  using namespace kvlathe;
  return kvlathe::run(status, [&] {
    require(args, KVLATHE_BAD_ARGUMENT, "args is null");
    check(*args);
    const Kernels& kernels = kernels_for(args->isa);
    run_items({}, args->threads, args->target->lane_count,
              [&](int64_t i) { seal_lane(*args, kernels, lanes_of(*args->target)[i]); });
  });
}
