// attend_general for wide calls of any rank, compiled for bfloat16.
#include "cuda/decode/attend_general.cuh"
#include "cuda/decode/kernels.h"

namespace kvlathe::cuda {

const void* bundled_kernel_widest_bf16() {
  return reinterpret_cast<const void*>(attend_general<Bfloat, BundledWidest>);
}

}  // namespace kvlathe::cuda
