// attend_decode over codes of one width, compiled.
#include "cuda/decode/attend_decode.cuh"
#include "cuda/decode/kernels.h"
#include "cuda/decode/variants.h"

namespace kvlathe::cuda {

const void* decode_kernel_codes(bool half, bool wide, int bits, int fill) {
  return codes_variant(half, wide, bits, fill, [](auto element, auto steps, auto bits, auto fill) {
    return reinterpret_cast<const void*>(
        attend_decode<decltype(element), 2, steps.value, bits.value, fill.value>);
  });
}

}  // namespace kvlathe::cuda
