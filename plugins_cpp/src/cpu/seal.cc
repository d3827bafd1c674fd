// A full page of one number format into another, lane by lane.
#include <string>
#include <utility>

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
    require(bits == 32 || bits == 16 || bits == 8 || bits == 4 || bits == 2, KVLATHE_BAD_ARGUMENT, "a part has " + std::to_string(bits) + " bits");
    require(bits >= 16 || (group > 0 && group % 16 == 0), KVLATHE_UNSUPPORTED, "a quantization group is no multiple of 16");
  }
  for (int32_t i = 0; i < part.lane_count; ++i) check_slab(lanes_of(part)[i], part.bits_k, part.bits_v, page_tokens, part.page_stride);
}

void check(const kvlathe_seal_args& a) {
  require(a.abi_version == KVLATHE_ABI_VERSION, KVLATHE_BAD_VERSION, "the caller was built for another kvlathe ABI: rebuild one of them");
  require(a.source && a.target && a.source_page && a.target_page, KVLATHE_BAD_ARGUMENT, "a part or a page is null");
  require(a.page_tokens > 0 && a.page_tokens % 16 == 0 && a.page_tokens <= 1024, KVLATHE_BAD_ARGUMENT, "page_tokens is no multiple of 16 up to 1024");
  require(reinterpret_cast<uintptr_t>(a.source_page) % 64 == 0 && reinterpret_cast<uintptr_t>(a.target_page) % 64 == 0, KVLATHE_MISALIGNED,
          "a page is not aligned to 64 bytes");
  check_part(*a.source, a.page_tokens);
  check_part(*a.target, a.page_tokens);
  require(a.source->bits_k >= 16 && a.source->bits_v >= 16, KVLATHE_UNSUPPORTED, "the source is quantized already");
  for (int32_t i = 0; i < a.target->lane_count; ++i) {
    const LaneRow &lane = lanes_of(*a.target)[i], *from = find(*a.source, lane);
    require(from && from->rank_k == lane.rank_k && from->rank_v == lane.rank_v, KVLATHE_BAD_ARGUMENT, "the source lacks a lane of the target");
  }
}

// K or V of one lane.
void seal(const Kernels& kernels, const Rows& from, const Rows& to) {
  thread_local Buffer buffer;
  const int64_t size = int64_t{from.rows} * from.inner;
  float *packed = buffer.floats(size_t(2 * size)), *turned = packed + size;
  int64_t ld;
  const float* x = kernels.unpack(from, packed, &ld);
  if (to.bits >= 16) {
    for (int64_t r = 0; r < to.rows; ++r) kernels.store(x + r * ld, nullptr, to.inner, to.bits, const_cast<uint8_t*>(to.data) + r * to.stride);
    return;
  }
  if (to.by_channel) kernels.transpose(x, ld, turned, from.rows, from.rows, from.inner), x = turned, ld = from.rows;
  kernels.quantize(x, ld, to);
}

void seal_lane(const kvlathe_seal_args& a, const Kernels& kernels, const LaneRow& to) {
  const LaneRow& from = *find(*a.source, to);
  const kvlathe_part &s = *a.source, &t = *a.target;
  const auto *source = static_cast<const uint8_t*>(a.source_page), *target = static_cast<const uint8_t*>(a.target_page);
  const int32_t p = a.page_tokens;
  seal(kernels, rows_of(source, from.k, from.k_meta, to.rank_k, {s.bits_k, s.axis_k, s.group_k}, p, 0, p),
       rows_of(target, to.k, to.k_meta, to.rank_k, {t.bits_k, t.axis_k, t.group_k}, p, 0, p));
  seal(kernels, rows_of(source, from.v, from.v_meta, to.rank_v, {s.bits_v, s.axis_v, s.group_v}, p, 0, p),
       rows_of(target, to.v, to.v_meta, to.rank_v, {t.bits_v, t.axis_v, t.group_v}, p, 0, p));
}

}  // namespace
}  // namespace kvlathe

extern "C" int32_t kvlathe_cpu_seal(const kvlathe_seal_args* args, kvlathe_status* status) {
  using namespace kvlathe;
  return kvlathe::run(status, [&] {
    require(args, KVLATHE_BAD_ARGUMENT, "args is null");
    check(*args);
    const Kernels& kernels = kernels_for(args->isa);
    run_items({}, args->threads, args->target->lane_count, [&](int64_t i) { seal_lane(*args, kernels, lanes_of(*args->target)[i]); });
  });
}
