#include "cpu/select.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "common/refusal.h"
#include "kvlathe/cpu.h"

#if defined(KVLATHE_AARCH64) && defined(__linux__)
#include <asm/hwcap.h>
#include <linux/prctl.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif

namespace kvlathe {
namespace {

const char* const kNames[] = {"auto",    "portable", "avx2",    "avx512", "avx512vnni",
                              "avxvnni", "neon",     "neondot", "sve"};
constexpr int32_t kMostIsa = KVLATHE_ISA_SVE;

#if defined(KVLATHE_AARCH64)
bool has_dot_products() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#elif defined(__ARM_FEATURE_DOTPROD)
  return true;
#else
  return false;
#endif
}
#endif

#if defined(KVLATHE_SVE_KERNELS)
// Of this machine's vectors; 0 without SVE.
int sve_bits() {
  if (!(getauxval(AT_HWCAP) & HWCAP_SVE)) return 0;
  const int found = prctl(PR_SVE_GET_VL);
  return found < 0 ? 0 : 8 * (found & PR_SVE_VL_LEN_MASK);
}

// Vectors of 128 bits are NEON's.
const Kernels* sve_kernels() {
  const int vector = sve_bits();
  return vector == 256 ? &kSve256 : vector == 512 ? &kSve512 : nullptr;
}
#endif

const Kernels* supported(int32_t isa) {
#if defined(KVLATHE_X86)
  if (isa == KVLATHE_ISA_AVX512_VNNI) {
    return __builtin_cpu_supports("avx512vnni") && supported(KVLATHE_ISA_AVX512) ? &kAvx512Vnni
                                                                                 : nullptr;
  }
  if (isa == KVLATHE_ISA_AVX512) {
    const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return has && supported(KVLATHE_ISA_AVX2) ? &kAvx512 : nullptr;
  }
  if (isa == KVLATHE_ISA_AVX_VNNI) {
    return __builtin_cpu_supports("avxvnni") && supported(KVLATHE_ISA_AVX2) ? &kAvxVnni : nullptr;
  }
  if (isa == KVLATHE_ISA_AVX2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                   __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2")
               ? &kAvx2
               : nullptr;
  }
#elif defined(KVLATHE_AARCH64)
#if defined(KVLATHE_SVE_KERNELS)
  if (isa == KVLATHE_ISA_SVE) return sve_kernels();
#endif
  if (isa == KVLATHE_ISA_NEON_DOT) return has_dot_products() ? &kNeonDot : nullptr;
  if (isa == KVLATHE_ISA_NEON) return &kNeon;
#endif
  return isa == KVLATHE_ISA_PORTABLE ? &kPortable : nullptr;
}

// Whether AUTO takes it where this machine has it. SVE of 256 bits has twice NEON's length and half
// its pipes, and takes more than half of its instructions.
bool is_preferred(int32_t isa) {
#if defined(KVLATHE_SVE_KERNELS)
  if (isa == KVLATHE_ISA_SVE) return sve_bits() == 512;
#endif
  return isa != KVLATHE_ISA_SVE;
}

// The one that KVLATHE_ISA names, by the name that kvlathe_cpu_isa gives it; AUTO where it names
// none.
int32_t asked_for() {
  const char* name = std::getenv("KVLATHE_ISA");
  if (!name || !*name) return KVLATHE_ISA_AUTO;
  for (int32_t isa = KVLATHE_ISA_PORTABLE; isa <= kMostIsa; ++isa) {
    if (std::strcmp(name, kNames[isa]) == 0) return isa;
  }
  throw Refusal(
      KVLATHE_BAD_ARGUMENT,
      std::string("KVLATHE_ISA is ") + name +
          " and must be portable, avx2, avxvnni, avx512, avx512vnni, neon, neondot or sve");
}

}  // namespace

const Kernels& kernels_for(int32_t isa) {
  if (isa == KVLATHE_ISA_AUTO) isa = asked_for();
  if (isa == KVLATHE_ISA_AUTO) {
    for (int32_t best :
         {KVLATHE_ISA_AVX512_VNNI, KVLATHE_ISA_AVX_VNNI, KVLATHE_ISA_AVX512, KVLATHE_ISA_AVX2,
          KVLATHE_ISA_SVE, KVLATHE_ISA_NEON_DOT, KVLATHE_ISA_NEON}) {
      const Kernels* found = supported(best);
      if (found && is_preferred(best)) return *found;
    }
    return kPortable;
  }
  if (const Kernels* found = supported(isa)) return *found;
  const bool known = isa > 0 && isa <= kMostIsa;
  throw Refusal(KVLATHE_UNSUPPORTED, "instruction set " +
                                         (known ? std::string(kNames[isa]) : std::to_string(isa)) +
                                         " is not available on this machine");
}

}  // namespace kvlathe

extern "C" const char* kvlathe_cpu_isa(kvlathe_status* status) {
  const char* name = nullptr;
  kvlathe::run(status, [&] { name = kvlathe::kernels_for(KVLATHE_ISA_AUTO).name; });
  return name;
}
