// Columns of bytes as Huffman codes: what takes time of coded pages (cpu/coding.cc).
#pragma once

#include <cstring>

#include "cpu/kernels.h"

namespace kvlathe {
namespace {

// 64 bits from bit `position` of a stream on, the first one highest; at least 57 of them are the
// stream's. Past its end there are zeros.
inline uint64_t bits_at(const CodedStream& stream, int64_t position) {
  const int64_t at = position >> 3;
  uint64_t word = 0;
  if (at + 8 <= stream.bytes) {
    std::memcpy(&word, stream.data + at, 8);
  } else if (at < stream.bytes) {
    std::memcpy(&word, stream.data + at, size_t(stream.bytes - at));
  }
  return __builtin_bswap64(word) << (position & 7);
}

// `kTogether` symbols of each of 4 streams: they fit into the bits that one load gives, and the
// streams wait for no result of each other.
template <int kTogether>
inline void decode_four(const CodedStream* streams, int64_t* positions, const uint16_t* entries,
                        uint8_t* out, int64_t apart) {
  uint64_t bits[4];
  uint32_t sums[4] = {};
#pragma GCC unroll 4
  for (int s = 0; s < 4; ++s) bits[s] = bits_at(streams[s], positions[s]);
#pragma GCC unroll 5
  for (int i = 0; i < kTogether; ++i) {
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      const uint32_t entry = entries[bits[s] >> (64 - kCodeBits)];
      bits[s] <<= entry & 63;
      sums[s] += entry;
      out[s * apart + i] = uint8_t(entry >> 8);
    }
  }
#pragma GCC unroll 4
  for (int s = 0; s < 4; ++s) positions[s] += sums[s] & 255;
}

template <int kTogether>
void decode_all(uint8_t* columns, int64_t count, int rows, const uint8_t* classes,
                const uint16_t* entries, const CodedStream* streams, int64_t* positions) {
  const int each = rows / kStreams;
  for (int64_t c = 0; c < count; ++c, columns += rows) {
    const uint16_t* own = entries + (classes ? size_t(classes[c]) << kCodeBits : 0);
    for (int i = 0; i < each; i += kTogether) {
      decode_four<kTogether>(streams, positions, own, columns + i, each);
      decode_four<kTogether>(streams + 4, positions + 4, own, columns + 4 * each + i, each);
    }
  }
}

// Any number of rows.
void decode_slowly(uint8_t* columns, int64_t count, int rows, const uint8_t* classes,
                   const uint16_t* entries, const CodedStream* streams, int64_t* positions) {
  const int each = (rows + kStreams - 1) / kStreams;
  for (int64_t c = 0; c < count; ++c, columns += rows) {
    const uint16_t* own = entries + (classes ? size_t(classes[c]) << kCodeBits : 0);
    for (int r = 0; r < rows; ++r) {
      const int s = r / each;
      const uint16_t entry = own[bits_at(streams[s], positions[s]) >> (64 - kCodeBits)];
      positions[s] += entry & 255;
      columns[r] = uint8_t(entry >> 8);
    }
  }
}

void decode_columns(uint8_t* columns, int64_t count, int rows, const uint8_t* classes,
                    const uint16_t* entries, const CodedStream* streams, int64_t* positions) {
  const int each = rows / kStreams;
  auto* decode = rows % kStreams || each == 0 ? decode_slowly
                 : each % 4 == 0              ? decode_all<4>
                 : each % 3 == 0              ? decode_all<3>
                 : each % 2 == 0              ? decode_all<2>
                                              : decode_all<1>;
  decode(columns, count, rows, classes, entries, streams, positions);
}

// The end of a stream that is written: `count` bits (below 8) wait in the low end of `bits`.
struct Tail {
  uint64_t bits;
  int64_t count;
};

// Whole bytes go out; up to 7 bits stay.
inline uint8_t* flush(uint8_t* out, Tail& tail) {
  const uint64_t word = __builtin_bswap64(tail.bits << ((64 - tail.count) & 63));
  std::memcpy(out, &word, 8);
  out += tail.count >> 3;
  tail.count &= 7;
  return out;
}

// The codes of `n` symbols. Of four that are put together only the last step waits for those before:
// 7 + 4 * kCodeBits bits fit into a word.
inline uint8_t* encode_run(const uint8_t* symbols, int n, const uint32_t* codes, uint8_t* out,
                           Tail& tail) {
  int i = 0;
  for (; i + 4 <= n; i += 4) {
    const uint64_t a = codes[symbols[i]], b = codes[symbols[i + 1]];
    const uint64_t c = codes[symbols[i + 2]], d = codes[symbols[i + 3]];
    const uint64_t first = a >> 8 << (b & 63) | b >> 8, last = c >> 8 << (d & 63) | d >> 8;
    const uint64_t bits_last = (c + d) & 63;
    const uint64_t bits = (a + b + c + d) & 63;
    tail.bits = tail.bits << bits | first << bits_last | last;
    tail.count += int64_t(bits);
    out = flush(out, tail);
  }
  for (; i < n; ++i) {
    const uint64_t code = codes[symbols[i]];
    tail.bits = tail.bits << (code & 63) | code >> 8;
    tail.count += int64_t(code & 63);
  }
  return n % 4 ? flush(out, tail) : out;
}

template <int kEach>
void encode_even(const uint8_t* columns, int64_t count, int rows, const uint8_t* classes,
                 const uint32_t* codes, uint8_t** out, Tail* tails) {
  for (int64_t c = 0; c < count; ++c, columns += rows) {
    const uint32_t* own = codes + (classes ? classes[c] * 256 : 0);
#pragma GCC unroll 8
    for (int s = 0; s < kStreams; ++s)
      out[s] = encode_run(columns + s * kEach, kEach, own, out[s], tails[s]);
  }
}

// Any number of rows.
void encode_slowly(const uint8_t* columns, int64_t count, int rows, const uint8_t* classes,
                   const uint32_t* codes, uint8_t** out, Tail* tails) {
  const int each = (rows + kStreams - 1) / kStreams;
  for (int64_t c = 0; c < count; ++c, columns += rows) {
    const uint32_t* own = codes + (classes ? classes[c] * 256 : 0);
    for (int s = 0; s * each < rows; ++s) {
      const int n = (s + 1) * each <= rows ? each : rows - s * each;
      out[s] = encode_run(columns + s * each, n, own, out[s], tails[s]);
    }
  }
}

void encode_columns(const uint8_t* columns, int64_t count, int rows, const uint8_t* classes,
                    const uint32_t* codes, uint8_t* const* outs, int64_t* sizes) {
  Tail tails[kStreams] = {};
  uint8_t* out[kStreams];
  std::memcpy(out, outs, sizeof out);
  auto* encode = rows == 64   ? encode_even<8>
                 : rows == 32 ? encode_even<4>
                 : rows == 16 ? encode_even<2>
                              : encode_slowly;
  encode(columns, count, rows, classes, codes, out, tails);
  for (int s = 0; s < kStreams; ++s) sizes[s] = out[s] - outs[s] + (tails[s].count > 0);
}

// For every `step`th column the class whose codes are shortest. costs: [256][kMostClasses], where
// classes that there are not cost most.
void classify(const uint8_t* columns, int64_t count, int step, int rows, const uint16_t* costs,
              uint8_t* classes) {
  typedef uint16_t Costs __attribute__((vector_size(2 * kMostClasses)));
  for (int64_t c = 0; c < count; c += step) {
    const uint8_t* column = columns + c * rows;
    Costs even = {}, odd = {};
    const auto add = [&](Costs& sums, uint8_t symbol) {
      Costs cost;
      std::memcpy(&cost, costs + symbol * kMostClasses, sizeof cost);
      sums += cost;
    };
    int r = 0;
    for (; r + 2 <= rows; r += 2) add(even, column[r]), add(odd, column[r + 1]);
    if (r < rows) add(even, column[r]);
    uint16_t sums[kMostClasses];
    even += odd;
    std::memcpy(sums, &even, sizeof sums);
    uint32_t best = ~0u;  // the cost, then the class
    for (uint32_t k = 0; k < kMostClasses; ++k) {
      const uint32_t cost = uint32_t{sums[k]} << 8 | k;
      best = cost < best ? cost : best;
    }
    classes[c] = uint8_t(best);
  }
}

// Adds every `step`th column's bytes to the histogram of its class [kMostClasses][256]. Bytes are
// counted in four places in turn: a count that was just written is not read at once.
void count_columns(const uint8_t* columns, int64_t count, int step, int rows,
                   const uint8_t* classes, uint32_t* histograms) {
  constexpr int kOthers = 3;
  const int many = classes ? kMostClasses * 256 : 256;
  uint32_t others[kOthers][kMostClasses * 256];
  for (auto& other : others) std::memset(other, 0, size_t(many) * sizeof other[0]);
  for (int64_t c = 0; c < count; c += step) {
    const int first = classes ? classes[c] * 256 : 0;
    uint32_t* own = histograms + first;
    uint32_t *a = others[0] + first, *b = others[1] + first, *d = others[2] + first;
    const uint8_t* column = columns + c * rows;
    int r = 0;
    for (; r + 8 <= rows; r += 8) {
      uint64_t x;
      std::memcpy(&x, column + r, 8);
      ++own[x & 255], ++a[x >> 8 & 255], ++b[x >> 16 & 255], ++d[x >> 24 & 255];
      ++own[x >> 32 & 255], ++a[x >> 40 & 255], ++b[x >> 48 & 255], ++d[x >> 56];
    }
    for (; r < rows; ++r) ++own[column[r]];
  }
  for (const auto& other : others)
    for (int i = 0; i < many; ++i) histograms[i] += other[i];
}

// An 8 x 8 block of bytes, its rows as words: the lowest byte is the first.
inline void transpose_eight(uint64_t* x) {
  for (int i = 0; i < 4; ++i) {
    const uint64_t t = (x[i] >> 32 ^ x[i + 4]) & 0xFFFFFFFFull;
    x[i] ^= t << 32;
    x[i + 4] ^= t;
  }
  for (int i = 0; i < 8; i += i % 2 ? 3 : 1) {
    const uint64_t t = (x[i] >> 16 ^ x[i + 2]) & 0x0000FFFF0000FFFFull;
    x[i] ^= t << 16;
    x[i + 2] ^= t;
  }
  for (int i = 0; i < 8; i += 2) {
    const uint64_t t = (x[i] >> 8 ^ x[i + 1]) & 0x00FF00FF00FF00FFull;
    x[i] ^= t << 8;
    x[i + 1] ^= t;
  }
}

// out [columns][rows] = in [rows][columns].
void transpose_bytes(const uint8_t* in, int64_t rows, int64_t columns, uint8_t* out) {
  const int64_t whole_rows = rows & ~int64_t{7}, whole_columns = columns & ~int64_t{7};
  for (int64_t c = 0; c < whole_columns; c += 8) {
    for (int64_t r = 0; r < whole_rows; r += 8) {
      uint64_t x[8];
      for (int i = 0; i < 8; ++i) std::memcpy(x + i, in + (r + i) * columns + c, 8);
      transpose_eight(x);
      for (int i = 0; i < 8; ++i) std::memcpy(out + (c + i) * rows + r, x + i, 8);
    }
  }
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t r = c < whole_columns ? whole_rows : 0; r < rows; ++r)
      out[c * rows + r] = in[r * columns + c];
  }
}

