// Compiled once for each instruction set, with KVLATHE_KERNELS naming the table (kernels.h). No standard containers or
// algorithms here: their inline functions would be shared with code for other processors.
#include "kernels.h"

#include <cstring>

#include "vector.h"

namespace kvlathe {
namespace {

// One past the last chunk of 16 elements in the group of `chunk`.
int group_end(const Rows& rows, int chunk) {
  int end = chunk + 1;
  while (end < rows.inner / 16 && rows.group_of[end] == rows.group_of[chunk]) ++end;
  return end;
}

// Slabs are a few memory pages long, too short for the processor's own prefetching. To the second level of caches: more
// fetches may wait there at once (measured: 1.5 to 2 times the bytes a second).
inline void fetch_ahead(const Rows& rows, int row, int count) {
  const uint8_t *at = rows.ahead + row * rows.ahead_step, *end = at + count * rows.ahead_step;
  for (; at < end; at += 64) __builtin_prefetch(at, 0, 2);
}

}  // namespace
}  // namespace kvlathe

#if defined(__AVX512VNNI__)
#include "integer_mix.h"
#endif

namespace kvlathe {
namespace {

// -- RoPE
// --------------------------------------------------------------------------------------------------------------
void rotate(const float* x, const float* cos, const float* sin, const int32_t* planes, int width, float scale,
            float* out) {
  const int half = width / 2;
  if (!cos) {
    for (int i = 0; i < width; ++i) out[i] = scale * x[i];
    return;
  }
  for (int i = 0; i < half; ++i) {
    const int plane = planes ? planes[i] : i;
    const float c = scale * cos[plane], s = scale * sin[plane], a = x[i], b = x[i + half];
    out[i] = a * c - b * s;
    out[i + half] = b * c + a * s;
  }
}

// -- matrix products
// -----------------------------------------------------------------------------------------------------
struct Product {
  const float *a, *b;
  float* c;
  int64_t lda, ldb, ldc;
  int k;
  bool add;
};

// M rows by V vectors of c, kept in registers.
template <int M, int V>
void tile(const Product& p) {
  Floats c[M][V];
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < V; ++v) c[m][v] = p.add ? load(p.c + m * p.ldc + v * kLanes) : Floats{};
  }
  for (int k = 0; k < p.k; ++k) {
    Floats b[V];
    for (int v = 0; v < V; ++v) b[v] = load(p.b + k * p.ldb + v * kLanes);
    for (int m = 0; m < M; ++m) {
      const Floats a = all(p.a[m * p.lda + k]);
      for (int v = 0; v < V; ++v) c[m][v] += a * b[v];
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < V; ++v) store(p.c + m * p.ldc + v * kLanes, c[m][v]);
  }
}

template <int V, int M>
void tile_of(int rows, const Product& p) {
  if constexpr (M > 1) {
    if (rows < M) return tile_of<V, M - 1>(rows, p);
  }
  tile<M, V>(p);
}

template <int V, int M>
void columns(Product p, int m) {
  for (int row = 0; row < m; row += M) {
    tile_of<V, M>(m - row, p);
    p.a += M * p.lda;
    p.c += M * p.ldc;
  }
}

// At most V vectors at a time, for tiles of M rows.
template <int V, int M>
void split_columns(Product p, int m, int vectors) {
  for (; vectors >= V; vectors -= V, p.b += V * kLanes, p.c += V * kLanes) columns<V, M>(p, m);
  if constexpr (V > 1) {
    if (vectors) split_columns<V - 1, M>(p, m, vectors);
  }
}

void multiply(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int m, int n, int k,
              bool add) {
  const Product p{a, b, c, lda, ldb, ldc, k, add};
  // Few rows: wider tiles, so that b is read in one pass.
  if (m <= 2) return split_columns<2 * kTileVectors, 2>(p, m, n / kLanes);
  split_columns<kTileVectors, kTileRows>(p, m, n / kLanes);
}

