"""Decode attention cut into work: the papers' longest-first rule and equal
intervals of bytes.

A pair is one (sequence, head) with a number of pages; its cost is pages x (rank_k +
rank_v). A span is some pages of one pair; a work list gives each worker its spans. Both
rules are computed on the host, outside what is timed.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WHOLE = -1
"""Slot of a span that is its whole pair: it leaves no partial result."""


@dataclass(frozen=True)
class Span:
    pair: int
    first: int
    pages: int


@dataclass(frozen=True)
class WorkList:
    """spans int32 [n, 5]: sequence, head, first page, pages, slot; starts int32
    [workers + 1]; slots int32 [pairs, 2]: a pair's first partial result, and their
    end."""

    spans: np.ndarray
    starts: np.ndarray
    slots: np.ndarray

    @property
    def split(self) -> bool:
        return bool((self.spans[:, 4] != WHOLE).any())


def longest_first(costs: Sequence[int], workers: int) -> list[list[int]]:
    """Pairs of each worker: sorted by cost, each to the least loaded one (ZACK section
    5.3, FDC section 4.3)."""
    loads, mine = [(0, w) for w in range(workers)], [[] for _ in range(workers)]
    for pair in sorted(range(len(costs)), key=lambda i: -costs[i]):
        if not costs[pair]:
            continue
        load, worker = heapq.heappop(loads)
        mine[worker].append(pair)
        heapq.heappush(loads, (load + costs[pair], worker))
    return mine


def balanced(
    pages: Sequence[int], page_costs: Sequence[int], workers: int
) -> list[list[Span]]:
    """Spans of each worker: equal intervals of the whole cost, cut at pages."""
    ends = [0]
    for count, cost in zip(pages, page_costs, strict=True):
        ends.append(ends[-1] + count * cost)
    places = [
        _place(ends, page_costs, ends[-1] * w // workers) for w in range(workers)
    ] + [(len(pages), 0)]
    return [_between(pages, *places[w : w + 2]) for w in range(workers)]


def _place(
    ends: Sequence[int], page_costs: Sequence[int], cost: int
) -> tuple[int, int]:
    """The page in which ``cost`` is reached, rounded up: (pair, page)."""
    pair = bisect.bisect_right(ends, cost) - 1
    if pair >= len(page_costs):
        return len(page_costs), 0
    return pair, -((ends[pair] - cost) // max(page_costs[pair], 1))


def _between(
    pages: Sequence[int], start: tuple[int, int], end: tuple[int, int]
) -> list[Span]:
    found = []
    for pair in range(start[0], min(end[0] + 1, len(pages))):
        first = start[1] if pair == start[0] else 0
        last = min(end[1], pages[pair]) if pair == end[0] else pages[pair]
        if last > first:
            found.append(Span(pair, first, last - first))
    return found


def work_list(rule: str, lengths: Sequence[int], ranks: Sequence[tuple[int, int]], page_tokens: int, workers: int,
              leave_all: bool = False, first_slot: int = 0) -> WorkList:  # fmt: skip
    """``rule``: longest-first or balanced. Heads of ranks (0, 0) are left out.
    ``leave_all``: whole pairs leave a partial result too (a tail follows). Slots count
    from ``first_slot``."""
    heads = len(ranks)
    pages = [-(-n // page_tokens) * (sum(pair) > 0) for n in lengths for pair in ranks]
    costs = [sum(pair) for _ in lengths for pair in ranks]
    if rule == "balanced":
        lists = balanced(pages, costs, workers)
    else:
        mine = longest_first(
            [n * c for n, c in zip(pages, costs, strict=True)], workers
        )
        lists = [[Span(pair, 0, pages[pair]) for pair in one] for one in mine]
    counts = np.zeros(len(pages) + 1, np.int64)
    for span in (span for one in lists for span in one):
        counts[span.pair + 1] += leave_all or span.pages < pages[span.pair]
    ends = first_slot + np.cumsum(counts)
    rows, used = [], ends[:-1].copy()
    for span in (span for one in lists for span in one):
        leaves = counts[span.pair + 1] > 0
        slot = used[span.pair] if leaves else WHOLE
        used[span.pair] += leaves
        rows.append(
            (span.pair // heads, span.pair % heads, span.first, span.pages, slot)
        )
    starts = np.cumsum([0, *(len(one) for one in lists)])
    slots = np.stack([ends[:-1], ends[1:]], 1)
    return WorkList(
        np.array(rows, np.int32).reshape(-1, 5),
        starts.astype(np.int32),
        slots.astype(np.int32),
    )
