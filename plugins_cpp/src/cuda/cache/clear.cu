// Writes zeros on a stream, for the adapters, which are compiled without the CUDA toolkit.
#include <cuda_runtime_api.h>

#include "adapters/node/attend_node.h"

void kvlathe::device_clear(void* data, size_t bytes, void* stream) {
  const cudaError_t error = cudaMemsetAsync(data, 0, bytes, static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess)
    throw Refusal(KVLATHE_DEVICE_ERROR,
                  std::string("clearing the workspace failed: ") + cudaGetErrorString(error));
}