void transpose(const float* x, int64_t ldx, float* out, int64_t ldo, int rows, int columns) {
  typedef float Four __attribute__((vector_size(16)));
  typedef Four LooseFour __attribute__((aligned(4), may_alias));
  typedef int32_t Pick __attribute__((vector_size(16)));
  int r = 0;
  for (; r + 4 <= rows; r += 4) {
    for (int c = 0; c < columns; c += 4) {
      Four x0, x1, x2, x3;
      const float* from = x + r * ldx + c;
      x0 = *(const LooseFour*)from, x1 = *(const LooseFour*)(from + ldx);
      x2 = *(const LooseFour*)(from + 2 * ldx), x3 = *(const LooseFour*)(from + 3 * ldx);
#if defined(__clang__)
      const Four a = __builtin_shufflevector(x0, x1, 0, 4, 1, 5), b = __builtin_shufflevector(x2, x3, 0, 4, 1, 5);
      const Four d = __builtin_shufflevector(x0, x1, 2, 6, 3, 7), e = __builtin_shufflevector(x2, x3, 2, 6, 3, 7);
      const Four y0 = __builtin_shufflevector(a, b, 0, 1, 4, 5), y1 = __builtin_shufflevector(a, b, 2, 3, 6, 7);
      const Four y2 = __builtin_shufflevector(d, e, 0, 1, 4, 5), y3 = __builtin_shufflevector(d, e, 2, 3, 6, 7);
#else
      const Pick low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, first = {0, 1, 4, 5}, second = {2, 3, 6, 7};
      const Four a = __builtin_shuffle(x0, x1, low), b = __builtin_shuffle(x2, x3, low);
      const Four d = __builtin_shuffle(x0, x1, high), e = __builtin_shuffle(x2, x3, high);
      const Four y0 = __builtin_shuffle(a, b, first), y1 = __builtin_shuffle(a, b, second);
      const Four y2 = __builtin_shuffle(d, e, first), y3 = __builtin_shuffle(d, e, second);
#endif
      float* to = out + c * ldo + r;
      *(LooseFour*)to = y0, *(LooseFour*)(to + ldo) = y1, *(LooseFour*)(to + 2 * ldo) = y2,
      *(LooseFour*)(to + 3 * ldo) = y3;
    }
  }
  for (; r < rows; ++r) {
    for (int c = 0; c < columns; ++c) out[c * ldo + r] = x[r * ldx + c];
  }
}

// -- number formats
// ------------------------------------------------------------------------------------------------------
struct Singles {
  static constexpr bool quantized = false;
  static Floats get(const uint8_t* row, int i) { return load(reinterpret_cast<const float*>(row) + i); }
};
struct Halves {
  static constexpr bool quantized = false;
  static Floats get(const uint8_t* row, int i) { return load_half(reinterpret_cast<const uint16_t*>(row) + i); }
};
struct Codes {
  static constexpr bool quantized = true;
  static Floats get(const uint8_t* row, int i) { return load_bytes(row + i); }
};

// Codes of 4 or 2 bits as bytes: each byte goes to a wider place, and its codes come apart by halves. `count`: of 16.
void spread(const uint8_t* packed, int bits, int count, uint8_t* out) {
#if defined(__AVX2__)
  for (int i = 0; i < count; i += 16, packed += 2 * bits) {
    __m128i x;
    if (bits == 4) {
      const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)packed));
      x = _mm_and_si128(_mm_or_si128(wide, _mm_slli_epi16(wide, 4)), _mm_set1_epi8(15));
    } else {
      const __m128i wide = _mm_cvtepu8_epi32(_mm_loadu_si32(packed)),
                    pairs = _mm_or_si128(wide, _mm_slli_epi32(wide, 6));
      x = _mm_and_si128(_mm_or_si128(pairs, _mm_slli_epi32(pairs, 12)), _mm_set1_epi8(3));
    }
    _mm_storeu_si128((__m128i*)(out + i), x);
  }
