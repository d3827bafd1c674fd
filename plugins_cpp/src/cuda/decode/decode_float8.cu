// The kernels of decode attention for calls with floats of 8 bits: attend_general, which reads them
// here alone.
#include "cuda/decode/attend_general.cuh"
#include "cuda/decode/kernels.h"

namespace kvlathe::cuda {
namespace {

template <class P>
const void* kernel(bool half) {
  return half ? reinterpret_cast<const void*>(attend_general<Half, P>)
              : reinterpret_cast<const void*>(attend_general<Bfloat, P>);
}

}  // namespace

const void* decode_kernel_float8(bool half) { return kernel<Float8Params>(half); }
const void* bundled_kernel_float8(bool half) { return kernel<BundledFloat8>(half); }

}  // namespace kvlathe::cuda
