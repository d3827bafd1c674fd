#include "attend_decode.cuh"
#include "kernels.h"

namespace kvlathe::cuda {
namespace {
template <class E>
const void* kernel(bool wide) {
  return wide ? reinterpret_cast<const void*>(attend_decode<E, 3, 8, 0>)
              : reinterpret_cast<const void*>(attend_decode<E, 3, 6, 0>);
}
}  // namespace

const void* decode_kernel_any(bool half, bool wide) { return half ? kernel<Half>(wide) : kernel<Bfloat>(wide); }

}  // namespace kvlathe::cuda
