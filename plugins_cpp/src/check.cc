#include "check.h"

#include <algorithm>
#include <cstdio>
#include <map>

namespace kvlathe {
namespace {

constexpr int kRankMultiple = 16;
constexpr int64_t kAlign = 128;  // ALIGN of export/layout.py

void require(bool ok, kvlathe_code code, const std::string& message) {
  if (!ok) throw Refusal(code, message);
}

bool aligned(const void* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

void check_sizes(const kvlathe_attend_decode_args& a) {
  require(a.abi_version == KVLATHE_ABI_VERSION, KVLATHE_BAD_VERSION,
          "the caller was built for kvlathe ABI " + std::to_string(a.abi_version) + " and this library has " +
              std::to_string(KVLATHE_ABI_VERSION) + ": rebuild one of them");
  require(a.element >= KVLATHE_F32 && a.element <= KVLATHE_BF16, KVLATHE_BAD_ARGUMENT,
          "element " + std::to_string(a.element) + " is none of F32, F16, BF16");
  require(a.batch >= 0 && a.group_size >= 1, KVLATHE_BAD_ARGUMENT, "batch is negative or group_size below 1");
  require((a.flags & ~(KVLATHE_OVERLAP | KVLATHE_APPENDED)) == 0, KVLATHE_BAD_ARGUMENT,
          "flags holds bits that this library does not know");
  require(a.page_tokens > 0 && a.page_tokens % kRankMultiple == 0, KVLATHE_BAD_ARGUMENT,
          "page_tokens is " + std::to_string(a.page_tokens) + " and must be a positive multiple of 16");
  require(a.part_count >= 1 && a.part_count <= KVLATHE_MAX_PARTS && a.parts, KVLATHE_BAD_ARGUMENT,
          "part_count is " + std::to_string(a.part_count) + " and must be 1 to " + std::to_string(KVLATHE_MAX_PARTS));
  require(aligned(a.pool, 16), KVLATHE_MISALIGNED, "the pool is not aligned to 16 bytes");
  require(aligned(a.q, 16) && aligned(a.o, 16) && a.q_stride % 8 == 0 && a.o_stride % 8 == 0, KVLATHE_MISALIGNED,
          "rows of q and o must start at multiples of 16 bytes");
}

void check_bits(int32_t bits, int32_t axis, int32_t group, const kvlathe_attend_decode_args& a) {
  const int32_t element_bits = a.element == KVLATHE_F32 ? 32 : 16;
  require(bits == element_bits || bits == 8 || bits == 4 || bits == 2, KVLATHE_BAD_ARGUMENT,
          "a part has " + std::to_string(bits) + " bits: it must be 8, 4, 2 or the element's " +
              std::to_string(element_bits));
  if (bits > 8) return;
  require(axis == KVLATHE_AXIS_RANK || axis == KVLATHE_AXIS_TOKEN, KVLATHE_BAD_ARGUMENT,
          "a part's axis is neither rank nor token");
  require(group >= kRankMultiple && group % kRankMultiple == 0, KVLATHE_BAD_ARGUMENT,
          "a part's group is no multiple of 16");
  require(axis != KVLATHE_AXIS_TOKEN || a.page_tokens % group == 0, KVLATHE_BAD_ARGUMENT,
          "groups of " + std::to_string(group) + " tokens do not divide a page of " + std::to_string(a.page_tokens));
}

void check_slab(const LaneRow& row, const kvlathe_part& part, int64_t page_tokens) {
  const std::string where = "the lane of head " + std::to_string(row.head);
  require(row.rank_k > 0 && row.rank_v > 0 && row.rank_k % kRankMultiple == 0 && row.rank_v % kRankMultiple == 0,
          KVLATHE_BAD_ARGUMENT,
          where + " has ranks " + std::to_string(row.rank_k) + "/" + std::to_string(row.rank_v) +
              ": not positive multiples of 16");
  for (int32_t offset : {row.k, row.k_meta, row.v, row.v_meta}) {
    require(offset >= 0 && offset % kAlign == 0, KVLATHE_MISALIGNED,
            where + " has an offset that is not a multiple of 128 bytes");
  }
  const int64_t end = std::max(row.k + slab_bytes(row.rank_k, page_tokens, part.bits_k),
                               row.v + slab_bytes(row.rank_v, page_tokens, part.bits_v));
  const int64_t meta = std::max(row.k_meta + 4 * int64_t{row.groups_k}, row.v_meta + 4 * int64_t{row.groups_v});
  require(std::max(end, meta) <= part.page_stride, KVLATHE_TOO_SMALL, where + " ends past the page stride");
}

void check_part(const kvlathe_part& part, const kvlathe_attend_decode_args& a) {
  require(part.lane_count >= 1 && part.lane_count <= KVLATHE_MAX_HEADS && part.lanes, KVLATHE_BAD_ARGUMENT,
          "a part has " + std::to_string(part.lane_count) + " lanes: 1 to " + std::to_string(KVLATHE_MAX_HEADS) +
              " are possible");
  require(a.batch == 0 || (part.page_table && part.lengths && part.page_table_stride >= 1), KVLATHE_BAD_ARGUMENT,
          "a part has no page table or no lengths");
  require(part.page_stride > 0 && part.page_stride % kAlign == 0, KVLATHE_MISALIGNED,
          "a page stride is not a multiple of 128 bytes");
  require(a.batch == 0 || part.page_stride <= a.pool_bytes, KVLATHE_TOO_SMALL, "the pool is smaller than one page");
  check_bits(part.bits_k, part.axis_k, part.group_k, a);
  check_bits(part.bits_v, part.axis_v, part.group_v, a);
}

}  // namespace

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
    const auto* rows = reinterpret_cast<const LaneRow*>(part.lanes);
    for (int32_t i = 0; i < part.lane_count; ++i) {
      require(i == 0 || rows[i].head > rows[i - 1].head, KVLATHE_BAD_ARGUMENT,
              "a part's lanes are not sorted by head, or not of one layer");
      check_slab(rows[i], part, a.page_tokens);
      Head& head = by_head.try_emplace(rows[i].head, Head{rows[i].rank_k, rows[i].rank_v, 0, 0, {}}).first->second;
      require(head.rank_k == rows[i].rank_k && head.rank_v == rows[i].rank_v, KVLATHE_BAD_ARGUMENT,
              "head " + std::to_string(rows[i].head) + " has different ranks in two parts");
      head.lane[p] = &rows[i];
    }
  }
  require(by_head.size() <= KVLATHE_MAX_HEADS, KVLATHE_UNSUPPORTED, "the call has more than 64 heads");
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

void write_status(kvlathe_status* status, kvlathe_code code, const char* message) noexcept {
  if (!status) return;
  status->code = code;
  std::snprintf(status->message, sizeof status->message, "%s", message);
}

}  // namespace kvlathe

extern "C" uint32_t kvlathe_abi_version(void) { return KVLATHE_ABI_VERSION; }
