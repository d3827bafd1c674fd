// Vectors of 128 bits for integer products on Arm (products_arm.h): NEON.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "cpu/vector.h"

namespace kvlathe {
namespace {

constexpr int kSegments = 1;  // of 128 bits

typedef uint8x16_t Bytes;
typedef int8x16_t SignedBytes;

// 16 bytes of each of kSegments rows; here of one.
inline Bytes load_pieces(const uint8_t* at, int64_t) { return vld1q_u8(at); }
// 8 bytes of each row, and 8 bytes `apart` from them.
inline Bytes load_halves(const uint8_t* at, int64_t apart, int64_t) {
  return vcombine_u8(vld1_u8(at), vld1_u8(at + apart));
}

// 16 bytes, in each segment.
inline Bytes repeated(const uint8_t* bytes) { return vld1q_u8(bytes); }
inline SignedBytes repeated(const int8_t* bytes) { return vld1q_s8(bytes); }
// In each segment eight times `first`, eight times `second`.
inline Bytes halves_of(uint8_t first, uint8_t second) {
  return vcombine_u8(vdup_n_u8(first), vdup_n_u8(second));
}
inline Bytes look_up(Bytes table, Bytes codes) { return vqtbl1q_u8(table, codes); }

// a[0] b[0] a[1] b[1] ...: the first half, and the second.
inline Bytes zip_first(Bytes a, Bytes b) { return vzip1q_u8(a, b); }
inline Bytes zip_second(Bytes a, Bytes b) { return vzip2q_u8(a, b); }
inline Floats zip_first(Floats a, Floats b) { return vzip1q_f32(a, b); }
inline Floats zip_second(Floats a, Floats b) { return vzip2q_f32(a, b); }
// Likewise by pairs of bytes.
inline Bytes zip_first_pairs(Bytes a, Bytes b) {
  return vreinterpretq_u8_u16(vzip1q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
}
inline Bytes zip_second_pairs(Bytes a, Bytes b) {
  return vreinterpretq_u8_u16(vzip2q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
}

// Sums of neighbours in a, then of those in b.
inline Ints add_neighbours(Ints a, Ints b) { return vpaddq_s32(a, b); }
inline Floats larger_size(Floats most, Floats x) { return vmaxq_f32(most, vabsq_f32(x)); }
inline Ints to_nearest(Floats x) { return vcvtnq_s32_f32(x); }

// Bytes from integers, all of a segment's side by side, repeated.
inline SignedBytes repeat_bytes(Ints x) {
  const int16x4_t four = vmovn_s32(x);
  const int8x8_t bytes = vmovn_s16(vcombine_s16(four, four));
  return vcombine_s8(bytes, bytes);
}

// True for the first `count`.
inline Ints first_of(int count) {
  const Ints count_up = {0, 1, 2, 3};
  return count_up < count;
}

// The first `count` floats, zeros past them.
inline Floats load_first(const float* p, int count) {
  if (count >= kLanes) return load(p);
  Floats x{};
  for (int i = 0; i < count; ++i) x[i] = p[i];
  return x;
}
inline void store_first(float* p, Floats x, int count) {
  if (count >= kLanes) return store(p, x);
  for (int i = 0; i < count; ++i) p[i] = x[i];
}

inline Floats floats_of(uint16x4_t halves) { return vcvt_f32_f16(vreinterpret_f16_u16(halves)); }

// Of kLanes rows, whose metadata lie `apart` halves from each other: a half, and two halves.
inline Floats load_magnitudes(const uint16_t* at, int64_t apart) {
  uint16x4_t halves{};
  for (int i = 0; i < 4; ++i) halves[i] = at[i * apart];
  return floats_of(halves);
}
inline void load_pairs(const uint16_t* at, int64_t apart, Floats& first, Floats& second) {
  uint32x4_t pairs{};
  for (int i = 0; i < 4; ++i) {
    uint32_t pair;
    std::memcpy(&pair, at + i * apart, sizeof pair);
    pairs[i] = pair;
  }
  first = floats_of(vmovn_u32(pairs)), second = floats_of(vshrn_n_u32(pairs, 16));
}

}  // namespace
}  // namespace kvlathe
