// Warpgroup products of Hopper (sm_90a), one function each. Any multiple of 16 is a rank.
//
// Q lies in core matrices: 8 rows of 16 bytes, 128 contiguous bytes. A tile of R rows and 8 C
// columns is C columns of core matrices, R * 16 bytes apart: element (r, c) is at c / 8 * R * 16 +
// r * 16 + c % 8 * 2. K and V lie in swizzled blocks (prompt_stages.cuh). Products along columns (Q
// and K) read a tile as it is, products along rows (V) read it as transposed.
#pragma once

#include <type_traits>

#include "cuda/device.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define KVLATHE_WGMMA 1
#endif

namespace kvlathe::cuda {

constexpr int kCore = 128;  // bytes

// The descriptor of a tile in shared memory. `leading` and `stride` are the two distances between
// core matrices, in bytes.
__device__ inline uint64_t describe(uint32_t address, int leading, int stride) {
  return uint64_t(address >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32;
}

// The same of swizzled blocks [rows][kSteps x 16], `block` bytes apart (prompt_stages.cuh), that
// begin at multiples of 1024 bytes. Tiles that are read along their rows have one block.
template <int kSteps>
__device__ inline uint64_t describe_blocks(uint32_t address, int block) {
  constexpr uint64_t mode = kSteps == 4 ? 1 : kSteps == 2 ? 2 : 3;  // 128, 64 or 32 bytes
  return describe(address, block, 256 * kSteps) | mode << 62;
}

#ifdef KVLATHE_WGMMA

// Keeps registers that asynchronous products read or write in place at this point of the program.
// The compiler does not know that the products use them.
template <class T, int kCount>
__device__ inline void pin(T (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (std::is_same_v<T, float>)
      asm volatile("" : "+f"(x[i])::"memory");
    else
      asm volatile("" : "+r"(x[i])::"memory");
  }
}

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void close_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits for all products except those of the last kLeft groups.
template <int kLeft>
__device__ inline void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

#define KVLATHE_T(a, b, c, d, e, f, g, h) \
  "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define KVLATHE_T1 KVLATHE_T(0, 1, 2, 3, 4, 5, 6, 7)
#define KVLATHE_T2 KVLATHE_T1 "," KVLATHE_T(8, 9, 10, 11, 12, 13, 14, 15)
#define KVLATHE_T3 KVLATHE_T2 "," KVLATHE_T(16, 17, 18, 19, 20, 21, 22, 23)
#define KVLATHE_T4 KVLATHE_T3 "," KVLATHE_T(24, 25, 26, 27, 28, 29, 30, 31)
#define KVLATHE_T5 KVLATHE_T4 "," KVLATHE_T(32, 33, 34, 35, 36, 37, 38, 39)
#define KVLATHE_T6 KVLATHE_T5 "," KVLATHE_T(40, 41, 42, 43, 44, 45, 46, 47)
#define KVLATHE_T7 KVLATHE_T6 "," KVLATHE_T(48, 49, 50, 51, 52, 53, 54, 55)
#define KVLATHE_T8 KVLATHE_T7 "," KVLATHE_T(56, 57, 58, 59, 60, 61, 62, 63)
#define KVLATHE_F(i)                                                                              \
  "+f"(d[8 * i]), "+f"(d[8 * i + 1]), "+f"(d[8 * i + 2]), "+f"(d[8 * i + 3]), "+f"(d[8 * i + 4]), \
      "+f"(d[8 * i + 5]), "+f"(d[8 * i + 6]), "+f"(d[8 * i + 7])
#define KVLATHE_F1 KVLATHE_F(0)
#define KVLATHE_F2 KVLATHE_F1, KVLATHE_F(1)
#define KVLATHE_F3 KVLATHE_F2, KVLATHE_F(2)
#define KVLATHE_F4 KVLATHE_F3, KVLATHE_F(3)
#define KVLATHE_F5 KVLATHE_F4, KVLATHE_F(4)
#define KVLATHE_F6 KVLATHE_F5, KVLATHE_F(5)
#define KVLATHE_F7 KVLATHE_F6, KVLATHE_F(6)
#define KVLATHE_F8 KVLATHE_F7, KVLATHE_F(7)

// d [64 x kKeys] = a [64 x 16] b [16 x kKeys], added to d if `add`. a and b lie in shared memory
// and are both read along their columns.
template <class E, int kKeys>
__device__ inline void multiply_tiles(float (&d)[kKeys / 2], uint64_t a, uint64_t b, int add) {
#define KVLATHE_TILES(type, n, eights, r0, r1, r2)                                                \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #r2 ", 0; wgmma.mma_async.sync.aligned.m64n" #n \
               "k16.f32." type "." type " {" KVLATHE_T##eights "}, %" #r0 ", %" #r1               \
                                                               ", p, 1, 1, 0, 0; }"               \
               : KVLATHE_F##eights                                                                \
               : "l"(a), "l"(b), "r"(add))
#define KVLATHE_EITHER(n, eights, r0, r1, r2)       \
  if constexpr (kKeys == n) {                       \
    if constexpr (std::is_same_v<E, Half>)          \
      KVLATHE_TILES("f16", n, eights, r0, r1, r2);  \
    else                                            \
      KVLATHE_TILES("bf16", n, eights, r0, r1, r2); \
  }
  KVLATHE_EITHER(64, 4, 32, 33, 34)
  KVLATHE_EITHER(128, 8, 64, 65, 66)
#undef KVLATHE_EITHER
#undef KVLATHE_TILES
}

// d [64 x 16 kV] += a [64 x 16] b [16 x 16 kV]. a is in registers; b lies in shared memory and is
// read along its rows.
template <class E, int kV>
__device__ inline void multiply_rows(float (&d)[8 * kV], const uint32_t* a, uint64_t b) {
#define KVLATHE_ROWS(type, n, steps, r0, r1, r2, r3, r4)                               \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type         \
               " {" KVLATHE_T##steps "}, {%" #r0 ",%" #r1 ",%" #r2 ",%" #r3 "}, %" #r4 \
                                     ", 1, 1, 1, 1;"                                   \
               : KVLATHE_F##steps                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define KVLATHE_EITHER(n, steps, r0, r1, r2, r3, r4)      \
  if constexpr (kV == steps) {                            \
    if constexpr (std::is_same_v<E, Half>)                \
      KVLATHE_ROWS("f16", n, steps, r0, r1, r2, r3, r4);  \
    else                                                  \
      KVLATHE_ROWS("bf16", n, steps, r0, r1, r2, r3, r4); \
  }
  KVLATHE_EITHER(16, 1, 8, 9, 10, 11, 12)
  KVLATHE_EITHER(32, 2, 16, 17, 18, 19, 20)
  KVLATHE_EITHER(48, 3, 24, 25, 26, 27, 28)
  KVLATHE_EITHER(64, 4, 32, 33, 34, 35, 36)
  KVLATHE_EITHER(80, 5, 40, 41, 42, 43, 44)
  KVLATHE_EITHER(96, 6, 48, 49, 50, 51, 52)
  KVLATHE_EITHER(112, 7, 56, 57, 58, 59, 60)
  KVLATHE_EITHER(128, 8, 64, 65, 66, 67, 68)
#undef KVLATHE_EITHER
#undef KVLATHE_ROWS
}

#endif

}  // namespace kvlathe::cuda
