// The CUDA entries of a library that was built without nvcc: they refuse, with the remedy.
#include "adapters/node/attend_node.h"
#include "common/refusal.h"
#include "kvlathe/cache.h"
#include "kvlathe/products.h"
#include "kvlathe/rows.h"

namespace {
int32_t refuse(kvlathe_status* status) {
  kvlathe::write_status(
      status, KVLATHE_UNSUPPORTED,
      "this libkvlathe holds no CUDA kernels: build plugins_cpp where nvcc is installed");
  return KVLATHE_UNSUPPORTED;
}
}  // namespace

void kvlathe::device_clear(void*, size_t, void*) {
  kvlathe_status status;
  throw Refusal(kvlathe_code(refuse(&status)), status.message);
}

extern "C" int32_t kvlathe_has_cuda(void) { return 0; }
extern "C" int32_t kvlathe_cuda_attend_decode(const kvlathe_attend_decode_args*,
                                              kvlathe_status* status) {
  return refuse(status);
}
extern "C" int32_t kvlathe_cuda_workspace_bytes(int32_t, int32_t, int64_t*,
                                                kvlathe_status* status) {
  return refuse(status);
}
extern "C" int32_t kvlathe_cuda_plan(const kvlathe_attend_decode_args*, int32_t,
                                     kvlathe_status* status) {
  return refuse(status);
}
extern "C" int32_t kvlathe_cuda_plan_bytes(int64_t*, kvlathe_status* status) {
  return refuse(status);
}
extern "C" int32_t kvlathe_cuda_has_prompt_kernel(void) { return 0; }
extern "C" int64_t kvlathe_cuda_prompt_list_bytes(int32_t, int32_t, int32_t) { return 0; }
extern "C" int32_t kvlathe_cuda_spread(const kvlathe_spread_args*, kvlathe_status* status) {
  return refuse(status);
}
extern "C" int32_t kvlathe_cuda_append(const kvlathe_layer*, const kvlathe_append_args*,
                                       kvlathe_status* status) {
  return refuse(status);
}
extern "C" int32_t kvlathe_cuda_seal(const kvlathe_cuda_seal_args*, kvlathe_status* status) {
  return refuse(status);
}
extern "C" int32_t kvlathe_cuda_seal_listed(const kvlathe_cuda_seal_args*, kvlathe_status* status) {
  return refuse(status);
}
extern "C" int32_t kvlathe_cuda_observe(const kvlathe_observe_args*, kvlathe_status* status) {
  return refuse(status);
}
extern "C" int32_t kvlathe_cuda_move(const kvlathe_cuda_move_args*, kvlathe_status* status) {
  return refuse(status);
}
extern "C" int32_t kvlathe_cuda_rms_norm(const kvlathe_rows_args*, kvlathe_status* status) {
  return refuse(status);
}
extern "C" int32_t kvlathe_cuda_norm_heads(const kvlathe_rows_args*, kvlathe_status* status) {
  return refuse(status);
}
extern "C" int32_t kvlathe_cuda_silu_product(const kvlathe_rows_args*, kvlathe_status* status) {
  return refuse(status);
}
extern "C" int32_t kvlathe_cuda_fp8_rows(const kvlathe_rows_args*, kvlathe_status* status) {
  return refuse(status);
}
extern "C" int32_t kvlathe_cuda_product(const kvlathe_product_args*, kvlathe_status* status) {
  return refuse(status);
}
extern "C" int32_t kvlathe_cuda_widen(const kvlathe_product_args*, kvlathe_status* status) {
  return refuse(status);
}
