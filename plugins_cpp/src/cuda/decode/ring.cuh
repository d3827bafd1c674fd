// One warp's ring of tiles on their way through shared memory. Ranks differ, and so do the sizes of
// tiles.
#pragma once

#include "cuda/decode/params.h"
#include "cuda/device.cuh"

namespace kvlathe::cuda {

constexpr int kMostTiles = 6;   // in flight a warp, queries counted
constexpr int kSlots = 8;       // barriers a warp: a power of two above kMostTiles
constexpr int kMostCopies = 8;  // 512-byte copies of K, and of V, in a 16-bit tile

// Tiles start at multiples of 512 bytes: the swizzle's pattern.
__host__ __device__ inline int ring_room(int bytes) { return (bytes + 511) & ~511; }

// RingState is what changes from tile to tile.
struct RingState {
  int head = 0, tail = 0;  // where the next tile goes; where the oldest lies
  int used = 0, tiles = 0;
  int slot = 0;         // of the oldest tile
  uint32_t phases = 0;  // bit i: the parity that ends the next wait on barrier i
};
struct Ring : RingState {
  uint32_t base;
  int size;
  uint32_t barriers;  // [kSlots], one a tile; used by bulk copies only

  // A tile never wraps, so that its addresses are plain. The rest of the ring stays empty instead,
  // and counts as used.
  __device__ int start(int at, int bytes) const { return at + bytes <= size ? at : 0; }
  __device__ int cost(int at, int bytes) const {
    return at + bytes <= size ? bytes : size - at + bytes;
  }

  // The shared address of room for a tile (ring_room bytes), or 0 while the ring is full.
  __device__ uint32_t place(int bytes) {
    if (used + bytes > size || tiles == kMostTiles) return 0;
    const int taken = cost(head, bytes);
    if (used + taken > size) return 0;
    const int at = start(head, bytes);
    head = at + bytes;
    used += taken;
    ++tiles;
    return base + at;
  }
  // The barrier of the tile placed last.
  __device__ uint32_t newest_barrier() const {
    return barriers + ((slot + tiles - 1) & (kSlots - 1)) * 8;
  }

  // Waits for the oldest tile. Each tile's copies are one group, so newer ones stay on their way.
  // The end of a bulk copy (kBulk, from 9.0 on) is known by its barrier.
  template <bool kBulk = false>
  __device__ uint32_t wait_oldest(int bytes) {
#if __CUDA_ARCH__ >= 900
    if (kBulk) {
      wait_barrier(barriers + slot * 8, phases >> slot & 1);
      phases ^= 1u << slot;
      return base + start(tail, bytes);
    }
#endif
    if (tiles == 6) {
      wait_copy_groups<5>();
    } else if (tiles == 5) {
      wait_copy_groups<4>();
    } else if (tiles == 4) {
      wait_copy_groups<3>();
    } else if (tiles == 3) {
      wait_copy_groups<2>();
    } else if (tiles == 2) {
      wait_copy_groups<1>();
    } else {
      wait_copy_groups<0>();
    }
    __syncwarp();
    return base + start(tail, bytes);
  }

  // Forgets the oldest tile, which may still be read: its room is filled after the next
  // Producer::take_up().
  __device__ void drop_oldest(int bytes) {
    used -= cost(tail, bytes);
    tail = start(tail, bytes) + bytes;
    slot = (slot + 1) & (kSlots - 1);
    if (--tiles == 0) head = tail = used = 0;  // any tile fits an empty ring
  }
};

// Where chunk c (16 bytes) of row r lies in a tile [rows][chunks]: at r * chunks +
// (c ^ (r >> shift & mask)). A matrix load reads 8 rows of one column, and these then lie in
// different banks. Rows of two, four or a multiple of eight chunks conflict differently, so shift
// and mask depend on the rank. The pattern repeats after 16 rows, and tiles start at multiples of
// 512 bytes.
struct Swizzle {
  int shift, mask;
  __device__ explicit Swizzle(int rank) {
    const int zeros = min(__ffs(rank / 8) - 1, 3);
    shift = 3 - zeros;
    mask = (1 << zeros) - 1;
  }
  __device__ int operator()(int row) const { return row >> shift & mask; }
};

// The swizzle as copies see it. Copy i of this lane moves chunk lane + 32 i of the tile. Four bits
// for each copy say what to XOR into the low bits of its place.
__device__ inline uint32_t swizzle_bits(int rank) {
  const Swizzle swizzle(rank);
  const unsigned inverse = 65536u / unsigned(rank / 8) + 1;  // exact for the 256 chunks of a tile
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kMostCopies; ++i)
    bits |= uint32_t(swizzle((threadIdx.x % 32 + 32 * i) * inverse >> 16)) << 4 * i;
  return bits;
}

}  // namespace kvlathe::cuda
