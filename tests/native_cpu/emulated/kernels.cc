// The CUDA kernels that rank tokens, as a library for a CPU: pointers of their
// calls are host memory.
#include "cuda/cache/move.cu"
#include "cuda/cache/observe.cu"
