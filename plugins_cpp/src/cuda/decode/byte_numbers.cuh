// Codes of 8 bits as halves in registers, two at a time, and what a token's metadata make of them
// (attend_bytes.cuh):
//
//   affine   1024 + c; of V products take 1152 off again, and count c - 128     x = scale c + minimum
//   float8   the float itself            x = scale e4m3(c)
//
// Codes of K are the bytes of a word, four channels of a token. A word of V is of two tokens, and has
// two channels of the first and two of the second.
#pragma once

#include "common/float8.h"
#include "cuda/device.cuh"

namespace kvlathe::cuda {

// The element whose products take halves: E, if it is one.
template <class E>
struct HalfOf {
  using type = E;
  static constexpr bool kSame = true;
};
template <>
struct HalfOf<Bfloat> {
  using type = Half;
  static constexpr bool kSame = false;
};

// Of positive normal numbers: the power of two below x; 1 / x of a power of two.
__device__ inline float power_below(float x) {
  return __uint_as_float(__float_as_uint(x) & 0x7f800000);
}
__device__ inline float power_inverse(float x) {
  return __uint_as_float(0x7f000000 - __float_as_uint(x));
}

// Codes of a token in two channels, as halves 1024 + c: of two tokens that lie side by side.
__device__ inline uint32_t token_of_pair(uint32_t x, int token) {
  return picked_bytes(x, 0x64646464, token ? 0x4341 : 0x4240);
}

struct ByteGrid {
  float scale, minimum;
};

template <Coding kCoding>
struct ByteNumbers;

template <>
struct ByteNumbers<Coding::kAffine> {
  static constexpr float kUnit = 1.f, kOfKeys = 1024.f, kOfValues = 128.f;
  static constexpr uint32_t kLessOfValues = 0xe480e480;  // -1152, twice
  static constexpr int kMetaBytes = 2 * metadata_halves(Coding::kAffine);
  // Codes 2 pair and 2 pair + 1.
  __device__ static uint32_t key(uint32_t x, int pair) {
    return picked_bytes(x, 0x64646464, pair ? 0x4342 : 0x4140);
  }
  // Channel `channel` of both tokens.
  __device__ static uint32_t value(uint32_t x, int channel) {
    return picked_bytes(x, 0x64646464, channel ? 0x4341 : 0x4240);
  }
  __device__ static ByteGrid grid(uint32_t meta, int row) {
    const uint32_t pair = load_word(meta + row * kMetaBytes);
    return {Half::widen(uint16_t(pair)), Half::widen(uint16_t(pair >> 16))};
  }
};

template <>
struct ByteNumbers<Coding::kFloat8> {
  static constexpr int kMetaBytes = 2 * metadata_halves(Coding::kFloat8);
  static constexpr float kOfKeys = 0.f, kOfValues = 0.f;
  static constexpr uint32_t kLessOfValues = 0;
#if __CUDA_ARCH__ >= 890
  static constexpr float kUnit = 1.f;
  __device__ static uint32_t widened(uint32_t x, int pair) {
    uint32_t y;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(uint16_t(x >> 16 * pair)));
    return y;
  }
  __device__ static uint32_t key(uint32_t x, int pair) { return widened(x, pair); }
  __device__ static uint32_t value(uint32_t x, int channel) {
    return widened(picked_bytes(x, 0, 0x3120), channel);
  }
#else  // halves that are 2^8 times smaller (small_half_of)
  static constexpr float kUnit = kFloat8Unit;
  __device__ static uint32_t small(uint32_t above) {
    return (above & 0x80008000) | (above >> 1 & 0x3f803f80);
  }
  __device__ static uint32_t key(uint32_t x, int pair) {
    return small(picked_bytes(x, 0, pair ? 0x3424 : 0x1404));
  }
  __device__ static uint32_t value(uint32_t x, int channel) {
    return small(picked_bytes(x, 0, channel ? 0x3414 : 0x2404));
  }
#endif
  __device__ static ByteGrid grid(uint32_t meta, int row) {
    return {Half::widen(load_half(meta + row * kMetaBytes)) * kUnit, 0.f};
  }
};

}  // namespace kvlathe::cuda
