// The CUDA entries of a library that was built without nvcc: they refuse, with the remedy.
#include "check.h"

namespace {
int32_t refuse(kvlathe_status* status) {
  kvlathe::write_status(status, KVLATHE_UNSUPPORTED,
                        "this libkvlathe holds no CUDA kernels: build plugins_cpp where nvcc is installed");
  return KVLATHE_UNSUPPORTED;
}
}  // namespace

extern "C" int32_t kvlathe_has_cuda(void) { return 0; }
extern "C" int32_t kvlathe_cuda_attend_decode(const kvlathe_attend_decode_args*, kvlathe_status* status) {
  return refuse(status);
}
extern "C" int32_t kvlathe_cuda_workspace_bytes(int32_t, int32_t, int64_t*, kvlathe_status* status) {
  return refuse(status);
}
