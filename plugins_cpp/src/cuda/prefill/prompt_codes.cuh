// Sealed pages for attend_prompt. On the way into a stage, codes of 8, 4 or 2 bits become the same
// 16-bit blocks that 16-bit pages give. Those who attend do not know the difference.
//
// Every tile converts the codes of its lane again. The fetching warpgroup does it, which waits
// otherwise, and no memory is needed. Where the caller gives memory, prompt_copies.cu converts them
// once a layer instead. docs/performance.md says what either costs.
//
// A piece is 64 tokens of a page: K [64][rank] with its metadata [64][groups], V [rank][64] with
// the page's metadata. It comes by asynchronous copies into a buffer of codes. A thread then takes
// eight codes at a time, which become 16 bytes of a block: eight channels of a token of K, or
// eight tokens of a channel of V. The latter are transposed while they are stored.
#pragma once

#include "cuda/forms.cuh"
#include "cuda/prefill/prompt_stages.cuh"

namespace kvlathe::cuda {

#ifdef KVLATHE_WGMMA

template <class E>
__device__ __forceinline__ uint4 dequantized(const uint32_t (&codes)[2], const Dequantizer<E>& to) {
  return {to.template take<0>(codes[0]), to.template take<1>(codes[0]),
          to.template take<0>(codes[1]), to.template take<1>(codes[1])};
}

// Stores four 8 x 8 matrices, transposed; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void store_transposed(uint32_t row, const uint4& x) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

// The codes of one lane in one part.
template <int kBits>
struct CodesLane {
  const PromptParams& p;
  const PromptHead& head;
  int part;
  const PromptPart& of;

  // Where things lie in a buffer of codes.
  __device__ int k_meta() const { return 128 * kBits * head.steps_k; }
  __device__ int v() const { return k_meta() + 256 * head.groups_k[part]; }
  __device__ int v_meta() const { return v() + 128 * kBits * head.steps_v; }
  // Bytes of a channel's V metadata.
  __device__ int v_meta_stride() const { return p.page_tokens >> of.group_shift << 2; }

  // Asks for 64 tokens of a page, from `token` on.
  __device__ void copy(uint32_t to, int32_t page, int token) const {
    const char* from = p.pool + page * of.page_stride + head.k[part];
    const auto copy_all = [](uint32_t to, const char* from, int bytes) {
#pragma unroll 1
      for (int i = threadIdx.x * 16; i < bytes; i += 128 * 16) copy16(to + i, from + i, true);
    };
    copy_all(to, from + token * (2 * kBits * head.steps_k), k_meta());
    copy_all(to + k_meta(), from + 16 * head.k_meta[part] + token * (4 * head.groups_k[part]),
             256 * head.groups_k[part]);
    copy_all(to + v_meta(), from + 16 * head.v_meta[part], 16 * head.steps_v * v_meta_stride());
    const char* values = p.pool + page * of.page_stride + head.v[part] + token * kBits / 8;
#pragma unroll 1
    for (int i = threadIdx.x * 16; i < 128 * kBits * head.steps_v; i += 128 * 16) {
      const int channel = i / (8 * kBits);
      copy16(to + v() + i, values + channel * (p.page_tokens * kBits / 8) + i % (8 * kBits), true);
    }
  }

  // Converts K of the piece in the buffer at `from` to the K of a stage at `to`. Lane t of a warp
  // takes half t / 8 % 2 of 16 channels of token t % 8 + t / 16 * 8 among 16.
  template <class E>
  __device__ void convert_keys(uint32_t from, uint32_t to) const {
    const int token = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 16 * 8 + threadIdx.x % 8,
              half = threadIdx.x / 8 % 2, width = block_steps(head.steps_k);
    const int groups = head.groups_k[part], least = head.least_k[part],
              longer = head.steps_k - groups * least;
    uint32_t meta = from + k_meta() + token * groups * 4;
    from += token * (2 * kBits * head.steps_k) + half * kBits;
    int piece = half;
#pragma unroll 1
    for (int group = 0; group < groups; ++group, meta += 4) {
      const Dequantizer<E> dequantizer(load_word(meta));
#pragma unroll 2
      for (int i = least + (group < longer); i > 0; --i, from += 2 * kBits, piece += 2) {
        uint32_t codes[2];
        load_codes<kBits>(codes, from);
        shared_at<uint4>(to + piece_at(width, token, piece)) = dequantized(codes, dequantizer);
      }
    }
  }

  // Converts V likewise. Lane t takes eight tokens from t % 4 * 8 on of channel t / 4, among 32
  // tokens of 8 channels. These are four matrices. It gives two tokens to each, in an order that
  // fills no bank twice. Tokens from `valid` on become zeros.
  template <class E>
  __device__ void convert_values(uint32_t from, uint32_t to, int token, int valid) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, channel = warp / 2 * 8 + lane / 4,
              own = warp % 2 * 32 + lane % 4 * 8, width = block_steps(head.steps_v);
    const int stride = v_meta_stride(), row = lane % 8 / 2;
    const uint32_t turn = (0x3210 + lane % 4 * 0x2222) & 0x7777;
    uint32_t meta = from + v_meta() + channel * stride + ((token + own) >> of.group_shift << 2);
    from += v() + channel * (8 * kBits) + own * kBits / 8;
    const int place = warp % 2 * 32 + row * 8 + (lane / 8 + row) % 4 * 2 + lane % 2;
#pragma unroll 2
    for (int i = 0; i < head.steps_v; ++i, from += 128 * kBits, meta += 16 * stride) {
      const Dequantizer<E> dequantizer(own < valid ? load_word(meta) : 0);
      uint32_t codes[2], turned[2];
      load_codes<kBits>(codes, from);
      turned[0] = __byte_perm(codes[0], codes[1], turn),
      turned[1] = __byte_perm(codes[0], codes[1], turn ^ 0x4444);
      store_transposed(to + piece_at(width, place, 2 * i + warp / 2),
                       dequantized(turned, dequantizer));
    }
  }
};

#endif

}  // namespace kvlathe::cuda
