#include "cuda/decode/attend_alone.cuh"
#include "cuda/decode/kernels.h"

namespace kvlathe::cuda {
namespace {
template <class E, int kBits>
const void* kernel(bool wide, int fill) {
  if (fill == 2) return reinterpret_cast<const void*>(attend_alone<E, 8, kBits, 2>);
  return wide ? reinterpret_cast<const void*>(attend_alone<E, 8, kBits, 1>)
              : reinterpret_cast<const void*>(attend_alone<E, 6, kBits, 1>);
}

template <class E>
const void* kernel(bool wide, int bits, int fill) {
  return bits == 8   ? kernel<E, 8>(wide, fill)
         : bits == 4 ? kernel<E, 4>(wide, fill)
                     : kernel<E, 2>(wide, fill);
}
}  // namespace

const void* decode_kernel_alone(bool half, bool wide, int bits, int fill) {
  return half ? kernel<Half>(wide, bits, fill) : kernel<Bfloat>(wide, bits, fill);
}

}  // namespace kvlathe::cuda
