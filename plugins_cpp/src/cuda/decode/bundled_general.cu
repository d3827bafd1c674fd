// attend_general for bundles, compiled.
#include "cuda/decode/attend_general.cuh"
#include "cuda/decode/kernels.h"

namespace kvlathe::cuda {

const void* bundled_kernel_general(bool half) {
  return half ? reinterpret_cast<const void*>(attend_general<Half, BundledGeneral>)
              : reinterpret_cast<const void*>(attend_general<Bfloat, BundledGeneral>);
}

}  // namespace kvlathe::cuda
