// attend_general for wide calls of any rank, compiled for halves. The same of bfloat16 is a
// file of its own: each takes minutes, and they are compiled side by side.
#include "cuda/decode/attend_general.cuh"
#include "cuda/decode/kernels.h"

namespace kvlathe::cuda {

const void* bundled_kernel_widest(bool half) {
  return half ? reinterpret_cast<const void*>(attend_general<Half, BundledWidest>)
              : bundled_kernel_widest_bf16();
}

}  // namespace kvlathe::cuda
