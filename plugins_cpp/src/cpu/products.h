// Float products of kernels.h: RoPE, matrix products in register tiles, transposition. Included by
// kernels.cc only.
#pragma once

#include "cpu/vector.h"

namespace kvlathe {
namespace {

void rotate(const float* x, const float* cos, const float* sin, const int32_t* planes, int width,
            float scale, float* out) {
  const int half = width / 2;
  if (!cos) {
    for (int i = 0; i < width; ++i) out[i] = scale * x[i];
    return;
  }
  for (int i = 0; i < half; ++i) {
    const int plane = planes ? planes[i] : i;
    const float c = scale * cos[plane], s = scale * sin[plane], a = x[i], b = x[i + half];
    out[i] = a * c - b * s;
    out[i + half] = b * c + a * s;
  }
}

inline Floats element(const float* p) { return load(p); }
inline Floats element(const uint16_t* p) { return load_half(p); }

// B: float, or a half as uint16_t.
template <class B>
struct Product {
  const float* a;
  const B* b;
  float* c;
  int64_t lda, ldb, ldc;
  int k;
  bool add;
};

// M rows by V vectors of c, kept in registers: GCC 12 puts them into memory where a loop that fills
// them is not unrolled at once.
template <int M, int V, class B>
void tile(const Product<B>& p) {
  Floats c[M][V];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) c[m][v] = p.add ? load(p.c + m * p.ldc + v * kLanes) : Floats{};
  }
  for (int k = 0; k < p.k; ++k) {
    Floats b[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) b[v] = element(p.b + k * p.ldb + v * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Floats a = all(p.a[m * p.lda + k]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) c[m][v] += a * b[v];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(p.c + m * p.ldc + v * kLanes, c[m][v]);
  }
}

template <int V, int M, class B>
void tile_of(int rows, const Product<B>& p) {
  if constexpr (M > 1) {
    if (rows < M) return tile_of<V, M - 1>(rows, p);
  }
  tile<M, V>(p);
}

template <int V, int M, class B>
void columns(Product<B> p, int m) {
  for (int row = 0; row < m; row += M) {
    tile_of<V, M>(m - row, p);
    p.a += M * p.lda;
    p.c += M * p.ldc;
  }
}

// At most V vectors at a time, for tiles of M rows.
template <int V, int M, class B>
void split_columns(Product<B> p, int m, int vectors) {
  for (; vectors >= V; vectors -= V, p.b += V * kLanes, p.c += V * kLanes) columns<V, M>(p, m);
  if constexpr (V > 1) {
    if (vectors) split_columns<V - 1, M>(p, m, vectors);
  }
}

// M rows of c += a times rows k .. k + K - 1 of b.
template <int M, int K, class B>
void add_rows(const Product<B>& p, int k, int n) {
  Floats a[M][K];
  for (int m = 0; m < M; ++m) {
    for (int j = 0; j < K; ++j) a[m][j] = all(p.a[m * p.lda + k + j]);
  }
  for (int i = 0; i < n; i += kLanes) {
    Floats c[M];
    for (int m = 0; m < M; ++m) c[m] = load(p.c + m * p.ldc + i);
    for (int j = 0; j < K; ++j) {
      const Floats b = element(p.b + (k + j) * p.ldb + i);
      for (int m = 0; m < M; ++m) c[m] += a[m][j] * b;
    }
    for (int m = 0; m < M; ++m) store(p.c + m * p.ldc + i, c[m]);
  }
}

// For one row of c, or two: b, read once, comes from memory as it lies. The processor fetches rows
// faster than columns.
template <int M, class B>
void by_rows(const Product<B>& p, int n) {
  for (int m = 0; m < M && !p.add; ++m) {
    for (int i = 0; i < n; i += kLanes) store(p.c + m * p.ldc + i, Floats{});
  }
  int k = 0;
  for (; k + 4 <= p.k; k += 4) add_rows<M, 4>(p, k, n);
  for (; k < p.k; ++k) add_rows<M, 1>(p, k, n);
}

template <class B>
void multiply_as(const Product<B>& p, int m, int n) {
  if (m == 1) return by_rows<1>(p, n);
  if (m == 2) return by_rows<2>(p, n);
  split_columns<kTileVectors, kTileRows>(p, m, n / kLanes);
}

void multiply(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
              int m, int n, int k, bool add) {
  // A matrix that is read once comes from memory as it lies.
  for (int row = 0; m <= 2 && row < k; ++row) {
    for (int i = 0; i < n; i += 16) __builtin_prefetch(b + row * ldb + i, 0, 2);
  }
  multiply_as(Product<float>{a, b, c, lda, ldb, ldc, k, add}, m, n);
}

void transpose(const float* x, int64_t ldx, float* out, int64_t ldo, int rows, int columns) {
  typedef float Four __attribute__((vector_size(16)));
  typedef Four LooseFour __attribute__((aligned(4), may_alias));
  typedef int32_t Pick __attribute__((vector_size(16)));
  int r = 0;
  for (; r + 4 <= rows; r += 4) {
    for (int c = 0; c < columns; c += 4) {
      Four x0, x1, x2, x3;
      const float* from = x + r * ldx + c;
      x0 = *(const LooseFour*)from, x1 = *(const LooseFour*)(from + ldx);
      x2 = *(const LooseFour*)(from + 2 * ldx), x3 = *(const LooseFour*)(from + 3 * ldx);
#if defined(__clang__)
      const Four a = __builtin_shufflevector(x0, x1, 0, 4, 1, 5),
                 b = __builtin_shufflevector(x2, x3, 0, 4, 1, 5);
      const Four d = __builtin_shufflevector(x0, x1, 2, 6, 3, 7),
                 e = __builtin_shufflevector(x2, x3, 2, 6, 3, 7);
      const Four y0 = __builtin_shufflevector(a, b, 0, 1, 4, 5),
                 y1 = __builtin_shufflevector(a, b, 2, 3, 6, 7);
      const Four y2 = __builtin_shufflevector(d, e, 0, 1, 4, 5),
                 y3 = __builtin_shufflevector(d, e, 2, 3, 6, 7);
#else
      const Pick low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, first = {0, 1, 4, 5},
                 second = {2, 3, 6, 7};
      const Four a = __builtin_shuffle(x0, x1, low), b = __builtin_shuffle(x2, x3, low);
      const Four d = __builtin_shuffle(x0, x1, high), e = __builtin_shuffle(x2, x3, high);
      const Four y0 = __builtin_shuffle(a, b, first), y1 = __builtin_shuffle(a, b, second);
      const Four y2 = __builtin_shuffle(d, e, first), y3 = __builtin_shuffle(d, e, second);
#endif
      float* to = out + c * ldo + r;
      *(LooseFour*)to = y0, *(LooseFour*)(to + ldo) = y1, *(LooseFour*)(to + 2 * ldo) = y2,
      *(LooseFour*)(to + 3 * ldo) = y3;
    }
  }
  for (; r < rows; ++r) {
    for (int c = 0; c < columns; ++c) out[c * ldo + r] = x[r * ldx + c];
  }
}

}  // namespace
}  // namespace kvlathe
