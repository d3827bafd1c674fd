// src/cuda/warp.cuh on a CPU, for threads that are fibers (cuda_runtime.h).
#pragma once

#include <cuda_runtime.h>

#include "cuda/device.cuh"

#define KVLATHE_DYNAMIC_SHARED(name)                                           \
  char *const name = reinterpret_cast<char *>(memory) + kDynamic

namespace kvlathe::cuda {

inline uint32_t dynamic_shared() { return kDynamic; }
inline void meet_threads(int threads) {
  Fibers::current().meet(unsigned(threads), [] {});
}

inline void meet_apart(int threads) { meet_threads(threads); }

inline float from_lane_xor(float x, int mask) {
  static float all[1024];
  static float other[1024];
  const unsigned own = threadIdx.x, first = own / 32 * 32;
  all[own] = x;
  Fibers::current().meet(32, [&] {
    for (unsigned i = first; i < first + 32; ++i)
      other[i] = all[i ^ unsigned(mask)];
  });
  return other[own];
}

// PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".
template <class E>
void multiply_tiles(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                    uint32_t b1) {
  struct Own {
    uint32_t a[4], b[2];
    float d[4];
  };
  static Own all[1024];
  const unsigned own = threadIdx.x, first = own / 32 * 32;
  std::copy_n(a, 4, all[own].a);
  std::copy_n(d, 4, all[own].d);
  all[own].b[0] = b0, all[own].b[1] = b1;
  Fibers::current().meet(32, [&] {
    const auto element = [](const uint32_t *words, int k) {
      return E::widen(uint16_t(words[0] >> k % 2 * 16));
    };
    float x[16][16], y[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const Own &from = all[first + lane];
      for (int i = 0; i < 8; ++i) {
        const int row = lane / 4 + i / 2 % 2 * 8,
                  column = lane % 4 * 2 + i % 2 + i / 4 * 8;
        x[row][column] = element(from.a + i / 2, i);
      }
      for (int i = 0; i < 4; ++i)
        y[lane % 4 * 2 + i % 2 + i / 2 * 8][lane / 4] =
            element(from.b + i / 2, i);
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k)
          all[first + lane].d[i] += x[row][k] * y[k][column];
      }
    }
  });
  std::copy_n(all[own].d, 4, d);
}

} // namespace kvlathe::cuda
