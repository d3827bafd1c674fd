// Helpers of every kernel's host: refusals, errors of the device, shared memory.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/formats.h"
#include "common/limits.h"
#include "common/refusal.h"

namespace kvlathe::cuda {

inline void check_cuda(cudaError_t error, const char* what) {
  require(error == cudaSuccess, KVLATHE_DEVICE_ERROR,
          std::string(what) + ": " + cudaGetErrorString(error));
}

// Of the current device.
inline int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  check_cuda(cudaGetDevice(&device), "no CUDA device");
  check_cuda(cudaDeviceGetAttribute(&value, which, device), "reading a device attribute");
  return value;
}

inline void check_element(int32_t element) {
  require(element == KVLATHE_F16 || element == KVLATHE_BF16, KVLATHE_UNSUPPORTED,
          "the CUDA kernels compute with F16 and BF16 elements only");
}

// Whether the kernels of codes (decode_codes.cu, prompt_codes.cuh) read a part. Those of general
// calls read the others.
inline bool known_codes(const kvlathe_part& part) {
  return part.bits_k == part.bits_v && !in_blocks(part.bits_k) &&
         part.axis_k == KVLATHE_AXIS_RANK && part.axis_v == KVLATHE_AXIS_TOKEN &&
         is_power_of_two(part.group_v) && part.group_v >= kLeastCodedGroup;
}

// Whether a call, or a list of pages, has floats of 8 bits: kernels of their own read and write them.
inline bool any_float8(const kvlathe_part& part) {
  return format_k(part).float8() || format_v(part).float8();
}
inline bool any_float8(const kvlathe_attend_decode_args& a) {
  return std::any_of(a.parts, a.parts + a.part_count,
                     [](const kvlathe_part& part) { return any_float8(part); });
}

// Refuses quantized parts that the attention kernels do not read.
inline void check_codes(const kvlathe_attend_decode_args& a) {
  require(is_power_of_two(a.page_tokens) && a.page_tokens >= kLeastCodedPage &&
              a.page_tokens <= kMaxPage,
          KVLATHE_UNSUPPORTED,
          "quantized pages of " + std::to_string(a.page_tokens) +
              " tokens: the CUDA kernels need a power of two, " + std::to_string(kLeastCodedPage) +
              " to " + std::to_string(kMaxPage));
}

// Refuses a block that needs more shared memory than the device has. what: for which it has no room.
inline void check_shared(int bytes, const std::string& what) {
  if (bytes <= (48 << 10)) return;
  const int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  require(bytes <= most, KVLATHE_UNSUPPORTED,
          "a block has " + std::to_string(most) + " bytes of shared memory on this device, and " +
              what + " need " + std::to_string(bytes));
}

// Asks for shared memory. A kernel gets up to 48 KB without asking.
template <class Kernel>
void reserve_shared(Kernel kernel, int bytes) {
  if (bytes > (48 << 10)) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "reserving shared memory");
  }
}

inline int log2_of(int x) {
  int bits = 0;
  while (x >> (bits + 1)) ++bits;
  return bits;
}

}  // namespace kvlathe::cuda
