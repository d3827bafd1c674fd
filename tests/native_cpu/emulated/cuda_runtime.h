// What launches of kernels need of CUDA, on a CPU: a launch runs its blocks one
// after the other, on host memory. A block's threads are fibers, which take
// turns where they meet (cuda/warp.cuh).
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "cuda_fp16.h"

#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

enum cudaError_t { cudaSuccess = 0 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
struct cudaFuncAttributes {
  size_t sharedSizeBytes;
};
using cudaStream_t = void *;

// A small GPU: blocks of a call are several, and share pairs.
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor = 9,
  cudaDevAttrMultiProcessorCount = 3,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 228 << 10,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 227 << 10,
  cudaDevAttrReservedSharedMemoryPerBlock = 1 << 10
};
// Another device's attributes, and what its kernels take of static shared
// memory.
inline int (*other_device)(cudaDeviceAttr) = nullptr;
inline size_t static_shared = 0;
inline cudaError_t cudaGetDevice(int *id) { return *id = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr which,
                                          int) {
  return *value = other_device ? other_device(which) : int(which), cudaSuccess;
}

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline dim3 blockIdx, gridDim, blockDim;

inline const char *cudaGetErrorString(cudaError_t) { return "no error"; }
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
  return cudaSuccess;
}

// The threads of one block. A thread runs until it meets others, or ends.
class Fibers {
public:
  static Fibers &current() { return *instance(); }

  void run(unsigned count, const std::function<void()> &body) {
    instance() = this;
    body_ = &body;
    std::vector<Fiber> fibers(count);
    fibers_ = &fibers;
    static std::vector<char> stacks;
    stacks.resize(std::max(stacks.size(), count * kStack));
    for (unsigned i = 0; i < count; ++i) {
      ucontext_t context;
      getcontext(&context);
      context.uc_stack.ss_sp = stacks.data() + i * kStack;
      context.uc_stack.ss_size = kStack;
      context.uc_link = nullptr;
      makecontext(&context, &Fibers::enter, 0);
      fibers[i].first = context;
    }
    std::vector<unsigned> order(count);
    std::iota(order.begin(), order.end(), 0u);
    for (left_ = count; left_ > 0;) {
      // Threads that do not meet may run in any order: a meeting that is
      // missing shows.
      std::shuffle(order.begin(), order.end(), random_);
      bool moved = false;
      for (const unsigned i : order) {
        if (fibers[i].done || fibers[i].waits)
          continue;
        moved = true;
        resume(i);
      }
      if (!moved)
        fail("threads wait for threads that have ended");
    }
  }

  // Waits for `threads` threads from the first one of this thread's group on.
  // The last one runs `together` for all.
  template <class Together> void meet(unsigned threads, Together together) {
    const unsigned first = threadIdx.x / threads * threads;
    std::vector<Fiber> &fibers = *fibers_;
    fibers[threadIdx.x].waits = true;
    const unsigned end =
        std::min<unsigned>(first + threads, unsigned(fibers.size()));
    for (unsigned i = first; i < end; ++i) {
      if (!fibers[i].waits && !fibers[i].done)
        return pause();
    }
    together();
    for (unsigned i = first; i < end; ++i)
      fibers[i].waits = false;
  }
  // Lets the other threads run first: this one waits for what they write.
  void pass() {
    if (++passes_ > kMostPasses)
      fail("threads wait for what none writes");
    pause();
  }
  unsigned threads() const { return unsigned(fibers_->size()); }

private:
  static constexpr size_t kStack = 64 << 10, kMostPasses = 1 << 27;
  struct Fiber {
    ucontext_t first;
    jmp_buf at;
    bool started = false, waits = false, done = false;
  };

  static Fibers *&instance() {
    static Fibers *one = nullptr;
    return one;
  }
  [[noreturn]] static void fail(const char *why) {
    std::fprintf(stderr, "%s\n", why);
    std::abort();
  }
  static void enter() {
    Fibers &own = current();
    (*own.body_)();
    (*own.fibers_)[threadIdx.x].done = true;
    --own.left_;
    _longjmp(own.scheduler_, 1);
  }
  void resume(unsigned i) {
    Fiber &fiber = (*fibers_)[i];
    threadIdx.x = i;
    if (_setjmp(scheduler_))
      return;
    if (fiber.started)
      _longjmp(fiber.at, 1);
    fiber.started = true;
    setcontext(&fiber.first);
  }
  void pause() {
    if (!_setjmp((*fibers_)[threadIdx.x].at))
      _longjmp(scheduler_, 1);
  }

