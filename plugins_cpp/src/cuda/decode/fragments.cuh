// K and V of 16 tokens as fragments of the products of tile16.cuh, straight from a page of codes.
// Each lane turns the codes of its own elements into 16-bit numbers, in registers.
//
// A lane's four elements in a row of a fragment are columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, where
// t = lane % 4. Codes are read four at a time instead, from 4 t on. So the columns have another
// order: of the channels in QK^T, which the queries take too (Lane16::set), and of the tokens in PV,
// which the rows of QK^T take (token_of_row). Rows of a page that run the other way than a fragment's
// are transposed eight by eight.
#pragma once

#include "cuda/decode/tile16.cuh"
#include "cuda/forms.cuh"

namespace kvlathe::cuda {

// Which of 16 tokens is row g of the scores, g = lane / 4. Row g + 8 is kLaterRow tokens later.
__device__ inline int token_of_row(int g) { return 4 * (g / 2) + g % 2; }
constexpr int kLaterRow = 2;

// The bytes of four codes below 8 bits, from the low bits of x.
template <int kBits>
__device__ __forceinline__ uint32_t spread_codes(uint32_t x) {
  if constexpr (kBits == 4) {
    x = (x | x << 8) & 0x00ff00ff;
    return (x | x << 4) & 0x0f0f0f0f;
  } else {
    x = (x | x << 12) & 0x000f000f;
    return (x | x << 6) & 0x03030303;
  }
}

// Codes code .. code + 3 of a row of `count`, a byte each. code: a multiple of four.
template <int kBits>
__device__ __forceinline__ uint32_t four_codes(uint32_t row, int code, int count) {
  if constexpr (kBits == 8) return load_word(row + code);
  if constexpr (kBits == 4) return spread_codes<4>(load_half(row + code / 2));
  if constexpr (kBits == 2) return spread_codes<2>(shared_at<const uint8_t>(row + code / 4));
  uint32_t eight[2];
  load_row_codes<3>(eight, row, code & ~7, count);
  return code & 4 ? eight[1] : eight[0];
}

// Codes code, code + 1, code + 8 and code + 9, a byte each. code: even, of the first of two eights.
template <int kBits>
__device__ __forceinline__ uint32_t two_pairs(uint32_t row, int code, int count) {
  if constexpr (kBits == 8) return load_half(row + code) | load_half(row + code + 8) << 16;
  const auto byte_at = [row](int i) { return uint32_t(shared_at<const uint8_t>(row + i)); };
  if constexpr (kBits == 4) return spread_codes<4>(byte_at(code / 2) | byte_at(code / 2 + 4) << 8);
  if constexpr (kBits == 2) {
    const int shift = code % 4 * 2;
    return spread_codes<2>((byte_at(code / 4) >> shift & 15) | (byte_at(code / 4 + 2) >> shift & 15)
                                                                   << 4);
  }
  uint32_t first[2], second[2];
  load_row_codes<3>(first, row, code & ~7, count);
  load_row_codes<3>(second, row, (code & ~7) + 8, count);
  const int shift = code % 4 * 8;
  return ((code & 4 ? first[1] : first[0]) >> shift & 0xffff) |
         (code & 4 ? second[1] : second[0]) >> shift << 16;
}

// What the codes of one group are worth.
template <class E, int kBits, bool kLevels>
struct Worth {
  Dequantizer<E> even{0};
  float top = 0.f;  // kLevels: of the largest level

