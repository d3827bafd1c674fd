// Tokens of a sequence into other pages of the same layout: what compaction and division by
// saliency need.
#include <cstring>
#include <string>

#include "common/refusal.h"
#include "cpu/work.h"
#include "kvlathe/cpu.h"

namespace kvlathe {
namespace {

void check_pages(const int64_t* pages, int64_t count, int64_t stride, int64_t bytes,
                 const std::string& side) {
  for (int64_t i = 0; i < count; ++i) {
    require(pages[i] >= 0 && pages[i] < bytes / stride, KVLATHE_TOO_SMALL,
            "page id " + std::to_string(pages[i]) + " lies outside the " + side);
  }
}

void check(const kvlathe_move_args& a) {
  require(a.abi_version == KVLATHE_ABI_VERSION, KVLATHE_BAD_VERSION,
          "the caller was built for another kvlathe ABI: rebuild one of them");
  require(a.page_tokens > 0 && a.page_stride > 0 && a.lanes >= 0 && a.fields >= 0 && a.kept >= 0,
          KVLATHE_BAD_ARGUMENT, "a size is negative");
  require(a.source && a.target && (a.kept == 0 || (a.places && a.source_pages && a.target_pages)) &&
              (a.fields == 0 || a.field),
          KVLATHE_BAD_ARGUMENT, "source, target, pages, places or field is null");
  require(a.kept <= a.target_count * a.page_tokens, KVLATHE_TOO_SMALL,
          std::to_string(a.kept) + " tokens do not fit into " + std::to_string(a.target_count) +
              " pages");
  check_pages(a.source_pages, a.source_count, a.page_stride, a.source_bytes, "source");
  check_pages(a.target_pages, a.target_count, a.page_stride, a.target_bytes, "target");
  for (int64_t i = 0; i < int64_t{a.lanes} * a.fields; ++i) {
    const kvlathe_token_field& f = a.field[i];
    require(f.at >= 0 && f.size >= 0 && f.at + f.size * a.page_tokens <= a.page_stride,
            KVLATHE_TOO_SMALL, "a field ends past the page stride");
  }
  for (int64_t i = 0; i < a.lanes * a.kept; ++i) {
    require(a.places[i] >= 0 && a.places[i] < a.source_count * a.page_tokens, KVLATHE_BAD_ARGUMENT,
            "place " + std::to_string(a.places[i]) + " lies past the source's tokens");
  }
}

void move_field(const kvlathe_move_args& a, const kvlathe_token_field& f, const int64_t* places) {
  const auto* from = static_cast<const uint8_t*>(a.source) + f.at;
  for (int64_t page = 0; page < a.target_count; ++page) {
    uint8_t* to = static_cast<uint8_t*>(a.target) + a.target_pages[page] * a.page_stride + f.at;
    for (int64_t j = page * a.page_tokens; j < (page + 1) * a.page_tokens; ++j, to += f.size) {
      if (j >= a.kept) {
        std::memset(to, 0, size_t(f.size * ((page + 1) * a.page_tokens - j)));
        break;
      }
      std::memcpy(to,
                  from + a.source_pages[places[j] / a.page_tokens] * a.page_stride +
                      places[j] % a.page_tokens * f.size,
                  size_t(f.size));
    }
  }
}

void move_lane(const kvlathe_move_args& a, int64_t lane) {
  for (int64_t i = lane * a.fields; i < (lane + 1) * a.fields; ++i)
    move_field(a, a.field[i], a.places + lane * a.kept);
}

}  // namespace
}  // namespace kvlathe

extern "C" int32_t kvlathe_cpu_move(const kvlathe_move_args* args, kvlathe_status* status) {
  return kvlathe::run(status, [&] {
    if (!args) throw kvlathe::Refusal(KVLATHE_BAD_ARGUMENT, "args is null");
    kvlathe::check(*args);
    kvlathe::run_items({}, args->threads, args->lanes,
                       [&](int64_t lane) { kvlathe::move_lane(*args, lane); });
  });
}
