// Runs under qemu-aarch64: calls of libkvlathe.so, one a line of standard input, on memory that is a
// file which tests/support/aarch64.py writes and reads. Addresses are of this process; each call is
// answered by what it returned.
#include <fcntl.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kvlathe/cpu.h"

namespace {

// A layer lives for one call: the laws make another for each.
int32_t attend(const int32_t* table, int64_t count, const kvlathe_attend_args* args,
               kvlathe_status* status) {
  kvlathe_layer* layer = nullptr;
  if (const int32_t refused = kvlathe_layer_create(table, count, &layer, status)) return refused;
  const int32_t found = kvlathe_cpu_attend(layer, args, status);
  kvlathe_layer_destroy(layer);
  return found;
}

}  // namespace

// FILE BYTES ADDRESS
int main(int, char** given) {
  const int file = open(given[1], O_RDWR);
  void* const wanted = reinterpret_cast<void*>(std::strtoull(given[3], nullptr, 0));
  const size_t size = std::strtoull(given[2], nullptr, 0);
  if (mmap(wanted, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) != wanted)
    return 1;
  kvlathe_status unused;
  std::printf("%s\n", kvlathe_cpu_isa(&unused));
  std::fflush(stdout);
  char name[16];
  unsigned long long a, b, c, d;
  while (std::scanf("%15s %llu %llu %llu %llu", name, &a, &b, &c, &d) == 5) {
    auto* const status = reinterpret_cast<kvlathe_status*>(a);
    const bool seals = !std::strcmp(name, "seal");
    const int32_t found =
        seals ? kvlathe_cpu_seal(reinterpret_cast<const kvlathe_cpu_seal_args*>(b), status)
              : attend(reinterpret_cast<const int32_t*>(c), int64_t(d),
                       reinterpret_cast<const kvlathe_attend_args*>(b), status);
    std::printf("%d\n", found);
    std::fflush(stdout);
  }
}
