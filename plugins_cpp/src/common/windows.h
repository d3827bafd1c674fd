// Windows: the tokens that a query sees of those before it. The equations are those of Window in
// kvlathe/plan/lives.py.
#pragma once

#include "common/formats.h"

namespace kvlathe {

// The first place after the sink that the query at `place` sees; 0 or less: every place. `page`:
// the first place of the query's page.
template <class Int>
KVLATHE_ANYWHERE constexpr Int first_seen(Int place, Int page, Int recent, Int exact) {
  const Int whole = page - recent, own = place - exact + 1;
  return exact && own > whole ? own : whole;
}

// Places begin .. end - 1 of one bucket, which a query does not see.
struct Gap {
  int begin, end;
};

// Of the first `tokens` places of a bucket, before which `offset` tokens of its lanes lie in
// another. `first`: the first place after the sink that is seen, counted from there.
KVLATHE_ANYWHERE constexpr Gap gap_of(int sink, int first, int offset, int tokens) {
  const int begin = sink > offset ? (sink - offset < tokens ? sink - offset : tokens) : 0;
  const int end = first - offset < tokens ? first - offset : tokens;
  return {begin, end > begin ? end : begin};
}

// What a row keeps of one bucket: pages from `sink` on are those from `sink + gone` on of its
// sequence. `hidden`: what it does not see of the others, counted without the pages that are gone.
struct Kept {
  int tokens, sink, gone;
  Gap hidden;
};

// Of the first `tokens` places of a bucket (`offset`: as in gap_of), for the query at `place`.
KVLATHE_ANYWHERE inline Kept kept_of(const kvlathe_window& window, int place, int offset,
                                     int tokens, int page) {
  const int first = first_seen(place, place / page * page, window.recent, window.exact);
  const Gap gap = gap_of(window.sink, first, offset, tokens);
  const int sink = (gap.begin + page - 1) / page, passed = gap.end / page - sink,
            gone = passed > 0 ? passed : 0;
  return {tokens - gone * page, sink, gone, {gap.begin, gap.end - gone * page}};
}

// Of places in steps of `stage`, a power of two: those that lie wholly between the sink and
// `first`, the first place after it that is seen.
KVLATHE_ANYWHERE inline Gap hidden_stages(int sink, int first, int stage) {
  const int begin = (sink + stage - 1) & -stage, end = first > 0 ? first & -stage : 0;
  return {begin, end > begin ? end : begin};
}

}  // namespace kvlathe
