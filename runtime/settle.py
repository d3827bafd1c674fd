"""Settle: which tokens of a sequence move to which bucket, once a step has added the last ones. Counts only.

CacheLayout.held promises how many tokens every bucket holds after n tokens; this is how the promise is kept. The same
moves happen whatever else is in the batch: they follow from the counts of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvlathe.export.layout import CacheLayout

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Each lane's first ``length`` tokens of ``bucket`` (sealed ones included) are ranked, the ``newest`` before all
    others; bucket ``to[i][0]`` gets those of the ranks in the spans ``to[i][1]``, in new pages. The rest is dropped.
    """

    bucket: int
    length: int
    newest: int
    to: tuple[tuple[int, Spans], ...]


@dataclass(frozen=True, slots=True)
class Moves:
    """``seals``: full pages at the front of the fresh bucket that are written into each of its cold ones; then
    ``choices``.
    """

    seals: int = 0
    choices: tuple[Choice, ...] = ()


def settle(layout: CacheLayout, fresh: int, lengths: Sequence[int], arrived: int) -> Moves:
    """What to move from a fresh bucket and in its cold ones. ``lengths`` of all buckets before it (the step's tokens
    included) and the tokens that have ``arrived``.
    """
    plan, cold = layout.plan, layout.plan.cold(fresh)
    if not cold:
        return Moves(0, _cut(layout, fresh, lengths[fresh], arrived, arrived % plan.page_tokens))
    if plan.buckets[cold[0]].tokens.kind == "share":
        return Moves(0, _divided(layout, fresh, cold, lengths, arrived))
    full = lengths[fresh] // plan.page_tokens
    sealed = full * plan.page_tokens
    return Moves(full, tuple(c for b in cold for c in _cut(layout, b, lengths[b] + sealed, arrived, 0)))


def _cut(layout: CacheLayout, bucket: int, length: int, arrived: int, tail: int) -> tuple[Choice, ...]:
    """Back to the budget, if there is one; the ``tail`` newest tokens are beside it."""
    rule, held = layout.plan.buckets[bucket].tokens, layout.held(bucket, arrived)
    if rule.kind != "budget" or length <= held:
        return ()
    return (Choice(bucket, length, rule.recent + tail, ((bucket, ((0, held),)),)),)


def _divided(
    layout: CacheLayout, fresh: int, cold: tuple[int, ...], lengths: Sequence[int], arrived: int
) -> tuple[Choice, ...]:
    """The most salient tokens for the first cold bucket, the least for the last; what fills no page stays."""
    shares = layout.shares(fresh, arrived)
    ends = list(accumulate(share - lengths[c] for c, share in zip(cold, shares, strict=True)))
    sealed, left, at = [], [], 0
    for c, end in zip(cold, ends, strict=True):
        count = layout.held(c, arrived) - lengths[c]
        first = at if c != cold[-1] else end - count
        sealed.append((c, ((first, first + count),)))
        left += [(at, first), (first + count, end)]
        at = end
    moved = [one for one in sealed if _size(one[1])]
    rest = tuple(span for span in left if span[0] < span[1])
    return (Choice(fresh, lengths[fresh], 0, (*moved, *([(fresh, rest)] if rest else []))),) if moved else ()


def _size(spans: Spans) -> int:
    return sum(stop - start for start, stop in spans)


def pages_of(choice: Choice, page_tokens: int) -> list[tuple[int, int]]:
    """(bucket, new pages) of each part of a choice."""
    return [(bucket, -(-_size(spans) // page_tokens)) for bucket, spans in choice.to]
