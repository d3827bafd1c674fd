// The PTX instructions that the kernels use, one function each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace kvlathe::cuda {

__device__ inline uint32_t shared_address(const void* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}

// Keeps a value in its register. Without it the compiler computes cheap values anew at each use.
__device__ inline int pinned(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The same for a value that all lanes share. The assembler, too, cannot compute it anew then.
__device__ inline int kept(int value) { return __shfl_sync(~0u, value, 0); }

// Copies 16 bytes to shared memory asynchronously. With `valid` false it writes zeros and reads
// nothing.
__device__ inline void copy16(uint32_t to, const void* from, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0));
#else
  uint4 value = valid ? *static_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w));
#endif
}

// Copies a number likewise, through the nearest cache: four bytes cannot pass it.
__device__ inline void copy4(int32_t* to, const int32_t* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
#else
  *to = __ldg(from);
#endif
}

__device__ inline void close_copy_group() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int kLeft>
__device__ inline void wait_copy_groups() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}

// Prepares a barrier in shared memory for bulk copies. Its phase ends when the announced bytes have
// landed.
__device__ inline void init_barrier(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
#endif
}

__device__ inline void publish_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ inline void wait_barrier(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, "
        "p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
#endif
}

// Orders what this thread did by ordinary instructions before bulk copies, and products, that
// follow.
__device__ inline void fence_for_bulk_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Says how many bytes the bulk copies of a barrier's next phase bring. One lane does it, before the
// copies or after them.
__device__ inline void announce_copies(uint32_t barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

// Copies `bytes` (a multiple of 16) to shared memory by the copy engine, which from 9.0 on takes
// one copy from each lane that calls this. `barrier` tells the end.
__device__ inline void copy_bulk(uint32_t to, const char* from, int bytes, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
#endif
}

// Reads and writes of shared memory by address. They are no assembly, so the compiler may reorder
// them like any others.
template <class T>
__device__ inline T& shared_at(uint32_t address) {
  return *static_cast<T*>(__cvta_shared_to_generic(address));
}
__device__ inline uint32_t load_word(uint32_t from) { return shared_at<const uint32_t>(from); }
__device__ inline uint16_t load_half(uint32_t from) { return shared_at<const uint16_t>(from); }
__device__ inline uint4 load_words(uint32_t from) { return shared_at<const uint4>(from); }
template <int kWords>  // 1, 2 or 4, aligned to their size
__device__ void load_vector(uint32_t (&x)[kWords], uint32_t from) {
  struct alignas(4 * kWords) Vector {
    uint32_t x[kWords];
  };
  const Vector vector = shared_at<const Vector>(from);
#pragma unroll
  for (int i = 0; i < kWords; ++i) x[i] = vector.x[i];
}
__device__ inline void store_word(uint32_t to, uint32_t x) { shared_at<uint32_t>(to) = x; }

// Loads four 8 x 8 matrices of 16-bit elements. Lane t gives the address of row t % 8 of matrix
// t / 8.
__device__ inline void load_matrices(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row));
}

__device__ inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row));
}

// Transposes an 8 x 8 matrix of 16-bit elements that a warp holds.
__device__ inline uint32_t transposed(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Four of the eight bytes of x and y (PTX ISA, prmt). Bodies of templates may name it where the host
// is compiled, too.
__device__ inline uint32_t picked_bytes(uint32_t x, uint32_t y, uint32_t which) {
  return __byte_perm(x, y, which);
}

// x & mask | bits, in one instruction.
__device__ inline uint32_t with_bits(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
  return y;
}

// Of two halves each, rounded once.
__device__ inline uint32_t sub_halves(uint32_t x, uint32_t y) {
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(x) : "r"(x), "r"(y));
  return x;
}
__device__ inline uint32_t fma_halves(uint32_t x, uint32_t y, uint32_t z) {
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(x), "r"(y), "r"(z));
  return x;
}

// Read and write what other blocks write and read at the same time.
__device__ inline float2 load_relaxed(const float2* at) {
  float2 x;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(at));
  return x;
}
__device__ inline float4 load_relaxed(const float4* at) {
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(at));
  return x;
}
__device__ inline void store_relaxed(float* at, float x) {
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(at), "f"(x) : "memory");
}
__device__ inline void store_relaxed(float4* at, float4 x) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x.x), "f"(x.y),
               "f"(x.z), "f"(x.w));
}
__device__ inline void store_relaxed(float2* at, float2 x) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(at), "f"(x.x), "f"(x.y)
               : "memory");
}

// Where this kernel was launched to overlap the one before it on the stream: waits for that one,
// then lets the next one start.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// 16 bytes that are read once, and not kept in the L1 cache. It stays before
// wait_for_previous_kernel, where it is written there.
__device__ inline uint4 load_once(const void* at) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(at));
  return x;
}

__device__ inline void prefetch(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

struct Half {
  __device__ static uint32_t pack(float low, float high) {
    __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
  }
  __device__ static uint16_t round(float x) { return __half_as_ushort(__float2half_rn(x)); }
  __device__ static float widen(uint16_t x) { return __half2float(__ushort_as_half(x)); }
  // d[16 x 8] += a[16 x 16] b[16 x 8]
  __device__ static void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
  }
};

struct Bfloat {
  __device__ static uint32_t pack(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
  }
  __device__ static uint16_t round(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
  __device__ static float widen(uint16_t x) { return __uint_as_float(uint32_t{x} << 16); }
  __device__ static void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800  // the launcher refuses bfloat16 on older devices
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
  }
};

// d[16 x 8] += a[16 x 16] b[16 x 8] on bytes, a unsigned and b signed. Lane t gives rows t / 4 (a0)
// and t / 4 + 8 (a1).
__device__ inline void multiply_signed(int32_t (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
#else
  asm("mma.sync.aligned.m8n8k16.row.col.s32.u8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
      : "+r"(d[0]), "+r"(d[1])
      : "r"(a0), "r"(b));
  asm("mma.sync.aligned.m8n8k16.row.col.s32.u8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
      : "+r"(d[2]), "+r"(d[3])
      : "r"(a1), "r"(b));
#endif
}

// The same with 32 codes of each row. a2, a3 and b1 are the second half of the inner dimension.
__device__ inline void multiply_signed(int32_t (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                       uint32_t a3, uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  multiply_signed(d, a0, a1, b0);
  multiply_signed(d, a2, a3, b1);
#endif
}

// d[16 x 8] += a[16 x 32] b[32 x 8] on unsigned bytes. a2, a3 and b1 are the second half of the
// inner dimension.
__device__ inline void multiply_unsigned(int32_t (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  const auto rows = [](int32_t& x, int32_t& y, uint32_t a, uint32_t b) {
    asm("mma.sync.aligned.m8n8k16.row.col.s32.u8.u8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
        : "+r"(x), "+r"(y)
        : "r"(a), "r"(b));
  };
  rows(d[0], d[1], a0, b0), rows(d[2], d[3], a1, b0);
  rows(d[0], d[1], a2, b1), rows(d[2], d[3], a3, b1);
#endif
}

}  // namespace kvlathe::cuda
