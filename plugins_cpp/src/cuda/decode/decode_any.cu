// attend_decode over codes of several widths, compiled.
#include "cuda/decode/attend_decode.cuh"
#include "cuda/decode/kernels.h"

namespace kvlathe::cuda {
namespace {
template <class E>
const void* kernel(bool wide, int fill) {
  if (fill == 2) return reinterpret_cast<const void*>(attend_decode<E, 3, 8, kSeveralWidths, 2>);
  return wide ? reinterpret_cast<const void*>(attend_decode<E, 3, 8, kSeveralWidths, 1>)
              : reinterpret_cast<const void*>(attend_decode<E, 3, 6, kSeveralWidths, 1>);
}
}  // namespace

const void* decode_kernel_any(bool half, bool wide, int fill) {
  return half ? kernel<Half>(wide, fill) : kernel<Bfloat>(wide, fill);
}

}  // namespace kvlathe::cuda
