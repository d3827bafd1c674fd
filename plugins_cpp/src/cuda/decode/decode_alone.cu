// attend_alone, compiled.
#include "cuda/decode/attend_alone.cuh"
#include "cuda/decode/kernels.h"
#include "cuda/decode/variants.h"

namespace kvlathe::cuda {

const void* decode_kernel_alone(bool half, bool wide, int bits, int fill) {
  return codes_variant(half, wide, bits, fill, [](auto element, auto steps, auto bits, auto fill) {
    return reinterpret_cast<const void*>(
        attend_alone<decltype(element), steps.value, bits.value, fill.value>);
  });
}

}  // namespace kvlathe::cuda
