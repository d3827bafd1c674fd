// attend_decode over 16-bit parts, compiled.
#include "cuda/decode/attend_decode.cuh"
#include "cuda/decode/kernels.h"

namespace kvlathe::cuda {
namespace {
template <class E>
const void* kernel(bool wide, int parts) {
  static const void* const kernels[KVLATHE_MAX_SLOTS][2] = {
      {reinterpret_cast<const void*>(attend_decode<E, 1, 6, 16, 1>),
       reinterpret_cast<const void*>(attend_decode<E, 1, 8, 16, 1>)},
      {reinterpret_cast<const void*>(attend_decode<E, 2, 6, 16, 1>),
       reinterpret_cast<const void*>(attend_decode<E, 2, 8, 16, 1>)},
      {reinterpret_cast<const void*>(attend_decode<E, 3, 6, 16, 1>),
       reinterpret_cast<const void*>(attend_decode<E, 3, 8, 16, 1>)}};
  return kernels[parts - 1][wide];
}
}  // namespace

const void* decode_kernel_16(bool half, bool wide, int parts) {
  return half ? kernel<Half>(wide, parts) : kernel<Bfloat>(wide, parts);
}

}  // namespace kvlathe::cuda