  // there: or else what the metadata's place holds may be anything.
  __device__ void load(uint32_t meta, bool there) {
    if constexpr (kLevels)
      top = there ? Half::widen(load_half(meta)) : 0.f;
    else
      even = Dequantizer<E>(load_word(meta) & (there ? ~0u : 0u));
  }
  __device__ void values(uint32_t (&x)[2], uint32_t codes) const {
    if constexpr (kLevels) {
      const uint32_t levels = levels_of_codes<kBits>(codes);
      const auto value = [&](int i) {
        return fmaf(float(levels >> 8 * i & 255), top * kTwo255ths, -top);
      };
      x[0] = E::pack(value(0), value(1)), x[1] = E::pack(value(2), value(3));
    } else {
      x[0] = even.template take<0>(codes), x[1] = even.template take<1>(codes);
    }
  }
};

// x / y of small numbers, in few instructions.
__device__ inline int small_quotient(int x, int y) { return int(__fdividef(x + 0.5f, float(y))); }

// A lane's pairs of two rows as a fragment of a first factor. kTurn: rows are its columns.
template <bool kTurn>
__device__ __forceinline__ void place_rows(uint32_t (&a)[4], const uint32_t (&x)[2][2]) {
  if constexpr (kTurn) {
    a[0] = transposed(x[0][0]), a[1] = transposed(x[0][1]);
    a[2] = transposed(x[1][0]), a[3] = transposed(x[1][1]);
  } else {
    a[0] = x[0][0], a[1] = x[1][0], a[2] = x[0][1], a[3] = x[1][1];
  }
}

enum Rows { kTokenRows, kLevelRows, kChannelRows };

// Reads K (kOfV false) or V of 16 tokens, from `token` of a page on, of which the first `valid`
// exist. fragment() takes steps of 16 channels in their order.
template <class E, int kBits, Rows kRows, bool kOfV>
struct UnitReader {
  static constexpr bool kTokens = kRows != kChannelRows, kTurn = kTokens == kOfV;
  static constexpr int kMetaBytes = kRows == kLevelRows ? 2 : kPairBytes;
  uint32_t row, meta;    // where this lane's first row begins
  int row_bytes, count;  // of a row: count codes
  int token, valid;
  int groups, least, longer;  // groups of a row, of `least` steps or, the first `longer`, one more
  int group = 0, group_end = 0;
  Worth<E, kBits, kRows == kLevelRows> worth[2];

  // Pinned: or the addresses of all steps, in every form, are kept from one unit to the next.
  __device__ UnitReader(const FormRows& from, int token, int valid)
      : count(pinned(kTokens ? from.rank : from.row_tokens)),
        token(token),
        valid(valid),
        groups(pinned(from.groups)) {
    const int g = threadIdx.x % 32 / 4, first = kTokens ? token + token_of_row(g) : g;
    row_bytes = count * kBits / 8;
    row = from.codes + first * row_bytes, meta = from.meta + first * groups * kMetaBytes;
    if (kTokens)
      least = small_quotient(from.rank / 16, groups), longer = from.rank / 16 - least * groups;
    else
      meta += small_quotient(token, from.side.group) * kPairBytes;
  }

  // The lane's rows of the fragment of step j: the second one is kLaterRow tokens or 8 channels on.
  __device__ void fragment(uint32_t (&a)[4], int j) {
    const int t = threadIdx.x % 4;
    uint32_t x[2][2];
    if (kTokens && j == group_end) load_group();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t codes;
      if constexpr (kTokens) {
        const uint32_t at = row + h * kLaterRow * row_bytes;
        codes = kOfV ? two_pairs<kBits>(at, 16 * j + 2 * t, count)
                     : four_codes<kBits>(at, 16 * j + 4 * t, count);
      } else {
        codes = four_codes<kBits>(row + (16 * j + 8 * h) * row_bytes, token + 4 * t, count);
      }
      if (!kTokens) worth[h].load(meta + (16 * j + 8 * h) * groups * kPairBytes, true);
      worth[h].values(x[h], codes);
    }
    place_rows<kTurn>(a, x);
  }

 private:
  // Of the group that begins here.
  __device__ void load_group() {
    const int own = token_of_row(threadIdx.x % 32 / 4);
    const uint32_t at = meta + group * kMetaBytes;
    worth[0].load(at, own < valid);
    worth[1].load(at + kLaterRow * groups * kMetaBytes, own + kLaterRow < valid);
    group_end += least + (group < longer), ++group;
  }
};

// The same of elements as they are, [token][rank]. Tokens from `valid` on are zeros.
template <class E, bool kOfV>
struct ElementReader {
  uint32_t row;
  int row_bytes;
  bool there[2];

