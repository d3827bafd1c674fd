#include "cuda/decode/attend_general.cuh"
#include "cuda/decode/kernels.h"

namespace kvlathe::cuda {

const void* decode_kernel_general(bool half) {
  return half ? reinterpret_cast<const void*>(attend_general<Half>)
              : reinterpret_cast<const void*>(attend_general<Bfloat>);
}

}  // namespace kvlathe::cuda
