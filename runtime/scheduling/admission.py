"""Admission: how much memory the running sequences will need at their fullest moment,
and what a wrong guess costs.

All of them grow by a token a step and give their pages back when they end, so memory is
fullest just before one of them ends. With r_k tokens to go for sequence k, that moment
holds every sequence j with r_j >= r_k at its length plus r_k ("past-future" scheduling,
Gong et al. 2025, arXiv 2507.10150). Reserving everybody's largest size at once, as if
nobody ever ended, wastes what this leaves free.

How much is to go is at most what the request allows; most end sooner. The share of its
allowance that an answer takes is estimated as mean + caution x mean deviation of those
that ended (as TCP estimates its round trips); ``caution`` rises when preemption costs
more than ``MOST_LOST`` of the time, and falls slowly otherwise. Nothing is assumed
before there is evidence: the first answers count in full.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.scheduling.sequence import Sequence

MOST_LOST = 0.02
"""Share of the running time that moving or computing again what had to leave may
take."""


@dataclass(slots=True)
class Mean:
    """An exponential mean and mean deviation; the first value counts in full."""

    value: float = 0.0
    deviation: float = 0.0
    count: int = 0
    weight: float = 0.1

    def add(self, value: float) -> None:
        self.count += 1
        weight = max(self.weight, 1 / self.count)
        if self.count > 1:
            self.deviation += weight * (abs(value - self.value) - self.deviation)
        self.value += weight * (value - self.value)


class Costs:
    """Measured prices of this machine, in seconds, and what preemption has cost of
    late.

    ``token``: of a token computed in a full step. ``byte``: of a byte swapped.
    """

    def __init__(self) -> None:
        self.token = Mean()
        self.byte = Mean()
        self.caution = 2.0
        self._lost = 0.0
        self._ran = 0.0

    def ran(self, tokens: int, sequences: int, seconds: float) -> None:
        """A step has run. Only steps with prompts in them say what computing a token
        again would cost."""
        self._ran += seconds
        if tokens > 2 * sequences:
            self.token.add(seconds / tokens)

    def moved(self, size: int, seconds: float) -> None:
        """``size`` bytes went to the host or came back."""
        if size:
            self.byte.add(seconds / size)
        self._lost += seconds

    def lost(self, tokens: int) -> None:
        """``tokens`` must be computed again."""
        self._lost += tokens * self.token.value

    def recompute_is_cheaper(self, tokens: int, size: int) -> bool:
        """Whether computing ``tokens`` again costs less than moving their ``size``
        bytes out and back."""
        if not (self.token.count and self.byte.count):
            return False
        return tokens * self.token.value < 2 * size * self.byte.value

    def judge(self) -> None:
        """Adapt ``caution`` after a preemption or an ended answer."""
        if self._lost > MOST_LOST * self._ran:
            self.caution = min(8.0, self.caution + 1)
        else:
            self.caution = max(0, self.caution - 0.02)
        self._lost *= 0.9
        self._ran *= 0.9


class Admission:
    """The fullest moment of sequences that run together, in pages of ``pool``.

    ``step_tokens``: of a step at most. ``share``: the share of its allowance that an
    answer took, over those that ended.
    """

    def __init__(self, pool: PagePool, costs: Costs, step_tokens: int) -> None:
        self.pool = pool
        self.costs = costs
        self.step_tokens = step_tokens
        self.share = Mean(weight=0.05)
        # Row 2 n: the pages of n whole pages of tokens; row 2 n + 1: of some more.
        self._pages = np.zeros((0, len(pool.strides)), np.int64)

    def ended(self, sequence: Sequence) -> None:
        """Learn from a sequence that came to its own end."""
        if sequence.params.max_new_tokens:
            self.share.add(sequence.answered / sequence.params.max_new_tokens)
        self.costs.judge()

    @property
    def expected_share(self) -> float:
        """1 until something has ended."""
        mean = self.share
        if not mean.count:
            return 1.0
        return min(1.0, mean.value + self.costs.caution * mean.deviation)

    def to_go(self, sequence: Sequence) -> int:
        """Tokens that a sequence is still expected to add; at least a page's where it
        may, at most all it may."""
        return self._to_go(sequence, self.expected_share)

    def _to_go(self, sequence: Sequence, share: float) -> int:
        most = sequence.params.max_new_tokens
        expected = int(most * share + 0.999)
        left = most - sequence.answered
        return min(left, max(expected - sequence.answered, self.pool.plan.page_tokens))

    def fits(self, sequences: Iterable[Sequence]) -> bool:
        """Whether the pool is expected to hold all of them at every moment until the
        last one ends."""
        together = list(sequences)
        to_go = np.array([self._to_go(s, self.expected_share) for s in together])
        held = np.array([len(s.tokens) for s in together])
        prompts = np.array([self._prompt_pages(s) for s in together])
        # Most often all of them fit at their fullest, which is quickly seen.
        largest = np.maximum(self._most_pages(held + to_go), prompts)
        if self.pool.holds(largest.sum(0)[None]):
            return True
        order = np.argsort(-to_go, kind="stable")
        to_go = to_go[order]
        held = held[order]
        prompts = prompts[order]
        # [moment, sequence, bucket]; at moment k all have grown by to_go[k] tokens.
        pages = self._pages_of(held[None, :] + to_go[:, None])
        # At moment k those with as much to go or more are still there.
        present = np.tri(len(together), dtype=bool)
        present = present[:, :, None]
        more = np.maximum(prompts - pages, 0)
        more *= present
        more.sort(axis=1)
        hot = more[:, -self._hot_prompts(together) :]
        pages *= present
        return self.pool.holds(pages.sum(1) + hot.sum(1))

    def _hot_prompts(self, sequences: list[Sequence]) -> int:
        """The number of prompts that can be under way at one time, each with tokens
        that are not quantized or dropped yet: those that fit a step, one that ends a
        chunk there and one that begins one (`Scheduler.schedule`)."""
        if any(sequence.reports_prompt for sequence in sequences):
            return len(sequences)  # these take turns with others
        left = [s.prompt_tokens - s.cached for s in sequences]
        chunk = self.pool.plan.prefill_chunk
        sizes = sorted(min(count, chunk) for count in left if count > 0)
        return int((np.cumsum(sizes) <= self.step_tokens).sum()) + 2

    def _prompt_pages(self, sequence: Sequence) -> list[int]:
        """Pages that the prompt of a sequence still needs at one time, by bucket: it is
        hot, in part or whole, until it ends. That counts for later moments too: nobody
        knows at which of them the prompt will have its turn."""
        left = sequence.cached < sequence.prompt_tokens
        return self.pool.demand.prompt(sequence.prompt_tokens if left else 0)

    def _pages_of(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Pages [..., buckets] that sequences of ``tokens`` tokens can need at one
        time.

        Whole pages and a part of one more are told apart: where pages seal, the part
        takes no cold page.
        """
        whole, part = np.divmod(tokens, self.pool.plan.page_tokens)
        steps = 2 * whole + (part > 0)
        self._compute_to(int(steps.max()))
        return self._pages[steps]

    def _most_pages(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The same for sequences of up to ``tokens`` tokens."""
        last = int(tokens.max()) // self.pool.plan.page_tokens * 2 + 1
        self._compute_to(last)
        largest = np.maximum.accumulate(self._pages[: last + 1])
        return largest[tokens // self.pool.plan.page_tokens * 2 + 1]

    def _compute_to(self, row: int) -> None:
        """Make ``_pages`` hold ``row``; at least twice as long if it grows at all."""
        known = len(self._pages)
        if row < known:
            return
        page = self.pool.plan.page_tokens
        rows: list[list[int]] = []
        for n in range(known, max(row + 1, 2 * known)):
            size = n // 2 * page + n % 2 * (page - 1)
            rows.append(self.pool.worst_pages(size, 0))
        self._pages = np.concatenate([self._pages, np.array(rows, np.int64)])
