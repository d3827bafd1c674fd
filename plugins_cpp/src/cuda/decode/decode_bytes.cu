// attend_bytes, compiled.
#include "cuda/decode/attend_bytes.cuh"
#include "cuda/decode/kernels.h"

namespace kvlathe::cuda {
namespace {

template <Coding kCoding>
const void* kernel(bool half) {
  return half ? reinterpret_cast<const void*>(attend_bytes<Half, kCoding>)
              : reinterpret_cast<const void*>(attend_bytes<Bfloat, kCoding>);
}

}  // namespace

const void* decode_kernel_bytes(bool half, bool floats) {
  return floats ? kernel<Coding::kFloat8>(half) : kernel<Coding::kAffine>(half);
}

}  // namespace kvlathe::cuda
