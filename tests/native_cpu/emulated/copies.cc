// Where the copies of sealed pages go (prompt_copies.cu), as a library for a
// CPU. The pages themselves are copied on Hopper alone.
#define KVLATHE_FIBERS
#include "cuda_runtime.h"

inline void atomicMax(int *at, int x) { *at = *at < x ? x : *at; }

#include "cuda/prefill/prompt_copies.cu"

// Of a call with one lane whose parts are all of 4 bit: fills the room of
// `prompts`. listed: sequences with tiles. Returns how many pages there is room
// for.
extern "C" int32_t place(const kvlathe_prompts *prompts, int32_t parts,
                         int32_t page_tokens, const int32_t *listed,
                         int32_t count) {
  using namespace kvlathe::cuda;
  PromptLaunch launch{};
  ScoredPrompts &p = launch.params;
  p.batch = prompts->batch, p.page_tokens = page_tokens, p.parts = parts;
  p.cu_seqlens_q = prompts->cu_seqlens_q;
  p.heads = 1, p.head[0].steps_k = p.head[0].steps_v = 2;
  std::vector<kvlathe_part> coded(parts);
  for (int i = 0; i < parts; ++i) {
    const kvlathe_prompt_part &part = prompts->parts[i];
    coded[i].bits_k = coded[i].bits_v = 4;
    p.part[i].page_table = part.page_table,
    p.part[i].table_stride = part.page_table_stride;
    p.part[i].lengths = part.lengths,
    p.part[i].lengths_stride = part.lengths_stride;
  }
  std::vector<int32_t> list(kListHeader);
  list[kTiles] = count;
  for (int i = 0; i < count; ++i)
    list.push_back(listed[i]), list.push_back(0);
  p.list = list.data();
  kvlathe_attend_decode_args args{};
  args.batch = 1, args.part_count = parts, args.parts = coded.data(),
  args.prompts = prompts;
  launch.copies = copy_launch_of(args, p, false);
  launch.grid = 1;
  copy_pages(launch, nullptr);
  return launch.copies.slots;
}
