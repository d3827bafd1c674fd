// An element whose products a warp's fibers compute.
#pragma once

#include "cuda/device.cuh"
#include "cuda/warp.cuh"

namespace kvlathe::cuda {

struct HostHalf : Half {
  static void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    multiply_tiles<Half>(d, a, b0, b1);
  }
};

}  // namespace kvlathe::cuda
