// SVE vectors for integer products on Arm (products_arm.h), of a length that is
// known here: two or four segments of 128 bits.
#pragma once

#include <arm_sve.h>

#include <cstdint>

#include "cpu/vector.h"

namespace kvlathe {
namespace {

constexpr int kSegments = kLanes / 4;  // of 128 bits

typedef uint8_t Bytes __attribute__((vector_size(4 * kLanes)));
typedef int8_t SignedBytes __attribute__((vector_size(4 * kLanes)));

inline svbool_t every() { return svptrue_b8(); }

// 16 bytes of each of kSegments rows, which begin `stride` bytes from each other.
inline Bytes load_pieces(const uint8_t* at, int64_t stride) {
  svuint8_t x = svld1rq_u8(every(), at);
  for (int i = 1; i < kSegments; ++i)
    x = svsel_u8(svwhilelt_b8(0, 16 * i), x, svld1rq_u8(every(), at + i * stride));
  return x;
}
// 8 bytes of each row, and 8 bytes `apart` from them.
inline Bytes load_halves(const uint8_t* at, int64_t apart, int64_t stride) {
  const svuint64_t place = svindex_u64(0, 1);
  const svuint64_t half = svmul_n_u64_x(every(), svand_n_u64_x(every(), place, 1), uint64_t(apart));
  const svuint64_t from =
      svmla_n_u64_x(every(), half, svlsr_n_u64_x(every(), place, 1), uint64_t(stride));
  return svreinterpret_u8_u64(
      svld1_gather_u64offset_u64(every(), reinterpret_cast<const uint64_t*>(at), from));
}

// 16 bytes, in each segment.
inline Bytes repeated(const uint8_t* bytes) { return svld1rq_u8(every(), bytes); }
inline SignedBytes repeated(const int8_t* bytes) { return svld1rq_s8(every(), bytes); }
// In each segment eight times `first`, eight times `second`.
inline Bytes halves_of(uint8_t first, uint8_t second) {
  constexpr uint64_t ones = 0x0101010101010101u;
  return svreinterpret_u8_u64(svdupq_n_u64(first * ones, second * ones));
}
inline Bytes look_up(Bytes table, Bytes codes) { return svtbl_u8(table, codes); }

// a[0] b[0] a[1] b[1] ...: the first half, and the second.
inline Bytes zip_first(Bytes a, Bytes b) { return svzip1_u8(a, b); }
inline Bytes zip_second(Bytes a, Bytes b) { return svzip2_u8(a, b); }
inline Floats zip_first(Floats a, Floats b) { return svzip1_f32(a, b); }
inline Floats zip_second(Floats a, Floats b) { return svzip2_f32(a, b); }
// Likewise by pairs of bytes.
inline Bytes zip_first_pairs(Bytes a, Bytes b) {
  return svreinterpret_u8_u16(svzip1_u16(svreinterpret_u16_u8(a), svreinterpret_u16_u8(b)));
}
inline Bytes zip_second_pairs(Bytes a, Bytes b) {
  return svreinterpret_u8_u16(svzip2_u16(svreinterpret_u16_u8(a), svreinterpret_u16_u8(b)));
}

// Sums of neighbours in a, then of those in b.
inline Ints add_neighbours(Ints a, Ints b) {
  return svadd_s32_x(every(), svuzp1_s32(a, b), svuzp2_s32(a, b));
}
inline Floats larger_size(Floats most, Floats x) {
  return svmax_f32_x(every(), most, svabs_f32_x(every(), x));
}
inline Ints to_nearest(Floats x) { return svcvt_s32_f32_x(every(), svrintn_f32_x(every(), x)); }

// Bytes from integers, all of a segment's side by side, repeated.
inline SignedBytes repeat_bytes(Ints x) {
  const svuint8_t place = svindex_u8(0, 1);
  const svuint8_t from = svorr_u8_x(every(), svand_n_u8_x(every(), place, 0xf0),
                                    svlsl_n_u8_x(every(), svand_n_u8_x(every(), place, 3), 2));
  return svtbl_s8(svreinterpret_s8_s32(x), from);
}

// True for the first `count`.
inline Ints first_of(int count) { return Ints(svindex_s32(0, 1)) < count; }

// The first `count` floats, zeros past them.
inline Floats load_first(const float* p, int count) {
  return svld1_f32(svwhilelt_b32(0, count), p);
}
inline void store_first(float* p, Floats x, int count) { svst1_f32(svwhilelt_b32(0, count), p, x); }

// Halves in the lower parts of 32 bits.
inline Floats floats_of(svuint32_t halves) {
  return svcvt_f32_f16_x(every(), svreinterpret_f16_u32(halves));
}

// Of kLanes rows, whose metadata lie `apart` halves from each other: a half, and two halves.
inline Floats load_magnitudes(const uint16_t* at, int64_t apart) {
  return floats_of(svld1uh_gather_u32offset_u32(every(), at, svindex_u32(0, 2 * uint32_t(apart))));
}
inline void load_pairs(const uint16_t* at, int64_t apart, Floats& first, Floats& second) {
  const svuint32_t pairs = svld1_gather_u32offset_u32(
      every(), reinterpret_cast<const uint32_t*>(at), svindex_u32(0, 2 * uint32_t(apart)));
  first = floats_of(pairs), second = floats_of(svlsr_n_u32_x(every(), pairs, 16));
}

}  // namespace
}  // namespace kvlathe
