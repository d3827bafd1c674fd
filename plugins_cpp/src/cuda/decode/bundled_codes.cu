#include "cuda/decode/attend_bundle.cuh"
#include "cuda/decode/kernels.h"

namespace kvlathe::cuda {
namespace {

template <class E, int kBits>
const void* kernel(bool wide) {
  return wide ? reinterpret_cast<const void*>(attend_bundles<E, BundledCodes, 8, kBits>)
              : reinterpret_cast<const void*>(attend_bundles<E, BundledCodes, 6, kBits>);
}

template <class E>
const void* kernel(bool wide, int bits) {
  return bits == 8 ? kernel<E, 8>(wide) : bits == 4 ? kernel<E, 4>(wide) : kernel<E, 2>(wide);
}

}  // namespace

const void* bundled_kernel_codes(bool half, bool wide, int bits) {
  return half ? kernel<Half>(wide, bits) : kernel<Bfloat>(wide, bits);
}

}  // namespace kvlathe::cuda
