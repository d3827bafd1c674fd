// Stages of attend_prompt between the warps that fetch and the warpgroups that
// attend, on a CPU: the kernel's own Room, and the barriers in the order in
// which prompt_fetch.cuh and attend_prompt.cuh wait and arrive. Who goes on is
// drawn. What the products do is left out.
#define KVLATHE_FIBERS
#include "cuda_runtime.h"

#include "cuda/prefill/prompt_room.cuh"

namespace kvlathe::cuda {
namespace {

constexpr int kFetchers = 4, kStuck = 4000;

// PTX ISA, mbarrier: a wait for a parity ends while the phase that is under way
// has the other one.
struct Barrier {
  int arrivals, left, phase = 0;
  explicit Barrier(int arrivals) : arrivals(arrivals), left(arrivals) {}
  void arrive(int count) {
    if (!(left -= count))
      left = arrivals, ++phase;
  }
  bool ended(int parity) const { return (phase & 1) != parity; }
};

struct Part {
  bool coded;
  int stages;
};
struct Tile {
  PromptHead head;
  std::vector<Part> parts;
  int seen[kPromptGroups]; // in 16: the share of a part's stages that a
                           // warpgroup's rows see
};

struct Scene {
  std::minstd_rand random;
  std::vector<Tile> tiles;
  int room = 0, pace[kFetchers + kPromptGroups];
  bool two_buffers, stuck = false, overwritten = false;
  int idle = 0, met = 0, meeting = 0; // idle: turns since anybody arrived
  std::vector<Barrier> full[2], empty[2], there, done;
  std::vector<Barrier *> copies; // on their way, to where they will arrive
  struct Half {
    int begin, end, left;
  };
  std::vector<Half> halves[2]; // of each stage

  int upto(int most) { return int(random() % unsigned(most + 1)); }

  explicit Scene(unsigned seed) : random(seed) {
    for (auto *each : {full, empty})
      for (int half = 0; half < 2; ++half)
        each[half].assign(kPromptStages,
                          Barrier(each == full ? 128 : 4 * kPromptGroups));
    there.assign(2, Barrier(128 + 1)),
        done.assign(2, Barrier(4 * kPromptGroups));
    two_buffers = upto(1);
    std::vector<PromptHead> heads(size_t(1 + upto(3)));
    const int widest = upto(1) ? 3 : 7;
    for (PromptHead &head : heads) {
      head.steps_k = uint8_t(1 + upto(widest)),
      head.steps_v = uint8_t(1 + upto(widest));
      room = std::max(room, 2 * stage_units(head));
    }
    room = std::min(113, room + upto(upto(1) ? 6 : 90));
    int stages = 0;
    for (int n = 1 + upto(5); n > 0; --n) {
      Tile tile{heads[size_t(upto(int(heads.size()) - 1))], {}, {}};
      for (int i = 1 + upto(2); i > 0; --i)
        tile.parts.push_back({upto(1) == 1, upto(20)});
      tile.parts.push_back({false, 1 + upto(2)});
      for (const Part &part : tile.parts)
        stages += part.stages;
      for (int &seen : tile.seen)
        seen = upto(2) ? 16 : upto(16);
      tiles.push_back(tile);
    }
    for (auto &each : halves)
      each.assign(size_t(stages), {0, 0, -1});
    for (int &one : pace)
      one = upto(2) ? 0 : 40;
  }

  // Others go on. Copies land after some time, but all of them at last.
  void pass() {
    for (int n = upto(pace[threadIdx.x]); n >= 0 && !stuck; --n) {
      if (!copies.empty() && (idle > kStuck / 2 || !upto(9))) {
        std::swap(copies[size_t(upto(int(copies.size()) - 1))], copies.back());
        arrive(*copies.back(), 32), copies.pop_back();
      }
      if (++idle > kStuck)
        stuck = true;
      Fibers::current().pass();
    }
  }
  void arrive(Barrier &barrier, int count) { barrier.arrive(count), idle = 0; }
  void wait(const Barrier &barrier, int parity) {
    while (!stuck && !barrier.ended(parity))
      pass();
  }
  void meet() { // the fetchers
    const int now = meeting;
    idle = 0;
    if (++met == kFetchers)
      met = 0, ++meeting;
    while (!stuck && meeting == now)
      pass();
  }

