// What the host of decode attention would launch on a device, without one.
#define KVLATHE_FIBERS
#include "cuda/cache/spread.cu"
#include "cuda/decode/attend_decode.cu"
#include "absent.h"

namespace kvlathe::cuda {

const void* decode_kernel_codes(bool, bool, int, int) { return nullptr; }
const void* decode_kernel_alone(bool, bool, int, int) { return nullptr; }

// As tests/support/gpus.py has it.
struct Gpu {
  int32_t major, sms, shared_per_sm, shared_per_block, shared_reserved, static_shared;
};
inline Gpu asked;

}  // namespace kvlathe::cuda

// 0: out has the grid, the warps of a block and its dynamic shared memory. 1: refused.
extern "C" int32_t launch_of(const kvlathe_attend_decode_args* a, const kvlathe::cuda::Gpu* gpu,
                             int32_t* out) {
  using namespace kvlathe::cuda;
  asked = *gpu;
  static_shared = size_t(gpu->static_shared);
  other_device = [](cudaDeviceAttr which) {
    switch (which) {
      case cudaDevAttrComputeCapabilityMajor: return asked.major;
      case cudaDevAttrMultiProcessorCount: return asked.sms;
      case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return asked.shared_per_sm;
      case cudaDevAttrMaxSharedMemoryPerBlockOptin: return asked.shared_per_block;
      case cudaDevAttrReservedSharedMemoryPerBlock: return asked.shared_reserved;
    }
    return 0;
  };
  try {
    const auto heads = kvlathe::checked_heads(*a);
    const Device device = Device::current();
    check_cuda_limits(*a, device, heads);
    decided(*a, heads, device, [&](const auto& call) {
      out[0] = call.at.grid, out[1] = call.at.warps, out[2] = call.at.shared_bytes;
    });
    return 0;
  } catch (const kvlathe::Refusal&) {
    return 1;
  }
}
