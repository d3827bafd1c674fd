// attend_wide, compiled.
#include "cuda/decode/attend_wide.cuh"
#include "cuda/decode/kernels.h"

namespace kvlathe::cuda {

const void* plain_kernel_256(bool half) {
  return half ? reinterpret_cast<const void*>(attend_wide<Half, BundledPlain256>)
              : reinterpret_cast<const void*>(attend_wide<Bfloat, BundledPlain256>);
}

const void* plain_kernel_widest(bool half) {
  return half ? reinterpret_cast<const void*>(attend_wide<Half, BundledPlainWidest>)
              : reinterpret_cast<const void*>(attend_wide<Bfloat, BundledPlainWidest>);
}

}  // namespace kvlathe::cuda
