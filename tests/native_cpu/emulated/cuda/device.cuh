// src/cuda/device.cuh on a CPU: what is PTX there and runs in tests is C++ here.
// Copies are done when they are asked for.
#pragma once

#define copy16 ptx_copy16
#define copy4 ptx_copy4
#define multiply_signed ptx_multiply_signed
#define multiply_unsigned ptx_multiply_unsigned
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
#undef copy4
#undef multiply_signed
#undef multiply_unsigned
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
inline void copy4(int32_t *to, const int32_t *from) { *to = *from; }
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
// Who waits for another warp's result reads again and again: others run meanwhile.
template <class T> T load_relaxed(const T *at) {
#ifdef KVLATHE_FIBERS
  Fibers::current().pass();
#endif
  return *at;
}
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

// PTX ISA, "Matrix Fragments for mma.m16n8k32": unsigned bytes of a, those of b
// signed or not. Of m16n8k16 the second half of the inner dimension is zeros.
template <class Byte>
void multiply_bytes(int32_t (&d)[4], const uint32_t (&a)[4],
                    const uint32_t (&b)[2]) {
  struct Own {
    uint32_t a[4], b[2];
    int32_t d[4];
  };
  static Own all[1024];
  const unsigned own = threadIdx.x, first = own / 32 * 32;
  std::copy_n(a, 4, all[own].a);
  std::copy_n(b, 2, all[own].b);
  std::copy_n(d, 4, all[own].d);
  Fibers::current().meet(32, [&] {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4, column = lane % 4 * 2 + i % 2;
        int32_t &sum = all[first + lane].d[i];
        for (int k = 0; k < 32; ++k) {
          const int t = k % 16 / 4, half = k / 16, shift = k % 4 * 8;
          const uint32_t x =
              all[first + row * 4 + t].a[half * 2 + i / 2] >> shift;
          const uint32_t y = all[first + column * 4 + t].b[half] >> shift;
          sum += int32_t(uint8_t(x)) * int32_t(Byte(y));
        }
      }
    }
  });
  std::copy_n(all[own].d, 4, d);
}
inline void multiply_signed(int32_t (&d)[4], uint32_t a0, uint32_t a1,
                            uint32_t b) {
  multiply_bytes<int8_t>(d, {a0, a1, 0, 0}, {b, 0});
}
inline void multiply_signed(int32_t (&d)[4], uint32_t a0, uint32_t a1,
                            uint32_t a2, uint32_t a3, uint32_t b0,
                            uint32_t b1) {
  multiply_bytes<int8_t>(d, {a0, a1, a2, a3}, {b0, b1});
}
inline void multiply_unsigned(int32_t (&d)[4], uint32_t a0, uint32_t a1,
                              uint32_t a2, uint32_t a3, uint32_t b0,
                              uint32_t b1) {
  multiply_bytes<uint8_t>(d, {a0, a1, a2, a3}, {b0, b1});
}

#endif
inline float exp2_fast(float x) { return std::exp2(x); }

} // namespace kvlathe::cuda
