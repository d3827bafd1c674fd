// The CUDA kernels that seal pages, as a library for a CPU: pointers of their calls are host memory.
#include "cuda/cache/seal.cu"
