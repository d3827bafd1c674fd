// The loop of a warp of the decode kernels (attend_decode.cuh, attend_alone.cuh,
// attend_bundle.cuh), one turn a tile.
#pragma once

#include "cuda/decode/producer.cuh"

namespace kvlathe::cuda {

// Attends every tile of a warp. In each turn the ring is filled first; then either the next run of
// tokens begins, whose queries are taken, or a tile is attended.
//   walk: the spans of the warp or of its block.
//   early: whether the ring is filled while the kernel before this one still runs.
//   start(): waits for that kernel.   ended(): a span's last part has been attended.
//   take(turn, part, at, queries): keeps what is needed of a run's queries, which lie in the ring.
//   attend(turn, now): attends the tile that begins with unit `now`.
//
// There is one copy of the producer in the loop. A second copy would not fit the instruction
// caches, which costs more than another turn of the loop.
template <bool kQuantized, class P, class Walk, class Feeder, class Start, class Ended, class Take,
          class Attend>
__device__ __forceinline__ void attend_in_turns(const P& p, Feeder& producer, Ring& ring,
                                                const Walk& walk, bool early, Start start,
                                                Ended ended, Take take, Attend attend) {
  Turn turn;
  int part = -1;  // of the run being attended
  producer.park(turn);
  for (;;) {
    producer.take_up();
    producer.fill(early);
    if (early) {
      start();
      producer.fetch_first_queries();
      early = false;
    }
    producer.recall(turn);
    auto& [unit, last, head, length, units, bytes, bits] = turn;
    if (unit >= last) {  // the next run
      if (++part == P::kSlots) {
        producer.park(turn);
        ended();
        part = 0;
        producer.take_up();
      }
      if (!walk.valid) break;
      head = walk.span.head;
      const auto& at = p.head[head];
      const Run run(p, walk.span, part);
      const int room = ring_room(query_bytes(p, at));
      units = pinned(producer.units_of(at.lane[part]));
      unit = run.first + (P::kAlone ? 0 : turn_of(part)) * units;
      last = run.last, length = run.length;
      if (unit < last) {
        bytes = pinned(producer.room_of(at.lane[part]));
        bits = kQuantized ? pinned(p.part[part].bits) : 16;
        const uint32_t queries = ring.wait_oldest(room);
        take(turn, part, at, queries);
        if (kQuantized) fence_for_bulk_copies();  // which fill the queries' room next
        ring.drop_oldest(room);
      }
      producer.park(turn);
      continue;
    }
    const int now = unit;
    unit += warps_of<P>() * units;
    attend(turn, now);
  }
}

}  // namespace kvlathe::cuda
