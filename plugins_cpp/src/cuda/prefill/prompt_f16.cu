// The kernels of attend_prompt.cuh for float16 elements.
#include "cuda/prefill/attend_prompt.cuh"

namespace kvlathe::cuda {

const void* prompt_kernel_f16(PromptKind kind) { return kernel_of_kind<Half>(kind); }

}  // namespace kvlathe::cuda
