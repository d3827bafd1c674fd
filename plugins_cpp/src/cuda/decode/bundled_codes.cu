// attend_bundles over codes of one width, compiled.
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
  const void* found = nullptr;
  for_known_bits(bits, [&](auto known) { found = kernel<E, decltype(known)::value>(wide); });
  return found;
}

}  // namespace

const void* bundled_kernel_codes(bool half, bool wide, int bits) {
  return half ? kernel<Half>(wide, bits) : kernel<Bfloat>(wide, bits);
}

}  // namespace kvlathe::cuda