  __device__ ElementReader(const FormRows& from, int token, int valid)
      : row_bytes(pinned(2 * from.rank)) {
    const int own = token_of_row(threadIdx.x % 32 / 4);
    row = from.codes + (token + own) * row_bytes;
    there[0] = own < valid, there[1] = own + kLaterRow < valid;
  }
  __device__ void fragment(uint32_t (&a)[4], int j) const {
    const int t = threadIdx.x % 4, first = 32 * j + (kOfV ? 4 : 8) * t;
    uint32_t x[2][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t at = row + h * kLaterRow * row_bytes + first;
      x[h][0] = there[h] ? load_word(at) : 0;
      x[h][1] = there[h] ? load_word(at + (kOfV ? 16 : 4)) : 0;
    }
    place_rows<kOfV>(a, x);
  }
};

// Runs body(reader) with the reader of what `from` holds.
template <class E, bool kOfV, class Body>
__device__ __forceinline__ void with_reader(const FormRows& from, int token, int valid, Body body) {
  const auto of_bits = [&](auto bits) {
    constexpr int kBits = decltype(bits)::value;
    if (from.side.by_channel()) {
      body(UnitReader<E, kBits, kChannelRows, kOfV>(from, token, valid));
    } else if (kBits < 8 && from.side.fixed_levels()) {
      if constexpr (kBits < 8) body(UnitReader<E, kBits, kLevelRows, kOfV>(from, token, valid));
    } else {
      body(UnitReader<E, kBits, kTokenRows, kOfV>(from, token, valid));
    }
  };
  using std::integral_constant;
  switch (from.side.bits) {
    case 16: body(ElementReader<E, kOfV>(from, token, valid)); break;
    case 8: of_bits(integral_constant<int, 8>{}); break;
    case 4: of_bits(integral_constant<int, 4>{}); break;
    case 3: of_bits(integral_constant<int, 3>{}); break;
    case 2: of_bits(integral_constant<int, 2>{}); break;
  }
}

// The queries of a run with codes, in shared memory: the steps of a loop then take them in turn, and
// one copy of its code is enough. A lane has 8 bytes of each step. Rows are 16 bytes apart in banks.
__host__ __device__ inline int query_row(int rank_k) { return 2 * rank_k + 16; }
__host__ __device__ inline int kept_queries_bytes(int rank_k) {
  return kMaxGroup * query_row(rank_k);
}
__device__ inline uint32_t own_queries(uint32_t kept, int rank_k) {
  return kept + threadIdx.x % 32 / 4 * query_row(rank_k) + threadIdx.x % 4 * 8;
}
template <int kSteps>
__device__ void keep_queries(uint32_t to, const Lane16<kSteps>& lane16, int rank_k) {
  to = own_queries(to, rank_k);
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    if (j * 16 < rank_k) {
      store_word(to + 32 * j, lane16.q[j][0]);
      store_word(to + 32 * j + 4, lane16.q[j][1]);
    }
  }
  __syncwarp();
}

// As score_unit, of 16 tokens of a page of codes. queries: this lane's of those that are kept.
template <class E, int kSteps>
__device__ __forceinline__ void score_codes(float (&s)[4], const Lane16<kSteps>& lane16,
                                            uint32_t queries, const FormRows& keys, int token,
                                            int valid, float scale_log2) {
  s[0] = s[1] = s[2] = s[3] = 0.f;
  with_reader<E, false>(keys, token, valid, [&](auto reader) {
    uint32_t a[4], q[2];
#pragma unroll 1
    for (int j = 0; j < lane16.steps_k; ++j) {
      load_vector(q, queries + 32 * j);
      reader.fragment(a, j);
      E::multiply(s, a, q[0], q[1]);
    }
  });
#pragma unroll
  for (int i = 0; i < 4; ++i) s[i] *= scale_log2;
}

// As add_unit.
template <class E, int kSteps>
__device__ __forceinline__ void add_codes(SoftmaxState<kSteps>& state, const Lane16<kSteps>& lane16,
                                          const FormRows& values, int token, int valid,
                                          float (&s)[4]) {
  state.weigh(s);
  const uint32_t p0 = transposed(E::pack(s[0], s[1])), p1 = transposed(E::pack(s[2], s[3]));
  with_reader<E, true>(values, token, valid, [&](auto reader) {
    uint32_t a[4];
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      if (j >= lane16.steps_v) break;
      reader.fragment(a, j);
      E::multiply(state.o[j], a, p0, p1);
    }
  });
}

}  // namespace kvlathe::cuda
