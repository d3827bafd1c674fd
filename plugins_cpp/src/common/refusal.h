// Refusals: one exception inside the library, one status at the C boundary.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "kvlathe/abi.h"

namespace kvlathe {

// Thrown inside the library only; run() turns it into a status at the C boundary.
struct Refusal : std::exception {
  Refusal(kvlathe_code code, std::string message) : code(code), message(std::move(message)) {}
  const char* what() const noexcept override { return message.c_str(); }
  kvlathe_code code;
  std::string message;
};

// Throws where `ok` is false. `message` is a literal, or a string that was put together. A literal
// costs nothing while all is well: a decode step checks dozens of facts for every layer.
template <class Text>
inline void require(bool ok, kvlathe_code code, const Text& message) {
  if (!ok) throw Refusal(code, message);
}

// Refuses a caller that was built for another version of the structs.
void check_version(uint32_t version);

// Refuses an address that is no multiple of `bytes`. `what` begins the message: "the pool".
void check_aligned(const void* pointer, uintptr_t bytes, const char* what);

void write_status(kvlathe_status* status, kvlathe_code code, const char* message) noexcept;

// Runs `body` and reports what it throws: no exception crosses the C boundary.
template <class Body>
int32_t run(kvlathe_status* status, Body body) noexcept {
  try {
    body();
    write_status(status, KVLATHE_OK, "");
    return KVLATHE_OK;
  } catch (const Refusal& refusal) {
    write_status(status, refusal.code, refusal.what());
    return refusal.code;
  } catch (const std::exception& error) {
    write_status(status, KVLATHE_BAD_ARGUMENT, error.what());
    return KVLATHE_BAD_ARGUMENT;
  }
}

}  // namespace kvlathe
