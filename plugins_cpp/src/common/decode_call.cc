#include "common/decode_call.h"

#include <map>
#include <string>

#include "common/limits.h"

namespace kvlathe {
namespace {

bool aligned(const void* pointer, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

void check_sizes(const kvlathe_attend_decode_args& a) {
  check_version(a.abi_version);
  require(a.element >= KVLATHE_F32 && a.element <= KVLATHE_BF16, KVLATHE_BAD_ARGUMENT,
          "element " + std::to_string(a.element) + " is none of F32, F16, BF16");
  require(a.batch >= 0 && a.group_size >= 1, KVLATHE_BAD_ARGUMENT,
          "batch is negative or group_size below 1");
  require((a.flags & ~(KVLATHE_OVERLAP | KVLATHE_APPENDED | KVLATHE_BUNDLES)) == 0,
          KVLATHE_BAD_ARGUMENT, "flags holds bits that this library does not know");
  require(
      a.page_tokens > 0 && a.page_tokens % kRankMultiple == 0, KVLATHE_BAD_ARGUMENT,
      "page_tokens is " + std::to_string(a.page_tokens) + " and must be a positive multiple of 16");
  require(a.part_count >= 1 && a.part_count <= KVLATHE_MAX_PARTS && a.parts, KVLATHE_BAD_ARGUMENT,
          "part_count is " + std::to_string(a.part_count) + " and must be 1 to " +
              std::to_string(KVLATHE_MAX_PARTS));
  require(aligned(a.pool, 16), KVLATHE_MISALIGNED, "the pool is not aligned to 16 bytes");
  require(aligned(a.q, 16) && aligned(a.o, 16) && a.q_stride % 8 == 0 && a.o_stride % 8 == 0,
          KVLATHE_MISALIGNED, "rows of q and o must start at multiples of 16 bytes");
}

void check_call_format(const Format& format, const kvlathe_attend_decode_args& a) {
  check_format(format);
  if (!format.quantized()) {
    const int32_t element_bits = a.element == KVLATHE_F32 ? 32 : 16;
    require(format.bits == element_bits, KVLATHE_BAD_ARGUMENT,
            "a part has " + std::to_string(format.bits) +
                " bits: it must be 8, 4, 3, 2 or the element's " + std::to_string(element_bits));
    return;
  }
  require(!format.by_channel() || a.page_tokens % format.group == 0, KVLATHE_BAD_ARGUMENT,
          "groups of " + std::to_string(format.group) + " tokens do not divide a page of " +
              std::to_string(a.page_tokens));
}

void check_part(const kvlathe_part& part, const kvlathe_attend_decode_args& a) {
  check_lane_count(part.lane_count);
  require(part.lanes, KVLATHE_BAD_ARGUMENT, "a part has no lanes");
  require(a.batch == 0 || (part.page_table && part.lengths && part.page_table_stride >= 1),
          KVLATHE_BAD_ARGUMENT, "a part has no page table or no lengths");
  require(part.page_stride > 0 && part.page_stride % kOffsetBytes == 0, KVLATHE_MISALIGNED,
          "a page stride is not a multiple of 128 bytes");
  require(a.batch == 0 || part.page_stride <= a.pool_bytes, KVLATHE_TOO_SMALL,
          "the pool is smaller than one page");
  check_call_format(format_k(part), a);
  check_call_format(format_v(part), a);
}

}  // namespace

bool Head::is_wide() const { return is_wide_lane(rank_k, rank_v, values_in_keys); }

bool is_wide(const kvlathe_attend_decode_args& a) {
  for (int32_t p = 0; p < a.part_count; ++p) {
    const kvlathe_part& part = a.parts[p];
    for (const LaneRow* row = lanes_of(part); row < lanes_of(part) + part.lane_count; ++row) {
      if (is_wide_lane(row->rank_k, row->rank_v, values_in_keys(*row))) return true;
    }
  }
  return false;
}

std::array<int, KVLATHE_MAX_SLOTS> Head::slots(int32_t part_count) const {
  std::array<int, KVLATHE_MAX_SLOTS> found;
  found.fill(-1);
  size_t next = 0;
  for (int p = 0; p < part_count; ++p) {
    if (!names_parts(part_count)) next = size_t(p);
    if (!lane[p]) continue;
    require(next < found.size(), KVLATHE_UNSUPPORTED,
            "head " + std::to_string(lane[p]->head) + " lies in more than " +
                std::to_string(found.size()) + " parts");
    found[next++] = p;
  }
  return found;
}

std::vector<Head> checked_heads(const kvlathe_attend_decode_args& a) {
  const std::vector<Head> heads = checked_lanes(a);
  require(a.batch == 0 || (a.pool && a.q && a.o), KVLATHE_BAD_ARGUMENT, "pool, q or o is null");
  return heads;
}

std::vector<Head> checked_lanes(const kvlathe_attend_decode_args& a) {
  check_sizes(a);
  std::map<int32_t, Head> by_head;
  for (int32_t p = 0; p < a.part_count; ++p) {
    const kvlathe_part& part = a.parts[p];
    check_part(part, a);
    const LaneRow* rows = lanes_of(part);
    for (int32_t i = 0; i < part.lane_count; ++i) {
      require(i == 0 || rows[i].head > rows[i - 1].head, KVLATHE_BAD_ARGUMENT,
              "a part's lanes are not sorted by head, or not of one layer");
      check_lane(rows[i], format_k(part), format_v(part), a.page_tokens, part.page_stride);
      const Head fresh{rows[i].rank_k, rows[i].rank_v, 0, 0, {}, false};
      Head& head = by_head.try_emplace(rows[i].head, fresh).first->second;
      require(head.rank_k == rows[i].rank_k && head.rank_v == rows[i].rank_v, KVLATHE_BAD_ARGUMENT,
              "head " + std::to_string(rows[i].head) + " has different ranks in two parts");
      head.lane[p] = &rows[i];
      head.values_in_keys = head.values_in_keys || values_in_keys(rows[i]);
    }
  }
  check_lane_count(int64_t(by_head.size()));
  std::vector<Head> heads;
  int64_t q = 0, o = 0;
  for (auto& [index, head] : by_head) {
    head.q_offset = q;
    head.o_offset = o;
    q += int64_t{a.group_size} * head.rank_k;
    o += int64_t{a.group_size} * head.rank_v;
    heads.push_back(head);
  }
  require(q <= a.q_stride && o <= a.o_stride, KVLATHE_TOO_SMALL,
          "a row of q or o is shorter than the lanes' ranks need");
  return heads;
}

}  // namespace kvlathe
