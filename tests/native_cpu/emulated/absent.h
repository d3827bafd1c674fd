// Kernels that a library for a CPU lacks, where its host may ask for them.
#pragma once

namespace kvlathe::cuda {

const void* decode_kernel_16(bool, bool, int) { return nullptr; }
const void* decode_kernel_any(bool, bool, int) { return nullptr; }
const void* decode_kernel_general(bool, bool) { return nullptr; }
const void* decode_kernel_scored(bool) { return nullptr; }
const void* decode_kernel_float8(bool) { return nullptr; }
#ifndef KVLATHE_HAS_BYTES
const void* decode_kernel_bytes(bool, bool) { return nullptr; }
const void* decode_kernel_key_pages(bool) { return nullptr; }
#endif
const void* decode_kernel_wide(bool) { return nullptr; }
const void* bundled_kernel_16(bool) { return nullptr; }
const void* bundled_kernel_codes(bool, bool, int) { return nullptr; }
const void* bundled_kernel_general(bool) { return nullptr; }
const void* bundled_kernel_float8(bool) { return nullptr; }
const void* bundled_kernel_wide(bool) { return nullptr; }
const void* bundled_kernel_widest(bool) { return nullptr; }
const void* plain_kernel_256(bool) { return nullptr; }
const void* plain_kernel_widest(bool) { return nullptr; }
const void* team_kernel(bool) { return nullptr; }

bool prompt_kernel_here() { return false; }
PromptLaunch prompt_launch_of(const kvlathe_attend_decode_args&) { return {}; }
void copy_pages(const PromptLaunch&, void*) {}
void attend_prompts(const PromptLaunch&, void*) {}

}  // namespace kvlathe::cuda
