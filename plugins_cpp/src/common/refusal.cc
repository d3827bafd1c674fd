#include "common/refusal.h"

#include <cstdio>

namespace kvlathe {

void check_version(uint32_t version) {
  if (version == KVLATHE_ABI_VERSION) return;
  throw Refusal(KVLATHE_BAD_VERSION, "the caller was built for kvlathe ABI " +
                                         std::to_string(version) + " and this library has " +
                                         std::to_string(KVLATHE_ABI_VERSION) +
                                         ": rebuild one of them");
}

void check_aligned(const void* pointer, uintptr_t bytes, const char* what) {
  if (reinterpret_cast<uintptr_t>(pointer) % bytes == 0) return;
  throw Refusal(KVLATHE_MISALIGNED,
                std::string(what) + " is not aligned to " + std::to_string(bytes) + " bytes");
}

void write_status(kvlathe_status* status, kvlathe_code code, const char* message) noexcept {
  if (!status) return;
  status->code = code;
  std::snprintf(status->message, sizeof status->message, "%s", message);
}

}  // namespace kvlathe

extern "C" uint32_t kvlathe_abi_version(void) { return KVLATHE_ABI_VERSION; }
