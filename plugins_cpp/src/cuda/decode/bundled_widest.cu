// attend_general for wide calls of any rank, compiled.
#include "cuda/decode/attend_general.cuh"
#include "cuda/decode/kernels.h"

namespace kvlathe::cuda {

const void* bundled_kernel_widest(bool half) {
  return half ? reinterpret_cast<const void*>(attend_general<Half, BundledWidest>)
              : reinterpret_cast<const void*>(attend_general<Bfloat, BundledWidest>);
}

}  // namespace kvlathe::cuda
