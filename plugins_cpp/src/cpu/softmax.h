// One block of an online softmax (softmax_state.h has the equations), and the bound of scores. Included by kernels.cc only.
#pragma once

#include "cpu/vector.h"

namespace kvlathe {
namespace {

// tanh |x| = (1 - t) / (1 + t) with t = exp(-2 |x|), which never overflows.
void bound_scores(float* scores, int64_t ld, int rows, int n, float bound) {
  constexpr float kTwoLog2E = 2.88539008177793f;
  const int end = (n + 15) / 16 * 16;
  for (int r = 0; r < rows; ++r) {
    for (int i = 0; i < end; i += kLanes) {
      const Floats x = load(scores + r * ld + i);
      const Floats size = larger(x, -x);
      const Floats t = exp2(size * (-kTwoLog2E / bound));
      const Floats bounded = (1.f - t) / (1.f + t) * bound;
      store(scores + r * ld + i, x < 0.f ? -bounded : bounded);
    }
  }
}

void soften(float* scores, int64_t ld, int rows, int n, const int32_t* seen, float* m, float* l,
            float* o, int width) {
  const int end = (n + 15) / 16 * 16;
  for (int r = 0; r < rows; ++r) {
    float* s = scores + r * ld;
    const int count = seen && seen[r] < n ? seen[r] : n;
    for (int i = count > 0 ? count : 0; i < end; ++i) s[i] = -__builtin_inff();
    Floats most = load(s);
    for (int i = kLanes; i < end; i += kLanes) most = larger(most, load(s + i));
    const float before = m[r], here = largest(most), now = here > before ? here : before;
    if (count <= 0) {
      for (int i = 0; i < end; i += kLanes) store(s + i, Floats{});
      continue;
    }
    Floats total{};
    for (int i = 0; i < end; i += kLanes) {
      const Floats weight = exp2(load(s + i) - now);
      store(s + i, weight);
      total += weight;
    }
    if (now == before) {
      l[r] += sum(total);
      continue;
    }
    const float shrink = exp2(all(before - now))[0];
    m[r] = now;
    l[r] = l[r] * shrink + sum(total);
    float* row = o + int64_t{r} * width;
    for (int i = 0; i < width; i += kLanes) store(row + i, load(row + i) * shrink);
  }
}

}  // namespace
}  // namespace kvlathe
