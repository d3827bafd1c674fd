#include "select.h"

#include <string>

#include "../check.h"
#include "kvlathe/cpu.h"

namespace kvlathe {
namespace {

const Kernels* supported(int32_t isa) {
#if defined(KVLATHE_X86)
  if (isa == KVLATHE_ISA_AVX512_VNNI) {
    return __builtin_cpu_supports("avx512vnni") && supported(KVLATHE_ISA_AVX512) ? &kAvx512Vnni : nullptr;
  }
  if (isa == KVLATHE_ISA_AVX512) {
    const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                     __builtin_cpu_supports("avx512vl");
    return has && supported(KVLATHE_ISA_AVX2) ? &kAvx512 : nullptr;
  }
  if (isa == KVLATHE_ISA_AVX2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") ? &kAvx2 : nullptr;
  }
#endif
  return isa == KVLATHE_ISA_PORTABLE ? &kPortable : nullptr;
}

}  // namespace

const Kernels& kernels_for(int32_t isa) {
  if (isa == KVLATHE_ISA_AUTO) {
    for (int32_t best : {KVLATHE_ISA_AVX512_VNNI, KVLATHE_ISA_AVX512, KVLATHE_ISA_AVX2}) {
      if (const Kernels* found = supported(best)) return *found;
    }
    return kPortable;
  }
  if (const Kernels* found = supported(isa)) return *found;
  throw Refusal(KVLATHE_UNSUPPORTED, "instruction set " + std::to_string(isa) + " is not available on this machine");
}

}  // namespace kvlathe

extern "C" const char* kvlathe_cpu_isa(void) { return kvlathe::kernels_for(KVLATHE_ISA_AUTO).name; }
