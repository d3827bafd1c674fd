// attend_bundles over 16-bit parts, compiled.
#include "cuda/decode/attend_bundle.cuh"
#include "cuda/decode/kernels.h"

namespace kvlathe::cuda {

const void* bundled_kernel_16(bool half) {
  return half ? reinterpret_cast<const void*>(attend_bundles<Half, Bundled16, 8, 16>)
              : reinterpret_cast<const void*>(attend_bundles<Bfloat, Bundled16, 8, 16>);
}

}  // namespace kvlathe::cuda
