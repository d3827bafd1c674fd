// Answers questions about number formats from common/formats.h: a line of
// integers for each line of input. test_formats.py asks, and compares the
// answers with kvlathe/plan/formats.py.
#include <cstddef>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "common/float8.h"
#include "common/formats.h"
#include "common/layer_table.h"
#include "cpu/numbers.h"

namespace kvlathe {
namespace {

using Numbers = std::vector<int64_t>;

Numbers of_width(int bits) {
  if (!is_width(bits))
    return {0};
  if (!is_quantized(bits))
    return {1, 0, pool_views(bits)};
  return {1,
          1,
          pool_views(bits),
          is_packed(bits),
          runs_of(bits),
          codes_together(bits),
          levels_of(bits)};
}

// The sizes of the groups along a rank, counted in steps of 16 channels.
Numbers of_rank_groups(int rank, int group) {
  const RankGroups groups(rank, group);
  Numbers sizes(size_t(groups.count), 0);
  for (int step = 0; step < rank / 16; ++step)
    sizes[size_t(groups.of_step(step))] += 16;
  return sizes;
}

Numbers of_format(const Format &format) {
  const bool quantized = format.quantized();
  return {format.bits,         format.axis,           format.group,   quantized,
          format.by_channel(), format.fixed_levels(), format.halves()};
}

// What the codes of a format are worth.
Numbers of_table(const Format &format) {
  const uint8_t *table = format.table();
  Numbers worth;
  for (int code = 0; code <= levels_of(format.bits); ++code)
    worth.push_back(table ? table[code] : code);
  return worth;
}

// What a float of 8 bits is worth, in 512ths.
Numbers of_float8(int code) {
  const float small = float_of_half(small_half_of(uint8_t(code)));
  return {int64_t(small * kFloat8Unit * 512)};
}

// The code nearest to the float with such bits, and the least half from it up.
Numbers of_float(uint32_t bits) {
  const float x = float_of_bits(bits);
  const uint16_t nearest = half_of_float(x);
  return {float8_of(x), least_half(x, nearest, float_of_half(nearest))};
}

// Where code `code` of a row of `count` codes of 3 bits begins, and its run.
Numbers of_threes(int64_t code, int64_t count) {
  const Threes place = threes_at(code, count);
  return {place.at, place.run};
}

// K, then V, of a bucket whose first fields are `x`.
template <class Bucket> Numbers of_bucket(const Numbers &x) {
  Bucket bucket{};
  static_assert(offsetof(Bucket, bits_k) == 0);
  for (size_t i = 0; i < x.size(); ++i)
    reinterpret_cast<int32_t *>(&bucket)[i] = int32_t(x[i]);
  Numbers out = of_format(format_k(bucket));
  for (int64_t number : of_format(format_v(bucket)))
    out.push_back(number);
  out.push_back(any_quantized(bucket));
  return out;
}

Numbers answer(const std::string &question, const Numbers &x) {
  const auto number = [&](size_t i) { return int(x.at(i)); };
  if (question == "width")
    return of_width(number(0));
  if (question == "slab")
    return {slab_bytes(x.at(0), x.at(1), x.at(2))};
  if (question == "sum")
    return {sum_bytes(number(0), number(1))};
  if (question == "sums")
    return {sums_at(0, x.at(0))};
  if (question == "pair")
    return {kPairBytes};
  if (question == "rank_groups")
    return of_rank_groups(number(0), number(1));
  if (question == "token_groups")
    return {token_groups(number(0), number(1))};
  if (question == "table")
    return of_table({number(0), number(1), 16});
  if (question == "float8")
    return of_float8(number(0));
  if (question == "float")
    return of_float(uint32_t(x.at(0)));
  if (question == "threes")
    return of_threes(x.at(0), x.at(1));
  if (question == "bucket")
    return of_bucket<BucketForm>(x);
  if (question == "part")
    return of_bucket<kvlathe_part>(x);
  return {-1};
}

} // namespace
} // namespace kvlathe

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string question;
    words >> question;
    kvlathe::Numbers x;
    for (int64_t number; words >> number;)
      x.push_back(number);
    for (int64_t number : kvlathe::answer(question, x))
      std::cout << number << ' ';
    std::cout << '\n';
  }
}
