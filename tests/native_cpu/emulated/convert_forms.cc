// Runs convert_form of the CUDA kernels on a CPU, lane by lane. It needs no barrier within it.
// Input: bits, axis, group, rank, page, valid, then the bytes of one slab, codes and then metadata.
// Output: the page's rows as halves, 16 tokens at a time, in places of a 16-bit tile.
#include <iostream>
#include <vector>

#include "cuda/forms.cuh"
// After the emulated CUDA.
#include "cuda/decode/ring.cuh"

int main() {
  using namespace kvlathe;
  using namespace kvlathe::cuda;
  int bits, axis, group, rank, page, valid, count;
  while (std::cin >> bits >> axis >> group >> rank >> page >> valid >> count) {
    for (int i = 0, byte; i < count; ++i) {
      std::cin >> byte;
      memory[i] = uint8_t(byte);
    }
    const Format format{bits, axis, group};
    const FormSide side = side_of(format);
    const int codes = int(slab_bytes(rank, page, bits));
    const FormRows rows{0, uint32_t(codes), side, rank, groups_of(format, rank, page), page};
    const uint32_t to = 1 << 19;
    const Swizzle swizzle(rank);
    if (codes + side.meta_size(rows.groups, rank, page) != count) return 1;
    for (int token = 0; token < page; token += 16) {
      for (threadIdx.x = 0; threadIdx.x < 32; ++threadIdx.x)
        convert_form<Half, true>(rows, token, side.by_channel() ? token / group : 0, valid - token,
                           RowsPlace{to, 2 * rank, 16, swizzle.shift, swizzle.mask});
      for (int row = 0; row < 16; ++row) {
        for (int c = 0; c < rank; ++c) {
          const uint32_t piece = to + row * 2 * rank + (c / 8 ^ swizzle(row)) * 16;
          std::cout << Half::widen(load_half(piece + c % 8 * 2)) << ' ';
        }
      }
    }
    std::cout << '\n';
  }
}
