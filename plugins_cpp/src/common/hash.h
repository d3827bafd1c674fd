// The noise of stochastic rounding: MurmurHash3's finalizer, chained (mixed and hashed of
// kvlathe/plan/codec.py).
#pragma once

#include <cstdint>

#include "common/formats.h"

namespace kvlathe {
namespace {  // each file's own: those for other processors include it, too

// Number: uint32_t, or a vector of them.
template <class Number>
KVLATHE_ANYWHERE inline Number mixed(Number x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

template <class Number>
KVLATHE_ANYWHERE inline Number hashed(Number key, Number number) {
  return mixed((key ^ number) + 0x9E3779B9u);
}

// What all numbers of one lane's K (0) or V (1) have in common; the token's position and its
// channel follow.
inline uint32_t noise_key(int64_t seed, int32_t layer, int32_t head, uint32_t which) {
  return hashed(hashed(hashed(hashed(0u, uint32_t(seed)), uint32_t(layer)), uint32_t(head)), which);
}

}  // namespace
}  // namespace kvlathe
