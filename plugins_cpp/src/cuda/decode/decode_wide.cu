// attend_general for wide calls of ranks up to 256, compiled.
#include "cuda/decode/attend_general.cuh"
#include "cuda/decode/kernels.h"

namespace kvlathe::cuda {

const void* decode_kernel_wide(bool half) {
  return half ? reinterpret_cast<const void*>(attend_general<Half, Wide256>)
              : reinterpret_cast<const void*>(attend_general<Bfloat, Wide256>);
}

const void* bundled_kernel_wide(bool half) {
  return half ? reinterpret_cast<const void*>(attend_general<Half, BundledWide256>)
              : reinterpret_cast<const void*>(attend_general<Bfloat, BundledWide256>);
}

}  // namespace kvlathe::cuda