#else
  for (int i = 0; i < count; i += 8, packed += bits) {
    uint64_t x = 0;
    std::memcpy(&x, packed, size_t(bits));
    if (bits == 4) {
      x = (x | x << 16) & 0x0000ffff0000ffffu;
      x = (x | x << 8) & 0x00ff00ff00ff00ffu;
      x = (x | x << 4) & 0x0f0f0f0f0f0f0f0fu;
    } else {
      x = (x | x << 24) & 0x000000ff000000ffu;
      x = (x | x << 12) & 0x000f000f000f000fu;
      x = (x | x << 6) & 0x0303030303030303u;
    }
    std::memcpy(out + i, &x, 8);
  }
#endif
}

// Four rows (those past the last repeat it) times M rows of x.
template <class Format, int M>
void dot4(const Rows& rows, const uint8_t* const* at, const uint16_t* const* meta, const float* x, int64_t ldx,
          const float* sums_of_x, float (*out)[4]) {
  Floats total[M][4] = {};
  float constant[M][4] = {};
  for (int chunk = 0, end; chunk < rows.inner / 16; chunk = end) {
    end = Format::quantized ? group_end(rows, chunk) : rows.inner / 16;
    Floats part[M][4] = {};
    for (int i = 16 * chunk; i < 16 * end; i += kLanes) {
      const Floats row[4] = {Format::get(at[0], i), Format::get(at[1], i), Format::get(at[2], i),
                             Format::get(at[3], i)};
      for (int m = 0; m < M; ++m) {
        const Floats factor = load(x + m * ldx + i);
        for (int j = 0; j < 4; ++j) part[m][j] += factor * row[j];
      }
    }
    for (int j = 0; j < 4; ++j) {
      const int group = rows.group_of[chunk];
      const float scale = Format::quantized ? from_half(meta[j][2 * group]) : 1.f;
      const float minimum = Format::quantized ? from_half(meta[j][2 * group + 1]) : 0.f;
      for (int m = 0; m < M; ++m) {
        total[m][j] += Format::quantized ? part[m][j] * scale : part[m][j];
        if (Format::quantized) constant[m][j] += minimum * sums_of_x[m * 64 + group];
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    sums(total[m][0], total[m][1], total[m][2], total[m][3], out[m]);
    for (int j = 0; j < 4; ++j) out[m][j] += constant[m][j];
  }
}

template <class Format>
void dots_as(const Rows& rows, const float* x, int64_t ldx, float* out, int64_t ldo, int m, bool add,
             const float* sums_of_x) {
  for (int r = 0; r < rows.rows; r += 4) {
    const int count = rows.rows - r < 4 ? rows.rows - r : 4;
    fetch_ahead(rows, r, 4);
    const uint8_t* at[4];
    const uint16_t* meta[4];
    uint8_t bytes[4][1024];
    for (int j = 0; j < 4; ++j) {
      const int row = r + (j < count ? j : count - 1);
      at[j] = rows.data + row * rows.stride;
      meta[j] = rows.meta + row * rows.meta_stride;
      if (rows.bits < 8) spread(at[j], rows.bits, rows.inner, bytes[j]), at[j] = bytes[j];
    }
    for (int i = 0; i < m; i += 2) {
      float result[2][4];
      const float *from = x + i * ldx, *known = sums_of_x + i * 64;
      if (i + 1 < m) {
        dot4<Format, 2>(rows, at, meta, from, ldx, known, result);
      } else {
        dot4<Format, 1>(rows, at, meta, from, ldx, known, result);
      }
      for (int k = i; k < m && k < i + 2; ++k) {
        float* to = out + k * ldo + r;
        for (int j = 0; j < count; ++j) to[j] = add ? to[j] + result[k - i][j] : result[k - i][j];
      }
    }
  }
}

void dots(const float* x, int64_t ldx, const Rows& rows, float* out, int64_t ldo, int m, bool add, bool again,
          float* scratch) {
  if (rows.bits == 32) return dots_as<Singles>(rows, x, ldx, out, ldo, m, add, scratch);
  if (rows.bits == 16) return dots_as<Halves>(rows, x, ldx, out, ldo, m, add, scratch);
#if defined(__AVX512VNNI__)
  integer_dots(x, ldx, rows, out, ldo, m, add, again, scratch);
#else
  for (int i = 0; i < m && !again; ++i) {
    for (int chunk = 0, end; chunk < rows.inner / 16; chunk = end) {
      end = group_end(rows, chunk);
      Floats total{};
      for (int j = 16 * chunk; j < 16 * end; j += kLanes) total += load(x + i * ldx + j);
      scratch[i * 64 + rows.group_of[chunk]] = sum(total);
    }
  }
  dots_as<Codes>(rows, x, ldx, out, ldo, m, add, scratch);
#endif
}

const float* unpack(const Rows& rows, float* out, int64_t* ld) {
  if (rows.bits == 32) {
    *ld = rows.stride / 4;
    return reinterpret_cast<const float*>(rows.data);
  }
  *ld = rows.inner;
  uint8_t bytes[1024];
  for (int r = 0; r < rows.rows; ++r) {
    const uint8_t* row = rows.data + r * rows.stride;
    float* to = out + int64_t{r} * rows.inner;
    if (rows.bits == 16) {
      for (int i = 0; i < rows.inner; i += kLanes) store(to + i, Halves::get(row, i));
      continue;
    }
    if (rows.bits < 8) spread(row, rows.bits, rows.inner, bytes), row = bytes;
    const uint16_t* meta = rows.meta + r * rows.meta_stride;
    for (int chunk = 0; chunk < rows.inner / 16; ++chunk) {
      const Floats scale = all(from_half(meta[2 * rows.group_of[chunk]])),
                   minimum = all(from_half(meta[2 * rows.group_of[chunk] + 1]));
      for (int i = 16 * chunk; i < 16 * (chunk + 1); i += kLanes) store(to + i, Codes::get(row, i) * scale + minimum);
    }
  }
  return out;
}

void mix(const float* x, int64_t ldx, const Rows& rows, float* out, int64_t ldo, int m, bool add, float* scratch) {
#if defined(__AVX512VNNI__)
  if (rows.bits < 16) return integer_mix(x, ldx, rows, out, ldo, m, add, scratch);
#endif
  int64_t ld;
  const float* unpacked = unpack(rows, scratch, &ld);
  multiply(x, ldx, unpacked, ld, out, ldo, m, rows.inner, rows.rows, add);
}

// -- softmax
// -------------------------------------------------------------------------------------------------------------
void soften(float* scores, int64_t ld, int m, int n, const int32_t* seen, float* top, float* sum_of, float* o,
            int width) {
  const int end = (n + 15) / 16 * 16;
  for (int r = 0; r < m; ++r) {
    float* s = scores + r * ld;
    const int count = seen && seen[r] < n ? seen[r] : n;
    for (int i = count > 0 ? count : 0; i < end; ++i) s[i] = -__builtin_inff();
    Floats most = load(s);
    for (int i = kLanes; i < end; i += kLanes) most = larger(most, load(s + i));
    const float before = top[r], found = largest(most), now = found > before ? found : before;
    if (count <= 0) {
      for (int i = 0; i < end; i += kLanes) store(s + i, Floats{});
      continue;
    }
    Floats total{};
    for (int i = 0; i < end; i += kLanes) {
      const Floats weight = exp2(load(s + i) - now);
      store(s + i, weight);
      total += weight;
    }
    if (now == before) {
      sum_of[r] += sum(total);
      continue;
    }
    const float shrink = exp2(all(before - now))[0];
    top[r] = now;
    sum_of[r] = sum_of[r] * shrink + sum(total);
    float* row = o + int64_t{r} * width;
    for (int i = 0; i < width; i += kLanes) store(row + i, load(row + i) * shrink);
  }
}

// -- writing
// -------------------------------------------------------------------------------------------------------------
void store_row(const float* src, const float* centre, int n, int bits, void* dst) {
  for (int i = 0; i < n; i += kLanes) {
    const Floats x = centre ? load(src + i) - load(centre + i) : load(src + i);
    if (bits == 32) {
      store(static_cast<float*>(dst) + i, x);
    } else {
      store_half(static_cast<uint16_t*>(dst) + i, x);
    }
  }
}

void pack(const uint8_t* codes, int bits, int count, uint8_t* out) {
  const int each = 8 / bits;
  for (int i = 0; i < count / each; ++i) {
    int byte = 0;
    for (int j = 0; j < each; ++j) byte |= codes[each * i + j] << (bits * j);
    out[i] = uint8_t(byte);
  }
}

// MurmurHash3's finalizer (mixed of runtime/codec.py).
inline UnsignedInts mixed(UnsignedInts x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

// Noise in [0, 1) of kLanes elements from the hashes of their tokens and their channels.
inline Floats noise_of(UnsignedInts token, UnsignedInts channel) {
  const Ints bits = (Ints)(mixed((token ^ channel) + 0x9E3779B9u) >> 8);
  return __builtin_convertvector(bits, Floats) * 5.9604644775390625e-8f;
}

// floor(x + noise), exactly: the part behind the point and 1 - noise have no rounding error.
inline Floats drawn(Floats x, Floats noise) {
  const Floats whole = __builtin_convertvector(__builtin_convertvector(x, Ints), Floats);
  return x - whole >= 1.f - noise ? whole + 1.f : whole;
}

// (scale, minimum) of elements begin .. end - 1 as halves, without contraction: they are runtime/codec.py's to the bit.
void choose_pair(const float* x, int begin, int end, float levels, const Coding& coding, uint16_t* pair) {
  Floats low = load(x + begin), high = low;
  for (int i = begin; i < end; i += kLanes) low = -larger(-low, -load(x + i)), high = larger(high, load(x + i));
  const float least = -largest(-low), width = largest(high) - least;
  volatile float below = width * coding.edge;
  pair[0] = to_half(width * coding.span / levels);
  pair[1] = to_half(least + below);
}

// The codes are chosen for the scale and minimum as halves, as runtime/codec.py does.
void quantize(const float* x, int64_t ldx, const Rows& rows, const Coding& coding) {
  const float levels = float((1 << rows.bits) - 1), round = 12582912.f;
  UnsignedInts count_up;
  for (int i = 0; i < kLanes; ++i) count_up[i] = uint32_t(i);
  uint8_t* next_sum = coding.sums;
  uint8_t codes[1024];
  for (int r = 0; r < rows.rows; ++r, x += ldx) {
    auto* meta = const_cast<uint16_t*>(rows.meta + r * rows.meta_stride);
    for (int chunk = 0, end; chunk < rows.inner / 16; chunk = end) {
      end = group_end(rows, chunk);
      uint16_t* pair = meta + 2 * rows.group_of[chunk];
      choose_pair(x, 16 * chunk, 16 * end, levels, coding, pair);
      const float scale = from_half(pair[0]), minimum = from_half(pair[1]);
      for (int i = 16 * chunk; i < 16 * end; i += kLanes) {
        Floats code{};
        if (scale > 0) code = (load(x + i) - minimum) / scale;
        code = -larger(-larger(code, Floats{}), all(-levels));
        if (!coding.noise) {
          code = code + round - round;
        } else if (rows.by_channel) {
          code = drawn(code, noise_of(load(coding.noise + i), UnsignedInts{} + uint32_t(r)));
        } else {
          code = drawn(code, noise_of(UnsignedInts{} + coding.noise[r], count_up + uint32_t(i)));
        }
        store_bytes(codes + i, code);
      }
      if (!coding.sums) continue;
      uint32_t sum = 0;
      for (int i = 16 * chunk; i < 16 * end; ++i) sum += codes[i];
      for (int byte = 0; byte < coding.sum_bytes; ++byte) *next_sum++ = uint8_t(sum >> (8 * byte));
    }
    pack(codes, rows.bits, rows.inner, const_cast<uint8_t*>(rows.data) + r * rows.stride);
  }
}

}  // namespace

const Kernels KVLATHE_KERNELS = {
    KVLATHE_KERNELS_NAME, rotate, multiply, dots, mix, unpack, transpose, soften, store_row, quantize};

}  // namespace kvlathe
