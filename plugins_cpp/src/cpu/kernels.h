// The arithmetic of the CPU kernels: one source (kernels.cc), compiled once for each instruction
// set, chosen at run time.
//
// This header is read by code for different instruction sets: it holds plain data only, so that no
// inline function compiled for one processor can be linked into the path of another.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/formats.h"

namespace kvlathe {

// Tokens that are attended together, at most; 16 or more, dividing the page.
constexpr int kBlock = 64;
// Elements of a row, at most: it is unpacked on the stack. A row is a rank, or a page's tokens.
constexpr int kMostRow = 1024;

// Part of a lane's K or V as it lies in a page: `rows` rows of `inner` elements. A row is a token,
// or, where groups run along the tokens, a channel. Every row starts `stride` bytes after the last
// one. Of 3-bit codes they begin at code `first` of `whole` that a row in memory has. Rows of codes have metadata for each group (affine_of
// of rows_ahead.h); elements 16 j .. 16 j + 15 are in group_of[j].
struct Rows {
  const uint8_t* data;
  const uint16_t* meta;
  int64_t stride, meta_stride;  // bytes; halves
  int32_t rows, inner;
  int16_t bits, first, whole;
  bool by_channel;
  Coding coding;  // of codes
  uint8_t group_of[kMostRow / 16];
  const uint8_t* ahead;  // while reading row r, fetch ahead_step bytes at ahead + r * ahead_step:
                         // what is read next
  int64_t ahead_step;
};
static_assert(sizeof(Rows) <= 128, "clearing more takes a tenth of a step's attention");

// How numbers become codes of even levels.
struct QuantizeOptions {
  float span, edge;  // the middle part of a group's range that codes cover, and the part below it:
                     // (1 - span) / 2
  const uint32_t* noise;  // of each token, before its channels are hashed in; null: to the nearest
  uint8_t* sums;          // of each group's codes, in the order of the metadata; null: not stored
  int sum_bytes;
};

// Coded columns (cpu/coding.cc): bits of the longest code, streams that a plane's codes are in, and
// classes of columns, at most.
constexpr int kCodeBits = 11, kStreams = 8, kMostClasses = 16;

// Codes, the first in the highest bits of the first byte.
struct CodedStream {
  const uint8_t* data;
  int64_t bytes;
};

struct Kernels {
  const char* name;

  // out[i] = scale * x turned by RoPE: pairs i, i + width / 2 by plane planes[i] (null: i). cos
  // null: no turn.
  void (*rotate)(const float* x, const float* cos, const float* sin, const int32_t* planes,
                 int width, float scale, float* out);

  // c [m, n] = a [m, k] b [k, n], or += with `add`. n is a multiple of 16.
  void (*multiply)(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                   int m, int n, int k, bool add);

  // out [m, rows] = x [m, inner] times the rows, or += with `add`. `scratch`: kDotScratch * m
  // floats, 64-byte aligned; with `again` it still holds what the last call made of this x for rows
  // of the same form.
  void (*dots)(const float* x, int64_t ldx, const Rows& rows, float* out, int64_t ldo, int m,
               bool add, bool again, float* scratch);

  // out [m, inner] = x [m, rows] times the rows, or += with `add`. `scratch`: kDotScratch * m
  // floats and the rows as floats, 64-byte aligned.
  void (*mix)(const float* x, int64_t ldx, const Rows& rows, float* out, int64_t ldo, int m,
              bool add, float* scratch);

  // The rows as float [rows, inner]. Where they are that already, returns their place and writes
  // nothing.
  const float* (*unpack)(const Rows& rows, float* out, int64_t* ld);

  // out [columns, rows] = x [rows, columns]; both multiples of 4 are fast.
  void (*transpose)(const float* x, int64_t ldx, float* out, int64_t ldo, int rows, int columns);

  // scores [rows, n] become bound * tanh(score / bound). n is rounded up to 16.
  void (*bound)(float* scores, int64_t ld, int rows, int n, float bound);

  // One block of the online softmax over scores [rows, n] in base 2: row r sees its first `seen[r]`
  // scores (null: all n). Turns scores into weights (0 up to n rounded up to 16, where unseen),
  // updates m [rows] and l [rows], rescales o [rows, width].
  void (*soften)(float* scores, int64_t ld, int rows, int n, const int32_t* seen, float* m,
                 float* l, float* o, int width);

  // dst[i] = float or half (bits) of src[i] - centre[i] (null: 0).
  void (*store)(const float* src, const float* centre, int n, int bits, void* dst);

  // Codes and (scale, minimum) of x [rows, inner] into the memory that `rows` describes.
  void (*quantize)(const float* x, int64_t ldx, const Rows& rows, const QuantizeOptions& options);

  // `count` columns of `rows` bytes: stream s has an equal part of each column's rows. Entry (class,
  // next kCodeBits bits) is symbol << 8 | bits of its code. `positions` [kStreams], in bits, go on.
  // classes null: all are of class 0.
  void (*decode_columns)(uint8_t* columns, int64_t count, int rows, const uint8_t* classes,
                         const uint16_t* entries, const CodedStream* streams, int64_t* positions);

  // The other way: code (class, symbol) is code << 8 | its bits. Each of `outs` has room for 8 bytes
  // more than its codes take, which `sizes` says.
  void (*encode_columns)(const uint8_t* columns, int64_t count, int rows, const uint8_t* classes,
                         const uint32_t* codes, uint8_t* const* outs, int64_t* sizes);

  // For every `step`th column the class of least cost; costs are [256][kMostClasses].
  void (*classify)(const uint8_t* columns, int64_t count, int step, int rows, const uint16_t* costs,
                   uint8_t* classes);

  // Adds every `step`th column's bytes to its class's histogram; they are [kMostClasses][256].
  void (*count_columns)(const uint8_t* columns, int64_t count, int step, int rows,
                        const uint8_t* classes, uint32_t* histograms);

  // out [columns][rows] = in [rows][columns].
  void (*transpose_bytes)(const uint8_t* in, int64_t rows, int64_t columns, uint8_t* out);

  // Byte i of n numbers of `width` bytes, `stride` bytes apart, turned left by `turn` bits.
  void (*split_numbers)(const uint8_t* from, int64_t n, int64_t stride, int width, int turn, int i,
                        uint8_t* out);

  // The numbers again, of their `width` planes.
  void (*join_numbers)(const uint8_t* const* planes, int64_t n, int64_t stride, int width, int turn,
                       uint8_t* to);
};

constexpr int kDotScratch = 2160;  // floats for each row of x: room for its integer form

extern const Kernels kPortable;
#if defined(KVLATHE_X86)
extern const Kernels kAvx2, kAvxVnni, kAvx512, kAvx512Vnni;
#elif defined(KVLATHE_AARCH64)
extern const Kernels kNeon, kNeonDot;
#if defined(KVLATHE_SVE_KERNELS)
extern const Kernels kSve256, kSve512;  // by the bits of a vector
#endif
#endif

}  // namespace kvlathe
