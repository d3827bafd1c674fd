// Decode attention over codes of one width, by blocks and by warps that attend alone, as a library
// for a CPU: pointers of its calls are host memory.
#define KVLATHE_FIBERS
#include "cuda/cache/spread.cu"
#include "cuda/decode/attend_alone.cuh"
#include "cuda/decode/attend_decode.cu"
#include "cuda/decode/plan.cu"
#include "absent.h"
#include "host_half.h"

namespace kvlathe::cuda {
namespace {

// At the widest ranks: they take all others.
template <int kBits>
const void* codes(int fill) {
  return fill == 2 ? launcher_of<attend_decode<HostHalf, 2, 8, kBits, 2>>()
                   : launcher_of<attend_decode<HostHalf, 2, 8, kBits, 1>>();
}
template <int kBits>
const void* alone(int fill) {
  return fill == 2 ? launcher_of<attend_alone<HostHalf, 8, kBits, 2>>()
                   : launcher_of<attend_alone<HostHalf, 8, kBits, 1>>();
}
inline int calls_alone = 0, multiprocessors = 0;

}  // namespace

const void* decode_kernel_codes(bool, bool, int bits, int fill) {
  return bits == 8 ? codes<8>(fill) : bits == 4 ? codes<4>(fill) : codes<2>(fill);
}
const void* decode_kernel_alone(bool, bool, int bits, int fill) {
  ++calls_alone;
  return bits == 8 ? alone<8>(fill) : bits == 4 ? alone<4>(fill) : alone<2>(fill);
}

}  // namespace kvlathe::cuda

// From now on: as many multiprocessors of 9.0, where calls may overlap. Kernels still copy as on
// 8.0.
extern "C" void become(int32_t sms) {
  kvlathe::cuda::multiprocessors = sms;
  other_device = [](cudaDeviceAttr which) {
    if (which == cudaDevAttrComputeCapabilityMajor) return 9;
    return which == cudaDevAttrMultiProcessorCount ? kvlathe::cuda::multiprocessors : int(which);
  };
}

// How often the host has chosen warps that attend alone, in plans and calls.
extern "C" int32_t alone_chosen() { return kvlathe::cuda::calls_alone; }
