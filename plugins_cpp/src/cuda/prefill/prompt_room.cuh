// Where the stages of attend_prompt lie in shared memory, and when those who fetch may fill one. Tests
// also run this on a CPU (tests/native_cpu/emulated/stages.cc).
#pragma once

#include "cuda/prefill/prompts.h"

namespace kvlathe::cuda {

constexpr int kPromptStages = 8;  // in use at most

// The halves of a stage: keys are given back once their scores are there, values a step later.
enum StageHalf { kKeyHalf = 0, kValueHalf = 1 };

// A place among the barriers of the stages, and the parity of how often they have gone round.
struct Turn {
  int at = 0, parity = 0;
  __device__ void next() {
    if (++at == kPromptStages) at = 0, parity ^= 1;
  }
};

// Stages are as large as their lane needs, and lie one behind the other in shared memory. Those who
// fetch and those who attend both work out where, in units of kStageUnit bytes. The stages of a
// lane begin at multiples of their size. Where there is room for two, the second then never needs
// the place of the first, and those who attend may hold one until the next is there.
__device__ inline int stage_units(const PromptHead& head) { return head.steps_k + head.steps_v; }
__device__ inline int first_stage(int after, int units) {
  return (after + units - 1) / units * units;
}
__device__ inline int place_stage(int after, int units, int room) {
  return after + units <= room ? after : 0;
}

// The stages in use, oldest first. Where the oldest is given back, there is room for another.
struct Room {
  Turn stage, oldest;
  int used = 0;         // stages in use
  int after = 0;        // where the last one ends
  int next = 0;         // where the next one may begin
  uint64_t begins = 0;  // where stage i begins: byte i
  Turn given{-1};       // the newest stage that must have been given back
  int sizes = 0;        // ranks of the last one
  int alike = 0;        // stages in a row that have these

  // Takes room for a stage of `head` as stage.at, and says where it begins.
  __device__ int take(const PromptHead& head, int room) {
    const int units = stage_units(head), begin = place_stage(next, units, room);
    const int own = head.steps_k * 256 + head.steps_v;
    if (own != sizes) sizes = own, alike = 0;
    while (used && !free(begin, units)) given = oldest, oldest.next(), --used;
    begins = (begins & ~(uint64_t{255} << 8 * stage.at)) | uint64_t(begin) << 8 * stage.at;
    after = next = begin + units, ++used, ++alike;
    return begin;
  }

  // Waits until `half` of the stage taken last may be written, by wait(half, stage): for the return of
  // a stage's half. Stages of the same ranks lie where others lay, so only the same half of the one
  // before must be back, else all of it. Halves are given back in their order, so the newest tells of
  // all, and values after the keys of their stage, so they tell of both. Who fills values must not
  // ask for keys: those of the new stage, which another warp fills, may have been given back through
  // the same barrier meanwhile, and the parity says that it is not so.
  template <class Wait>
  __device__ void wait_for(int half, Wait wait) const {
    if (given.at < 0) return;
    wait(half, given);
    if (half == kKeyHalf && alike <= kPromptStages + 1) wait(kValueHalf, given);
  }

 private:
  __device__ bool free(int begin, int units) const {
    const int first = int(begins >> 8 * oldest.at & 255);
    if (used == kPromptStages) return false;
    // [first, after) is in use or, where that has gone round, all but [after, first).
    return first < after ? begin >= after || begin + units <= first
                         : begin >= after && begin + units <= first;
  }
};

}  // namespace kvlathe::cuda
