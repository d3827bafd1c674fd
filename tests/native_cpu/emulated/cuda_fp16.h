// What device.cuh and forms.cuh need of CUDA, for one lane at a time on a CPU. Shared memory is the
// array `memory`, and its addresses are places in it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __host__
#define __noinline__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))

struct uint4 {
  uint32_t x, y, z, w;
};
struct uint2 {
  uint32_t x, y;
};
struct int2 {
  int x, y;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct Index {
  unsigned x;
};
inline Index threadIdx;
alignas(128) inline uint8_t memory[1 << 20];

inline uint64_t __cvta_generic_to_shared(const void* p) {
  return uint64_t(static_cast<const uint8_t*>(p) - memory);
}
inline void* __cvta_shared_to_generic(uint32_t at) { return memory + at; }
#ifndef KVLATHE_FIBERS  // cuda_runtime.h has those of a warp
inline int __shfl_sync(unsigned, int x, int) { return x; }
inline void __syncwarp() {}
#endif
using std::fmaf;
using std::max;
using std::min;
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned x, unsigned y) { return uint64_t(x) * y >> 32; }
template <class T> T __ldg(const T* at) { return *at; }
template <class T> T __ldcg(const T* at) { return *at; }

// PTX ISA, prmt: each half byte of `which` names a byte; its highest bit would spread a sign.
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t which) {
  const uint64_t bytes = uint64_t(y) << 32 | x;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t own = which >> 4 * i & 15;
    uint32_t byte = uint32_t(bytes >> 8 * (own & 7)) & 255;
    if (own & 8) byte = byte & 128 ? 255 : 0;
    out |= byte << 8 * i;
  }
  return out;
}

using __half = _Float16;
struct __half2 {
  __half x, y;
};
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline __half __float2half_rn(float x) { return __half(x); }
inline float __half2float(__half x) { return float(x); }
inline float2 __half22float2(__half2 x) { return {float(x.x), float(x.y)}; }
inline float __fdividef(float x, float y) { return x / y; }
// Each rounded once: a compiler for this machine contracts nothing that it is not asked to.
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline double __dsqrt_rn(double x) { return std::sqrt(x); }
inline float __double2float_rn(double x) { return float(x); }
inline uint16_t __half_as_ushort(__half x) {
  uint16_t bits;
  std::memcpy(&bits, &x, 2);
  return bits;
}
inline __half __ushort_as_half(uint16_t bits) {
  __half x;
  std::memcpy(&x, &bits, 2);
  return x;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline int __float_as_int(float x) { return int(__float_as_uint(x)); }
inline float __int_as_float(int bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
