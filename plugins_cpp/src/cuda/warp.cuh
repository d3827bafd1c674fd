// Joint actions of a block's threads, for kernels that tests also run on a CPU. The tests have
// a file of this name with the same functions (tests/native_cpu/emulated).
#pragma once

#include "cuda/device.cuh"

namespace kvlathe::cuda {

// Declares `name`: the bytes of a block's dynamic shared memory.
#define KVLATHE_DYNAMIC_SHARED(name) extern __shared__ __align__(128) char name[]

// The address of a block's dynamic shared memory.
__device__ inline uint32_t dynamic_shared() {
  extern __shared__ __align__(128) unsigned char dynamic_memory[];
  return shared_address(dynamic_memory);
}

// The first `threads` threads of a block, whole warps, wait for each other, and for no others.
__device__ inline void meet_threads(int threads) {
  asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}

// The same, beside those who meet there.
__device__ inline void meet_apart(int threads) {
  asm volatile("bar.sync 2, %0;" ::"r"(threads) : "memory");
}

__device__ inline float from_lane_xor(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }

// d[16 x 8] += a[16 x 16] b[16 x 8], as mma.m16n8k16 lays them out. Whole warp.
template <class E>
__device__ __forceinline__ void multiply_tiles(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
  E::multiply(d, a, b0, b1);
}

}  // namespace kvlathe::cuda
