// The state of an online softmax over some of the tokens, and how two of them become one.
//
// Scores are in base 2: q' carries log2(e) (project.cc), so every exponential is one exp2. For each
// row
//
//     m = max of the scores so far          l = sum of exp2(score - m)
//     o = sum of exp2(score - m) * v        the answer is o / l, its log-sum-exp m + log2(l)
//
// which is flash attention's state (Dao et al., 2022): spans of tokens are attended apart and
// merged in any order. A sink is one more score, whose v is zero: it adds to l alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace kvlathe {

constexpr float kLog2E = 1.44269504088896f;

// Of `rows` rows of `width` channels. The memory is lent: o [rows, width], m [rows], l [rows].
struct SoftmaxState {
  int64_t rows, width;
  float *o, *m, *l;

  static int64_t floats(int64_t rows, int64_t width) { return rows * (width + 32); }

  SoftmaxState(float* memory, int64_t rows, int64_t width)
      : rows(rows), width(width), o(memory), m(memory + rows * width), l(m + rows) {}

  void clear() {
    std::fill(o, o + rows * width, 0.f);
    std::fill(m, m + rows, -INFINITY);
    std::fill(l, l + rows, 0.f);
  }

  void merge(const SoftmaxState& other) {
    for (int64_t i = 0; i < rows; ++i) {
      const float both = std::max(m[i], other.m[i]);
      const float mine = std::exp2(m[i] - both), theirs = std::exp2(other.m[i] - both);
      m[i] = both;
      l[i] = l[i] * mine + other.l[i] * theirs;
      for (int64_t c = i * width; c < (i + 1) * width; ++c)
        o[c] = o[c] * mine + other.o[c] * theirs;
    }
  }
};

}  // namespace kvlathe
