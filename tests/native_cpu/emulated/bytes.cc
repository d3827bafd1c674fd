// Decode attention over rows of bytes as a library for a CPU: pointers of its
// calls are host memory.
#define KVLATHE_FIBERS
#define KVLATHE_HAS_BYTES
#include "cuda/cache/spread.cu"
#include "cuda/decode/attend_bytes.cuh"
#include "cuda/decode/attend_decode.cu"
#include "cuda/decode/plan.cu"
#include "absent.h"
#include "host_half.h"

namespace kvlathe::cuda {
namespace {

inline int calls_of_bytes = 0, multiprocessors = 0;

template <class P>
const void* bytes() {
  ++calls_of_bytes;
  return launcher_of<attend_bytes<HostHalf, P>>();
}

}  // namespace

const void* decode_kernel_codes(bool, bool, int, int) { return nullptr; }
const void* decode_kernel_alone(bool, bool, int, int) { return nullptr; }
const void* decode_kernel_bytes(bool, bool floats) {
  return floats ? bytes<ByteParams<Coding::kFloat8>>() : bytes<ByteParams<Coding::kAffine>>();
}
const void* decode_kernel_key_pages(bool) { return bytes<KeyPageParams>(); }

}  // namespace kvlathe::cuda

// From now on: as many multiprocessors of 9.0, where calls may overlap. Kernels
// still copy as on 8.0.
extern "C" void become(int32_t sms) {
  kvlathe::cuda::multiprocessors = sms;
  other_device = [](cudaDeviceAttr which) {
    if (which == cudaDevAttrComputeCapabilityMajor) return 9;
    return which == cudaDevAttrMultiProcessorCount ? kvlathe::cuda::multiprocessors : int(which);
  };
}

// How often the host has chosen the kernel of rows of bytes, in plans and
// calls.
extern "C" int32_t bytes_chosen() { return kvlathe::cuda::calls_of_bytes; }
