// The CUDA kernels that append rows, as a library for a CPU: pointers of their calls are host
// memory.
#define KVLATHE_FIBERS
#include "cuda/warp.cuh"

#include "cuda/cache/append.cu"
