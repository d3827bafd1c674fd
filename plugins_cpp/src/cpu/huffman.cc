#include "cpu/huffman.h"

#include <algorithm>
#include <cstring>

namespace kvlathe {
namespace {

constexpr int kWhole = 1 << kCodeBits;  // codes of length l take kWhole >> l of it

// A symbol's count, and the symbol: sorted by the first.
using Counted = uint64_t;

int symbol_of(Counted counted) { return int(counted & 255); }

// Sorts by the count, byte by byte from the lowest.
void sort_counted(Counted* leaves, int n) {
  Counted others[256];
  Counted largest = 0;
  for (int i = 0; i < n; ++i) largest = std::max(largest, leaves[i]);
  for (int shift = 8; largest >> shift; shift += 8) {
    int place[257] = {};
    for (int i = 0; i < n; ++i) ++place[(leaves[i] >> shift & 255) + 1];
    for (int i = 0; i < 256; ++i) place[i + 1] += place[i];
    for (int i = 0; i < n; ++i) others[place[leaves[i] >> shift & 255]++] = leaves[i];
    std::copy(others, others + n, leaves);
  }
}

// Depths of the leaves of Huffman's tree, over counts that ascend: the two smallest of leaves and
// of sums that are left become one, until there is one.
void tree_depths(const Counted* leaves, int n, int* depths) {
  uint64_t sums[256];
  int parent_of_leaf[256], parent_of_sum[256];
  int leaf = 0, sum = 0;
  for (int made = 0; made < n - 1; ++made) {
    uint64_t total = 0;
    for (int side = 0; side < 2; ++side) {
      if (leaf < n && (sum == made || leaves[leaf] >> 8 <= sums[sum])) {
        parent_of_leaf[leaf] = made;
        total += leaves[leaf++] >> 8;
      } else {
        parent_of_sum[sum] = made;
        total += sums[sum++];
      }
    }
    sums[made] = total;
  }
  int depth_of_sum[256];
  depth_of_sum[n - 2] = 0;
  for (int i = n - 3; i >= 0; --i) depth_of_sum[i] = depth_of_sum[parent_of_sum[i]] + 1;
  for (int i = 0; i < n; ++i) depths[i] = depth_of_sum[parent_of_leaf[i]] + 1;
}

// Lengths of kCodeBits at most that fill a code exactly: the rarest grow, then the most frequent
// that still fit shrink.
void limit(int* depths, int n) {
  int filled = 0;
  for (int i = 0; i < n; ++i) {
    depths[i] = std::min(depths[i], kCodeBits);
    filled += kWhole >> depths[i];
  }
  for (int i = 0; i < n && filled > kWhole; ++i) {
    while (depths[i] < kCodeBits && filled > kWhole) filled -= kWhole >> ++depths[i];
  }
  while (filled < kWhole) {
    for (int i = n - 1; i >= 0; --i) {
      const int gain = kWhole >> depths[i];
      if (depths[i] > 1 && filled + gain <= kWhole) {
        filled += gain;
        --depths[i];
      }
    }
  }
}

// The code of the first symbol of each length.
void first_codes(const CodeLengths& lengths, uint32_t* next) {
  uint32_t counts[kCodeBits + 1] = {};
  for (uint8_t length : lengths.of) ++counts[length];
  counts[0] = 0;
  uint32_t code = 0;
  for (int length = 1; length <= kCodeBits; ++length) {
    code = (code + counts[length - 1]) << 1;
    next[length] = code;
  }
}

int symbols_of(const CodeLengths& lengths) {
  return 256 - int(std::count(lengths.of, lengths.of + 256, 0));
}

}  // namespace

CodeLengths code_lengths(const uint32_t* histogram) {
  CodeLengths lengths = {};
  Counted leaves[256];
  int n = 0;
  for (int s = 0; s < 256; ++s) {
    if (histogram[s]) leaves[n++] = Counted{histogram[s]} << 8 | Counted(s);
  }
  if (n == 1) lengths.of[symbol_of(leaves[0])] = 1;
  if (n < 2) return lengths;
  sort_counted(leaves, n);
  int depths[256];
  tree_depths(leaves, n, depths);
  limit(depths, n);
  for (int i = 0; i < n; ++i) lengths.of[symbol_of(leaves[i])] = uint8_t(depths[i]);
  return lengths;
}

void write_codes(const CodeLengths& lengths, uint32_t* codes) {
  std::memset(codes, 0, 256 * sizeof *codes);
  if (symbols_of(lengths) < 2) return;
  uint32_t next[kCodeBits + 1];
  first_codes(lengths, next);
  for (int s = 0; s < 256; ++s) {
    const int length = lengths.of[s];
    if (length) codes[s] = next[length]++ << 8 | uint32_t(length);
  }
}

bool write_entries(const CodeLengths& lengths, uint16_t* entries) {
  const int symbols = symbols_of(lengths);
  if (symbols < 2) {
    uint16_t alone = 0;
    for (int s = 0; s < 256; ++s) alone = uint16_t(lengths.of[s] ? s << 8 : alone);
    std::fill(entries, entries + kWhole, alone);
    return true;
  }
  int filled = 0;
  for (uint8_t length : lengths.of) filled += length ? kWhole >> length : 0;
  if (filled != kWhole) return false;
  uint32_t next[kCodeBits + 1];
  first_codes(lengths, next);
  for (int s = 0; s < 256; ++s) {
    const int length = lengths.of[s];
    if (!length) continue;
    const int width = kWhole >> length;
    std::fill_n(entries + int(next[length]++) * width, width, uint16_t(s << 8 | length));
  }
  return true;
}

}  // namespace kvlathe
