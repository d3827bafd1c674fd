#include "cpu/work.h"

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace kvlathe {
namespace {

// Threads take the next item when they are done with one: uneven items even out.
struct Queue {
  const std::function<void(int64_t)>& item;
  const int64_t count;
  std::atomic<int64_t> next{0};
  std::mutex failing;
  std::exception_ptr failure;

  void drain() noexcept {
    try {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) item(i);
    } catch (...) {
      next.store(count);
      const std::lock_guard<std::mutex> lock(failing);
      failure = std::current_exception();
    }
  }
};

}  // namespace

void run_items(const kvlathe_parallel& parallel, int threads, int64_t count,
               const std::function<void(int64_t)>& item) {
  constexpr int64_t kMostThreads = 256;
  Queue queue{item, count, {}, {}, {}};
  if (count <= 1) {
    queue.drain();
  } else if (parallel.run) {
    const auto body = [](void* state, size_t) { static_cast<Queue*>(state)->drain(); };
    parallel.run(parallel.context, body, size_t(std::min(count, kMostThreads)), &queue);
  } else {
    std::vector<std::thread> started;
    for (int64_t i = 1; i < std::min<int64_t>({threads, count, kMostThreads}); ++i)
      started.emplace_back([&] { queue.drain(); });
    queue.drain();
    for (std::thread& thread : started) thread.join();
  }
  if (queue.failure) std::rethrow_exception(queue.failure);
}

float* Buffer::floats(size_t count) {
  if (count > size_) {
    const size_t bytes = (count * sizeof(float) + 63) / 64 * 64;
    memory_.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
    size_ = memory_ ? count : 0;
    if (!memory_) throw std::bad_alloc();
  }
  return memory_.get();
}

void Buffer::Free::operator()(float* memory) const { std::free(memory); }

}  // namespace kvlathe
