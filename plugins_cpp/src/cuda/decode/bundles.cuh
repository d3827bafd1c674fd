// Rows of one sequence that are attended together (KVLATHE_BUNDLES of abi.h). To the products they
// are more query heads: column c of a (sequence, KV head) is query head c % group of row c / group.
// An item of work is a tile of P::kColumns of them, so tiles of a bundle read the same tokens at
// about the same time. Rows differ in what they see only among the newest tokens.
#pragma once

#include "cuda/decode/params.h"

namespace kvlathe::cuda {

// What a length of a bundle's first row says. All is 0 of its other rows.
__host__ __device__ constexpr int tokens_in(int length) {
  return length < 0 ? 0 : length & (KVLATHE_STEPPED - 1);
}
__host__ __device__ constexpr int rows_in(int length) {
  return length < 0 ? 0 : (length >> KVLATHE_BUNDLE_SHIFT) + 1;
}
__host__ __device__ constexpr bool is_stepped(int length) { return length & KVLATHE_STEPPED; }

// Tokens that a length stands for in a call of P.
template <class P>
__device__ inline int tokens_of(int length) {
  if constexpr (P::kBundled) return tokens_in(length);
  return length;
}

// Tiles of columns of a bundle of so many rows.
template <int kColumns>
int tiles_of(int group_size, int rows = KVLATHE_MAX_BUNDLE) {
  return (rows * group_size + kColumns - 1) / kColumns;
}

// Of a call with bundles: the tile of columns that place `head` stands for, and its first column.
template <class P>
__device__ int first_column(const P& p, int head) {
  return head % p.tiles * P::kColumns;
}
// Columns of that tile in a bundle of so many rows; below 1 where it has none there.
template <class P>
__device__ int columns_of(const P& p, int head, int rows) {
  return min(P::kColumns, rows * p.group_size - first_column(p, head));
}

// The score of a token that a column does not see and another one of its item does. It is finite: so
// no column has scores of -inf alone. Every row sees its own token, and beside that this weighs 0.
constexpr float kUnseen = -1e30f;

// The newest tokens of a part that this lane's two columns of a fragment do not see. Later columns
// than the bundle has may see anything.
struct UnseenTail {
  int last[2] = {0, 0};

  // column: the first of the two. length: of the bundle's first row.
  __device__ void set(int length, int column, int group) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      last[i] = is_stepped(length) ? max(0, rows_in(length) - 1 - (column + i) / group) : 0;
  }
  // Of token `own` of those from which on `left` exist.
  __device__ void hide(float& s, int i, int own, int left) const {
    if (own >= left) {
      s = -INFINITY;
    } else if (own + last[i] >= left) {
      s = kUnseen;
    }
  }
};

}  // namespace kvlathe::cuda
