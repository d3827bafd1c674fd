// Running work items on several threads, and memory that threads keep between calls.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>

#include "kvlathe/cpu.h"

namespace kvlathe {

// Runs item(0) .. item(count - 1), in about this order, each on whichever thread is free. Rethrows
// what an item throws.
void run_items(const kvlathe_parallel& parallel, int threads, int64_t count,
               const std::function<void(int64_t)>& item);

// Cache-line aligned floats that only grow. One for each thread and purpose: no locks, nothing
// allocated in a steady state.
class Buffer {
 public:
  float* floats(size_t count);

 private:
  struct Free {
    void operator()(float* memory) const;
  };
  std::unique_ptr<float, Free> memory_;
  size_t size_ = 0;
};

}  // namespace kvlathe