  void fill(int stage, int half, int begin, int end) {
    for (const auto &each : halves) {
      for (int i = 0; i < stage; ++i) {
        const Half &other = each[size_t(i)];
        overwritten |= other.left > 0 && begin < other.end && other.begin < end;
      }
    }
    Half &own = halves[half][size_t(stage)];
    if (own.left < 0)
      own = {begin, end, kPromptGroups};
  }
  void give_back(int stage, int half, int at) {
    arrive(empty[half][size_t(at)], 4), --halves[half][size_t(stage)].left;
  }

  // As Fetcher::run.
  void fetch(int warp) {
    Room own;
    int stage = 0;
    const auto wait_for = [&](int half) {
      own.wait_for(half, [&](int which, Turn turn) {
        wait(empty[which][size_t(turn.at)], turn.parity);
      });
    };
    for (size_t n = 0; n <= tiles.size() && !stuck; ++n) {
      meet();
      wait(done[n & 1], (n >> 1 & 1) ^ 1);
      copies.push_back(&there[n & 1]);
      if (!warp)
        arrive(there[n & 1], 1);
      if (n == tiles.size())
        break;
      const PromptHead &head = tiles[n].head;
      own.next = first_stage(own.after, stage_units(head));
      for (const Part &part : tiles[n].parts) {
        if (part.coded && part.stages)
          meet();
        for (int i = 0; i < part.stages && !stuck;
             ++i, ++stage, own.stage.next(), pass()) {
          if (part.coded)
            meet();
          const int begin = own.take(head, room), middle = begin + head.steps_k,
                    end = begin + stage_units(head);
          const auto at = size_t(own.stage.at);
          if (part.coded) {
            wait_for(kKeyHalf), wait_for(kValueHalf);
            fill(stage, kKeyHalf, begin, middle),
                fill(stage, kValueHalf, middle, end), pass();
            if (!two_buffers)
              meet();
            arrive(full[kKeyHalf][at], 32), arrive(full[kValueHalf][at], 32);
          } else if ((own.stage.at & 1) == warp / 2) {
            const int half = warp % 2;
            wait_for(half);
            half ? fill(stage, half, middle, end)
                 : fill(stage, half, begin, middle);
            copies.push_back(&full[half][at]), arrive(full[half][at], 96);
          }
        }
      }
    }
  }

  // As attend_tile of attend_prompt.cuh.
  void attend(int group) {
    Turn turn;
    int stage = 0;
    for (size_t n = 0; !stuck; ++n) {
      wait(there[n & 1], n >> 1 & 1);
      if (n == tiles.size())
        return;
      Turn held{-1};
      const auto finish = [&] {
        if (held.at < 0)
          return;
        wait(full[kValueHalf][size_t(held.at)], held.parity), pass();
        give_back(stage - 1, kValueHalf, held.at), held.at = -1;
      };
      for (const Part &part : tiles[n].parts) {
        for (int i = 0; i < part.stages && !stuck; ++i, ++stage, turn.next()) {
          wait(full[kKeyHalf][size_t(turn.at)], turn.parity);
          if (16 * i < tiles[n].seen[group] * part.stages) {
            const Turn with = held.at < 0 ? turn : held;
            wait(full[kValueHalf][size_t(with.at)], with.parity), pass();
            give_back(stage, kKeyHalf, turn.at), pass();
            if (held.at >= 0)
              give_back(stage - 1, kValueHalf, held.at);
            held = turn;
          } else {
            finish();
            wait(full[kValueHalf][size_t(turn.at)], turn.parity);
            give_back(stage, kKeyHalf, turn.at),
                give_back(stage, kValueHalf, turn.at);
          }
        }
      }
      finish();
      arrive(done[n & 1], 4);
    }
  }
};

} // namespace
} // namespace kvlathe::cuda

// Of a random launch: 0, or 1 where some wait for ever, or 2 where a stage is
// overwritten.
extern "C" int32_t stages_end(int32_t seed) {
  using namespace kvlathe::cuda;
  Scene scene(unsigned(seed) + 1);
  Fibers().run(kFetchers + kPromptGroups, [&] {
    const int own = int(threadIdx.x);
    own < kFetchers ? scene.fetch(own) : scene.attend(own - kFetchers);
  });
  return scene.stuck ? 1 : scene.overwritten ? 2 : 0;
}
