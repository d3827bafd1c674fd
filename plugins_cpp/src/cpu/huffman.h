// Canonical Huffman codes of bytes, of kCodeBits bits at most.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"

namespace kvlathe {

// The length of each symbol's code; 0 for one that does not occur. A symbol that is alone has length
// 1 here, and a code of no bits.
struct CodeLengths {
  uint8_t of[256];
};

CodeLengths code_lengths(const uint32_t* histogram);

// code << 8 | bits of each symbol [256]. Codes ascend with their length, then with their symbol.
void write_codes(const CodeLengths& lengths, uint32_t* codes);

// symbol << 8 | bits, for every value of the next kCodeBits bits. False where lengths are not those
// of a code.
bool write_entries(const CodeLengths& lengths, uint16_t* entries);

}  // namespace kvlathe
