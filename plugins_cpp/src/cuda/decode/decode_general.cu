// attend_general, compiled.
#include "cuda/decode/attend_general.cuh"
#include "cuda/decode/kernels.h"

namespace kvlathe::cuda {
namespace {
template <class E>
const void* kernel(bool named) {
  return named ? reinterpret_cast<const void*>(attend_general<E, GeneralParams<KVLATHE_MAX_PARTS>>)
               : reinterpret_cast<const void*>(attend_general<E, GeneralParams<KVLATHE_MAX_SLOTS>>);
}
}  // namespace

const void* decode_kernel_general(bool half, bool named) {
  return half ? kernel<Half>(named) : kernel<Bfloat>(named);
}

const void* decode_kernel_scored(bool half) {
  return half ? reinterpret_cast<const void*>(attend_general<Half, ScoredParams>)
              : reinterpret_cast<const void*>(attend_general<Bfloat, ScoredParams>);
}

}  // namespace kvlathe::cuda
