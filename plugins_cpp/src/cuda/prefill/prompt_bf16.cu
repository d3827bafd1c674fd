// The kernels of attend_prompt.cuh for bfloat16 elements.
#include "cuda/prefill/attend_prompt.cuh"

namespace kvlathe::cuda {

const void* prompt_kernel_bf16(PromptKind kind) { return kernel_of_kind<Bfloat>(kind); }

}  // namespace kvlathe::cuda
