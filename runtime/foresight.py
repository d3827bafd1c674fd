"""Foresight: how much memory the running sequences will need at their fullest moment, and what a wrong guess costs.

All of them grow by a token a step and give their pages back when they end, so memory is fullest just before one of them
ends. With r_k tokens to go for sequence k, that moment holds every sequence j with r_j >= r_k at its length plus r_k
("past-future" scheduling, Gong et al. 2025, arXiv 2507.10150). Reserving everybody's largest size at once, as if nobody
ever ended, wastes what this leaves free.

How much is to go is at most what the request allows; most end sooner. The share of its allowance that an answer takes
is estimated as mean + caution x mean deviation of those that ended (as TCP estimates its round trips); ``caution``
rises when preemption costs more than ``MOST_LOST`` of the time, and falls slowly otherwise. Nothing is assumed before
there is evidence: the first answers count in full.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvlathe.runtime.pool import PagePool
from kvlathe.runtime.sequence import Sequence

MOST_LOST = 0.02
"""Share of the running time that moving or computing again what had to leave may take."""


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
        self.deviation += weight * (abs(value - self.value) - self.deviation) if self.count > 1 else 0
        self.value += weight * (value - self.value)


class Costs:
    """Measured prices of this machine, in seconds, and what preemption has cost of late."""

    def __init__(self) -> None:
        self.token, self.byte = Mean(), Mean()  # of a token computed in a full step, of a byte swapped
        self.caution = 2.0
        self._lost = self._ran = 0.0

    def ran(self, tokens: int, sequences: int, seconds: float) -> None:
        """A step has run. Only steps with prompts in them say what computing a token again would cost."""
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
        """Whether computing ``tokens`` again costs less than moving their ``size`` bytes out and back."""
        return bool(self.token.count and self.byte.count) and tokens * self.token.value < 2 * size * self.byte.value

    def judge(self) -> None:
        """After a preemption or an ended answer: was it too much?"""
        self.caution = min(8.0, self.caution + 1) if self._lost > MOST_LOST * self._ran else max(0, self.caution - 0.02)
        self._lost, self._ran = 0.9 * self._lost, 0.9 * self._ran


class Foresight:
    """The fullest moment of sequences that run together, in pages of ``pool``."""

    def __init__(self, pool: PagePool, costs: Costs) -> None:
        self.pool, self.costs = pool, costs
        self.share = Mean(weight=0.05)  # of its allowance that an answer took
        self._pages = np.zeros((0, len(pool.strides)), np.int64)  # [2 n + any part]: of n pages' tokens

    def ended(self, sequence: Sequence) -> None:
        """Learn from a sequence that came to its own end."""
        if sequence.params.max_new_tokens:
            self.share.add(sequence.answered / sequence.params.max_new_tokens)
        self.costs.judge()

    @property
    def expected_share(self) -> float:
        """1 until something has ended."""
        mean = self.share
        return min(1.0, mean.value + self.costs.caution * mean.deviation) if mean.count else 1.0

    def to_go(self, sequence: Sequence) -> int:
        """Tokens that a sequence is still expected to add; at least a page's where it may, at most all it may."""
        most = sequence.params.max_new_tokens
        expected = int(most * self.expected_share + 0.999) - sequence.answered
        return min(most - sequence.answered, max(expected, self.pool.plan.page_tokens))

    def fits(self, sequences: Iterable[Sequence]) -> bool:
        """Whether the pool is expected to hold all of them at every moment until the last one ends."""
        together = list(sequences)
        to_go = np.array([self.to_go(s) for s in together])
        order = np.argsort(-to_go, kind="stable")
        to_go, held = to_go[order], np.array([len(s.tokens) for s in together])[order]
        pages = self._pages_of(held[None, :] + to_go[:, None])  # [moment, sequence, bucket]
        pages = np.maximum(pages, np.array([self._prompt_pages(together[i]) for i in order]))
        present = np.tri(len(together), dtype=bool)  # at moment k: those with as much to go or more
        return self.pool.holds((pages * present[:, :, None]).sum(1))

    def _prompt_pages(self, sequence: Sequence) -> list[int]:
        """What the prompt of a sequence still needs at one time, by bucket: it is hot, in part or whole, until it ends.
        That counts for later moments too: nobody knows when the prompt will have its turn."""
        return self.pool.prompt_pages(sequence.prompt_tokens if sequence.cached < sequence.prompt_tokens else 0)

    def _pages_of(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Pages [..., buckets] that sequences of ``tokens`` tokens can need at one time.

        Whole pages and a part of one more are told apart: where pages seal, the part takes no cold page.
        """
        p = self.pool.plan.page_tokens
        whole, part = np.divmod(tokens, p)
        steps = 2 * whole + (part > 0)
        known = len(self._pages)
        if (most := int(steps.max())) >= known:
            sizes = (n // 2 * p + n % 2 * (p - 1) for n in range(known, max(most + 1, 2 * known)))
            self._pages = np.concatenate([self._pages, np.array([*map(self.pool.grown_pages, sizes)], np.int64)])
        return self._pages[steps]
