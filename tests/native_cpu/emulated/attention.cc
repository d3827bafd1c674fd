// The kernels of decode attention, those that prepare a step, and the node that calls both, as a
// library for a CPU: pointers of their calls are host memory. Prompt chunks are listed, and not
// attended.
#define KVLATHE_FIBERS
#include "cuda/cache/spread.cu"
#include "cuda/decode/attend_decode.cu"
#include "cuda/decode/attend_bundle.cuh"
#include "cuda/decode/attend_bytes.cuh"
#include "cuda/decode/attend_team.cuh"
#include "cuda/decode/plan.cu"

#include "host_half.h"

namespace kvlathe::cuda {

template <>
struct Dequantizer<HostHalf> : Dequantizer<Half> {
  using Dequantizer<Half>::Dequantizer;
};
template <>
struct CodeNumbers<HostHalf> : CodeNumbers<Half> {};

namespace {

template <class P>
const void* launcher() {
  return launcher_of<attend_general<HostHalf, P>>();
}
// At the widest ranks: they take all others.
template <class P, int kBits>
const void* bundled() {
  return launcher_of<attend_bundles<HostHalf, P, 8, kBits>>();
}
const void* unknown() {
  static const Launcher one{[](void**, dim3, dim3, size_t) { std::abort(); }};
  return &one;
}

}  // namespace

const void* decode_kernel_general(bool, bool named) {
  return named ? launcher<GeneralParams<KVLATHE_MAX_PARTS>>()
               : launcher<GeneralParams<KVLATHE_MAX_SLOTS>>();
}
const void* decode_kernel_scored(bool) { return launcher<ScoredParams>(); }
const void* decode_kernel_float8(bool) { return launcher<Float8Params>(); }
const void* decode_kernel_bytes(bool, bool floats) {
  return floats ? launcher_of<attend_bytes<HostHalf, ByteParams<Coding::kFloat8>>>()
                : launcher_of<attend_bytes<HostHalf, ByteParams<Coding::kAffine>>>();
}
const void* decode_kernel_key_pages(bool) {
  return launcher_of<attend_bytes<HostHalf, KeyPageParams>>();
}
const void* decode_kernel_wide(bool) { return launcher<Wide256>(); }
const void* decode_kernel_16(bool, bool, int) { return unknown(); }
const void* decode_kernel_codes(bool, bool, int, int) { return unknown(); }
const void* decode_kernel_alone(bool, bool, int, int) { return unknown(); }
const void* decode_kernel_any(bool, bool, int) { return unknown(); }
const void* bundled_kernel_16(bool) { return bundled<Bundled16, 16>(); }
const void* bundled_kernel_codes(bool, bool, int bits) {
  return bits == 8   ? bundled<BundledCodes, 8>()
         : bits == 4 ? bundled<BundledCodes, 4>()
                     : bundled<BundledCodes, 2>();
}
const void* bundled_kernel_general(bool) { return launcher<BundledGeneral>(); }
const void* bundled_kernel_float8(bool) { return launcher<BundledFloat8>(); }
const void* bundled_kernel_wide(bool) { return launcher<BundledWide256>(); }
const void* bundled_kernel_widest(bool) { return launcher<BundledWidest>(); }
const void* team_kernel(bool) { return launcher_of<attend_team<HostHalf, BundledTeam>>(); }
const void* plain_kernel_256(bool) { return launcher_of<attend_wide<HostHalf, BundledPlain256>>(); }
const void* plain_kernel_widest(bool) {
  return launcher_of<attend_wide<HostHalf, BundledPlainWidest>>();
}

bool prompt_kernel_here() { return true; }
PromptLaunch prompt_launch_of(const kvlathe_attend_decode_args&) { return {}; }
void copy_pages(const PromptLaunch&, void*) {}
void attend_prompts(const PromptLaunch&, void*) {}

}  // namespace kvlathe::cuda

#include "node.h"
