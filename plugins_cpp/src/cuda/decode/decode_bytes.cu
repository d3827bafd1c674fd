// attend_bytes, compiled.
#include "cuda/decode/attend_bytes.cuh"
#include "cuda/decode/kernels.h"

namespace kvlathe::cuda {
namespace {

template <class P>
const void* kernel(bool half) {
  return half ? reinterpret_cast<const void*>(attend_bytes<Half, P>)
              : reinterpret_cast<const void*>(attend_bytes<Bfloat, P>);
}

}  // namespace

const void* decode_kernel_bytes(bool half, bool floats) {
  return floats ? kernel<ByteParams<Coding::kFloat8>>(half)
                : kernel<ByteParams<Coding::kAffine>>(half);
}
const void* decode_kernel_key_pages(bool half) { return kernel<KeyPageParams>(half); }

}  // namespace kvlathe::cuda