  const std::function<void()> *body_ = nullptr;
  std::vector<Fiber> *fibers_ = nullptr;
  jmp_buf scheduler_;
  unsigned left_ = 0;
  size_t passes_ = 0;
  static inline std::minstd_rand random_{1};
};

#ifdef KVLATHE_FIBERS

// What a warp's threads do together. A thread's `all` is written before they
// meet, and its `other` when all have.
template <class T, class Find> T exchanged(T x, Find find) {
  static T all[1024], other[1024];
  const unsigned own = threadIdx.x, first = own / 32 * 32;
  static int from[1024];
  all[own] = x, from[own] = find(int(own % 32));
  Fibers::current().meet(32, [&] {
    for (unsigned i = first; i < first + 32; ++i)
      other[i] = all[first + unsigned(from[i])];
  });
  return other[own];
}
template <class T> T __shfl_sync(unsigned, T x, int lane, int width = 32) {
  return exchanged(
      x, [=](int own) { return own / width * width + lane % width; });
}
template <class T> T __shfl_up_sync(unsigned, T x, int step, int width = 32) {
  return exchanged(
      x, [=](int own) { return own % width < step ? own : own - step; });
}
template <class T> T __shfl_xor_sync(unsigned, T x, int mask) {
  return exchanged(x, [=](int own) { return own ^ mask; });
}
inline unsigned __ballot_sync(unsigned, bool x) {
  static bool all[1024];
  static unsigned votes[32];
  const unsigned own = threadIdx.x, warp = own / 32;
  all[own] = x;
  Fibers::current().meet(32, [&] {
    votes[warp] = 0;
    for (unsigned i = 0; i < 32; ++i)
      votes[warp] |= unsigned(all[warp * 32 + i]) << i;
  });
  return votes[warp];
}
inline bool __any_sync(unsigned mask, bool x) {
  return __ballot_sync(mask, x) != 0;
}
inline bool __all_sync(unsigned mask, bool x) {
  return __ballot_sync(mask, x) == ~0u;
}
inline void __syncwarp() { Fibers::current().meet(32, [] {}); }
inline int atomicAdd(int *at, int x) { return *at += x, *at - x; }

#endif

inline void __syncthreads() {
  Fibers::current().meet(Fibers::current().threads(), [] {});
}

// Where a block's dynamic shared memory begins: static memory lies in front of
// it, so no address is 0.
constexpr uint32_t kDynamic = 1024;

template <class Params>
cudaError_t cudaLaunchKernel(void (*kernel)(Params), dim3 grid, dim3 block,
                             void **arguments, size_t shared, cudaStream_t) {
  if (kDynamic + shared > sizeof(memory))
    std::abort();
  gridDim = grid, blockDim = block;
  const auto &params = *static_cast<const Params *>(arguments[0]);
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = dim3(x, y, z);
        std::memset(memory, 255, kDynamic + shared);
        Fibers().run(block.x, [&] { kernel(params); });
      }
    }
  }
  return cudaSuccess;
}

// A kernel whose type is not known where it is launched.
struct Launcher {
  std::function<void(void **, dim3, dim3, size_t)> run;
};
template <auto kKernel> const void *launcher_of() {
  static const Launcher one{
      [](void **arguments, dim3 grid, dim3 block, size_t shared) {
        cudaLaunchKernel(kKernel, grid, block, arguments, shared, nullptr);
      }};
  return &one;
}
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute *attrs;
  unsigned numAttrs;
};
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes,
                                         const void *) {
  return attributes->sharedSizeBytes = static_shared, cudaSuccess;
}
template <class Params>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config,
                               void (*kernel)(Params), Params params) {
  void *arguments[] = {&params};
  return cudaLaunchKernel(kernel, config->gridDim, config->blockDim, arguments,
                          config->dynamicSmemBytes, config->stream);
}
inline cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config,
                                       const void *kernel, void **arguments) {
  static_cast<const Launcher *>(kernel)->run(
      arguments, config->gridDim, config->blockDim, config->dynamicSmemBytes);
  return cudaSuccess;
}
