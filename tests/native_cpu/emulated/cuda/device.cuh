// src/cuda/device.cuh on a CPU: what is PTX there and runs in tests is C++ here.
// Copies are done when they are asked for.
#pragma once

#define copy16 ptx_copy16
#define load_matrices ptx_load_matrices
#define load_matrices_transposed ptx_load_matrices_transposed
#define transposed ptx_transposed
#define with_bits ptx_with_bits
#define sub_halves ptx_sub_halves
#define fma_halves ptx_fma_halves
#define load_relaxed ptx_load_relaxed
#define store_relaxed ptx_store_relaxed
#define prefetch ptx_prefetch
#define load_once ptx_load_once
#define exp2_fast ptx_exp2_fast
#include_next "cuda/device.cuh"
#undef copy16
#undef load_matrices
#undef load_matrices_transposed
#undef transposed
#undef with_bits
#undef sub_halves
#undef fma_halves
#undef load_relaxed
#undef store_relaxed
#undef prefetch
#undef load_once
#undef exp2_fast

namespace kvlathe::cuda {

inline void copy16(uint32_t to, const void *from, bool valid) {
  if (valid)
    std::memcpy(memory + to, from, 16);
  else
    std::memset(memory + to, 0, 16);
}
inline uint32_t with_bits(uint32_t x, uint32_t mask, uint32_t bits) {
  return (x & mask) | bits;
}
inline uint32_t sub_halves(uint32_t x, uint32_t y) {
  const auto of = [&](int at) {
    return Half::widen(uint16_t(x >> at)) - Half::widen(uint16_t(y >> at));
  };
  return Half::pack(of(0), of(16));
}
inline uint32_t fma_halves(uint32_t x, uint32_t y, uint32_t z) {
  const auto of = [&](int at) {
    return fmaf(Half::widen(uint16_t(x >> at)), Half::widen(uint16_t(y >> at)),
                Half::widen(uint16_t(z >> at)));
  };
  return Half::pack(of(0), of(16));
}
template <class T> T load_relaxed(const T *at) { return *at; }
template <class T> void store_relaxed(T *at, T x) { *at = x; }
inline void prefetch(const void *) {}
inline uint4 load_once(const void *at) { return *static_cast<const uint4 *>(at); }

#ifdef KVLATHE_FIBERS

// PTX ISA, ldmatrix: lane 4 r + c gets elements 2 c and 2 c + 1 of row r of each
// matrix or, transposed, of column r.
template <bool kTransposed>
void load_eight_by_eight(uint32_t (&x)[4], uint32_t row) {
  static uint32_t rows[1024], out[1024][4];
  const unsigned own = threadIdx.x, first = own / 32 * 32;
  rows[own] = row;
  Fibers::current().meet(32, [&] {
    for (unsigned lane = 0; lane < 32; ++lane) {
      for (unsigned m = 0; m < 4; ++m) {
        uint32_t word = 0;
        for (unsigned i = 0; i < 2; ++i) {
          unsigned r = lane / 4, c = lane % 4 * 2 + i;
          if (kTransposed)
            std::swap(r, c);
          word |= uint32_t(load_half(rows[first + 8 * m + r] + 2 * c)) << 16 * i;
        }
        out[first + lane][m] = word;
      }
    }
  });
  std::copy_n(out[own], 4, x);
}
inline void load_matrices(uint32_t (&x)[4], uint32_t row) {
  load_eight_by_eight<false>(x, row);
}
inline void load_matrices_transposed(uint32_t (&x)[4], uint32_t row) {
  load_eight_by_eight<true>(x, row);
}
inline uint32_t transposed(uint32_t x) {
  uint32_t out = 0;
  const unsigned lane = threadIdx.x % 32;
  for (unsigned i = 0; i < 2; ++i) {
    const unsigned r = lane % 4 * 2 + i, c = lane / 4;
    const uint32_t word = __shfl_sync(~0u, x, int(r * 4 + c / 2));
    out |= (word >> c % 2 * 16 & 0xffff) << 16 * i;
  }
  return out;
}

#endif
inline float exp2_fast(float x) { return std::exp2(x); }

} // namespace kvlathe::cuda
