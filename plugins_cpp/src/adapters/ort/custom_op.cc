// kvlathe::Attend as a custom operator of ONNX Runtime, on its CPU provider or on its CUDA
// provider.
//
// ONNX Runtime takes a registered operator before the function of the same name that the model
// carries, so one model.onnx runs with this library and without it.
#include <cstring>

#include "adapters/ort/ort_value.h"

namespace kvlathe {
namespace {

// Whether the session option `name` is `wanted`: kvlathe.element_bits are those of o,
// kvlathe.hot_bits those of the output `rows`, kvlathe.provider is "cuda" for the operator of the
// CUDA provider.
bool asked(const OrtSessionOptions* options, const char* name, const char* wanted) {
  int has = 0;
  char value[8] = "";
  size_t size = sizeof value;
  check(ort::HasSessionConfigEntry::call(api, options, name, &has));
  if (has) check(ort::GetSessionConfigEntry::call(api, options, name, value, &size));
  return !std::strcmp(value, wanted);
}

}  // namespace
}  // namespace kvlathe

// What SessionOptions.register_custom_ops_library calls.
extern "C" KVLATHE_API OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                    const OrtApiBase* base) {
  using namespace kvlathe;
  api = base->GetApi(ort::kVersion);
  if (!api) return nullptr;  // older than 1.17: the function runs instead
  return reported([&] {
    const bool cuda = asked(options, "kvlathe.provider", "cuda");
    const OrtCustomOp* op = cuda ? cuda_op()
                                 : cpu_op(asked(options, "kvlathe.element_bits", "16"),
                                          asked(options, "kvlathe.hot_bits", "16"));
    OrtCustomOpDomain* domain;  // lives as long as the process, like the library
    check(ort::CreateCustomOpDomain::call(api, "kvlathe", &domain));
    check(ort::CustomOpDomain_Add::call(api, domain, op));
    check(ort::AddCustomOpDomain::call(api, options, domain));
  });
}
