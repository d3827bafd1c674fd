// Products with weights that are codes, as a library for a CPU: pointers of their calls are host
// memory.
#define KVLATHE_FIBERS
#include "cuda/products/few_rows.cu"
