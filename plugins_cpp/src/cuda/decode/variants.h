// The choice among the compiled kernels for codes.
#pragma once

#include <type_traits>

#include "common/formats.h"
#include "cuda/device.cuh"

namespace kvlathe::cuda {

// find(element, steps, bits, fill): the kernel for them, the last three as constants. steps: the
// widest rank / 16 that registers are sized for. With fill 2 there is room for the widest.
template <class Find>
const void* codes_variant(bool half, bool wide, int bits, int fill, Find find) {
  using std::integral_constant;
  const auto sized = [&](auto element, auto width) {
    if (fill == 2)
      return find(element, integral_constant<int, 8>{}, width, integral_constant<int, 2>{});
    return wide ? find(element, integral_constant<int, 8>{}, width, integral_constant<int, 1>{})
                : find(element, integral_constant<int, 6>{}, width, integral_constant<int, 1>{});
  };
  const auto of = [&](auto element) {
    const void* found = nullptr;
    for_known_bits(bits, [&](auto known) { found = sized(element, known); });
    return found;
  };
  return half ? of(Half{}) : of(Bfloat{});
}

}  // namespace kvlathe::cuda