template <class Number>
Number turned(Number x, int turn) {
  const int back = (8 * int(sizeof(Number)) - turn) & (8 * int(sizeof(Number)) - 1);
  return turn ? Number(Number(x << turn) | Number(x >> back)) : x;
}

template <class Number>
void split_run(const uint8_t* __restrict from, int64_t n, int64_t stride, int turn, int i,
               uint8_t* __restrict out) {
  const int shift = 8 * i;
  const auto byte_of = [&](const uint8_t* at) {
    Number x;
    std::memcpy(&x, at, sizeof x);
    return uint8_t(turned(x, turn) >> shift);
  };
  if (stride == sizeof(Number)) {
    for (int64_t k = 0; k < n; ++k) out[k] = byte_of(from + k * int64_t{sizeof(Number)});
  } else {
    for (int64_t k = 0; k < n; ++k) out[k] = byte_of(from + k * stride);
  }
}

template <class Number>
void join_run(const uint8_t* const* planes, int64_t n, int64_t stride, int turn,
              uint8_t* __restrict to) {
  constexpr size_t kWidth = sizeof(Number);
  const int back = (8 * int(kWidth) - turn) & (8 * int(kWidth) - 1);
  const uint8_t* __restrict first = planes[0];
  const uint8_t* __restrict second = planes[kWidth > 1 ? 1 : 0];
  const uint8_t* __restrict third = planes[kWidth > 2 ? 2 : 0];
  const uint8_t* __restrict fourth = planes[kWidth > 2 ? 3 : 0];
  const auto put = [&](int64_t k, uint8_t* at) {
    uint32_t x = first[k];
    if (kWidth > 1) x |= uint32_t{second[k]} << 8;
    if (kWidth > 2) x |= uint32_t{third[k]} << 16 | uint32_t{fourth[k]} << 24;
    const Number number = turned(Number(x), back);
    std::memcpy(at, &number, kWidth);
  };
  if (stride == int64_t(kWidth)) {
    for (int64_t k = 0; k < n; ++k) put(k, to + k * int64_t(kWidth));
  } else {
    for (int64_t k = 0; k < n; ++k) put(k, to + k * stride);
  }
}

// Byte i of n numbers of `width` bytes that lie `stride` bytes apart.
void split_numbers(const uint8_t* from, int64_t n, int64_t stride, int width, int turn, int i,
                   uint8_t* out) {
  if (width == 1) split_run<uint8_t>(from, n, stride, 0, 0, out);
  if (width == 2) split_run<uint16_t>(from, n, stride, turn, i, out);
  if (width == 4) split_run<uint32_t>(from, n, stride, turn, i, out);
}

// The numbers again, of the bytes in `planes`.
void join_numbers(const uint8_t* const* planes, int64_t n, int64_t stride, int width, int turn,
                  uint8_t* to) {
  if (width == 1) join_run<uint8_t>(planes, n, stride, 0, to);
  if (width == 2) join_run<uint16_t>(planes, n, stride, turn, to);
  if (width == 4) join_run<uint32_t>(planes, n, stride, turn, to);
}

}  // namespace
}  // namespace kvlathe
