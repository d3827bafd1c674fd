// A softmax that is not that of its scores alone: they are bounded, or a sink logit of their query
// head stands beside them. Only kernels whose parameters say kScored compute it.
#pragma once

#include <cmath>

#include "cuda/device.cuh"

namespace kvlathe::cuda {

constexpr float kLog2E = 1.4426950408889634f;

// bound * tanh(s / bound). tanh |x| = (1 - t) / (1 + t) with t = exp(-2 |x|), which never overflows.
__device__ inline float bounded(float s, float bound) {
  const float t = exp2_fast(fabsf(s) * (-2.f * kLog2E / bound));
  return copysignf((1.f - t) / (1.f + t) * bound, s);
}

// What the sink logit at place `at` adds to a sum of exponentials below m. In base 2, as m is.
template <class P>
__device__ inline float sink_term(const P& p, int at, float m) {
  return p.sinks ? exp2_fast(p.sinks[at] * kLog2E - m) : 0.f;
}

}  // namespace kvlathe::cuda
