// Vectors of the instruction set that this file is compiled for, over the compiler's vector
// extension. Everything has internal linkage: see kernels.h.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(KVLATHE_NEON)
#include <arm_neon.h>
#if defined(KVLATHE_SVE)
#include <arm_sve.h>
#endif
#else
#include "cpu/numbers.h"
#endif

namespace kvlathe {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kTileRows = 6, kTileVectors = 4, kDotRows = 4;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kTileRows = 4, kTileVectors = 2, kDotRows = 2;
#elif defined(KVLATHE_SVE)
constexpr int kLanes = __ARM_FEATURE_SVE_BITS / 32, kTileRows = 6, kTileVectors = 4, kDotRows = 4;
#elif defined(KVLATHE_NEON)
constexpr int kLanes = 4, kTileRows = 6, kTileVectors = 4, kDotRows = 4;
#else
constexpr int kLanes = 4, kTileRows = 4, kTileVectors = 2, kDotRows = 2;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t UnsignedInts __attribute__((vector_size(4 * kLanes)));
typedef Floats LooseFloats __attribute__((aligned(4), may_alias));
typedef UnsignedInts LooseInts __attribute__((aligned(4), may_alias));

inline Floats load(const float* p) { return *reinterpret_cast<const LooseFloats*>(p); }
inline UnsignedInts load(const uint32_t* p) { return *reinterpret_cast<const LooseInts*>(p); }
inline void store(float* p, Floats x) { *reinterpret_cast<LooseFloats*>(p) = x; }
inline Floats all(float x) { return x - Floats{}; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// Numbers 0 .. 255, cut to integers.
inline void store_bytes(uint8_t* p, Floats x) {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  const Bytes bytes = __builtin_convertvector(__builtin_convertvector(x, Ints), Bytes);
  std::memcpy(p, &bytes, sizeof bytes);
}

// The sums of four vectors.
#if defined(__AVX2__)
#if defined(__AVX512F__)
inline __m256 halved(Floats x) {
  return _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
}
#else
inline __m256 halved(Floats x) { return (__m256)x; }
#endif
inline void sums(Floats a, Floats b, Floats c, Floats d, float* out) {
  const __m256 x =
      _mm256_hadd_ps(_mm256_hadd_ps(halved(a), halved(b)), _mm256_hadd_ps(halved(c), halved(d)));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}
#elif defined(KVLATHE_SVE)
inline void sums(Floats a, Floats b, Floats c, Floats d, float* out) {
  const auto neighbours = [](Floats x, Floats y) -> Floats {
    return svadd_f32_x(svptrue_b32(), svuzp1_f32(x, y), svuzp2_f32(x, y));
  };
  Floats x = neighbours(neighbours(a, b), neighbours(c, d));
  for (int left = kLanes; left > 4; left /= 2) x = neighbours(x, x);
  svst1_f32(svptrue_pat_b32(SV_VL4), out, x);
}
#elif defined(KVLATHE_NEON)
inline void sums(Floats a, Floats b, Floats c, Floats d, float* out) {
  vst1q_f32(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}
#else
inline void sums(Floats a, Floats b, Floats c, Floats d, float* out) {
  out[0] = (a[0] + a[1]) + (a[2] + a[3]), out[1] = (b[0] + b[1]) + (b[2] + b[3]);
  out[2] = (c[0] + c[1]) + (c[2] + c[3]), out[3] = (d[0] + d[1]) + (d[2] + d[3]);
}
#endif

inline float sum(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float out[4];
  sums(x, Floats{}, Floats{}, Floats{}, out);
  return out[0];
#endif
}

inline float largest(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#elif defined(KVLATHE_SVE)
  return svmaxv_f32(svptrue_b32(), x);
#elif defined(KVLATHE_NEON)
  return vmaxvq_f32(x);
#else
  float parts[kLanes];
  store(parts, x);
  for (int half = kLanes / 2; half; half /= 2) {
    for (int i = 0; i < half; ++i)
      parts[i] = parts[i] > parts[i + half] ? parts[i] : parts[i + half];
  }
  return parts[0];
#endif
}

// 2^x for x <= 0; exactly 0 below -126. The polynomial's error is 2e-7 of the value.
inline Floats exp2(Floats x) {
  const Floats shift =
      all(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const Floats clipped = larger(x, all(-126.f));
  const Floats rounded = clipped + shift;
  const Floats f = clipped - (rounded - shift);
  Floats p = all(1.535336188319500e-4f);
  p = p * f + 1.339887440266574e-3f;
  p = p * f + 9.618437357674640e-3f;
  p = p * f + 5.550332471162809e-2f;
  p = p * f + 2.402264791363012e-1f;
  p = p * f + 6.931472028550421e-1f;
  p = p * f + 1.f;
  Ints power, bits;
  std::memcpy(&power, &rounded, sizeof power);
  std::memcpy(&bits, &p, sizeof bits);
  bits += power << 23;  // the constant's own bits are shifted out
  Floats result;
  std::memcpy(&result, &bits, sizeof result);
  return x < all(-126.f) ? Floats{} : result;
}

#if defined(__AVX512F__)
inline Floats load_half(const uint16_t* p) {
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
inline void store_half(uint16_t* p, Floats x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, 0));
}
inline Floats load_bytes(const uint8_t* p) {
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
#elif defined(__AVX2__)
inline Floats load_half(const uint16_t* p) {
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
inline void store_half(uint16_t* p, Floats x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, 0));
}
inline Floats load_bytes(const uint8_t* p) {
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
#elif defined(KVLATHE_SVE)
inline Floats load_half(const uint16_t* p) {
  const svuint32_t halves = svld1uh_u32(svptrue_b32(), p);
  return svcvt_f32_f16_x(svptrue_b32(), svreinterpret_f16_u32(halves));
}
inline void store_half(uint16_t* p, Floats x) {
  const svfloat16_t halves = svcvt_f16_f32_x(svptrue_b32(), x);
  svst1h_u32(svptrue_b32(), p, svreinterpret_u32_f16(halves));
}
inline Floats load_bytes(const uint8_t* p) {
  return svcvt_f32_u32_x(svptrue_b32(), svld1ub_u32(svptrue_b32(), p));
}
#elif defined(KVLATHE_NEON)
inline Floats load_half(const uint16_t* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
inline void store_half(uint16_t* p, Floats x) {
  vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}
inline Floats load_bytes(const uint8_t* p) {
  uint32_t four;
  std::memcpy(&four, p, sizeof four);
  const uint16x8_t wide = vmovl_u8(vcreate_u8(four));
  return vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)));
}
#else
inline Floats load_half(const uint16_t* p) {
  Floats x;
  for (int i = 0; i < kLanes; ++i) x[i] = float_of_half(p[i]);
  return x;
}
inline void store_half(uint16_t* p, Floats x) {
  for (int i = 0; i < kLanes; ++i) p[i] = half_of_float(x[i]);
}
inline Floats load_bytes(const uint8_t* p) {
  Floats x;
  for (int i = 0; i < kLanes; ++i) x[i] = float(p[i]);
  return x;
}
#endif

#if defined(__AVX2__)
inline float from_half(uint16_t x) { return _cvtsh_ss(x); }
inline uint16_t to_half(float x) { return _cvtss_sh(x, 0); }
#elif defined(KVLATHE_NEON)
inline float from_half(uint16_t x) {
  __fp16 half;
  std::memcpy(&half, &x, sizeof half);
  return half;
}
inline uint16_t to_half(float x) {
  const __fp16 half = x;
  uint16_t bits;
  std::memcpy(&bits, &half, sizeof bits);
  return bits;
}
#else
inline float from_half(uint16_t x) { return float_of_half(x); }
inline uint16_t to_half(float x) { return half_of_float(x); }
#endif

}  // namespace
}  // namespace kvlathe
