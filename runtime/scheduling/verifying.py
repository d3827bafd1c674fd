"""The rows of a step that choose tokens: the last of each sequence, and one behind each
token that was guessed for it. Which guesses stay."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import islice

import numpy as np

from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.scheduling.choosing import (
    Choice,
    Computed,
    Masking,
    Rows,
    chosen,
    divided,
    needs_logits,
)
from kvlathe.runtime.scheduling.sequence import Chunk, Sequence
from kvlathe.runtime.sessions.protocols import Session, StepPlan, TokenSampler
from kvlathe.runtime.text.sampler import Request, Sampled, rows_of, sample

NO_LOGITS: Rows = np.zeros((0, 0), np.float32)
"""Of a chunk whose tokens are chosen elsewhere."""


@dataclass(frozen=True, slots=True)
class Choosing:
    """Of the step of ``chunks``: the ``growing`` ones get tokens. ``requests``: of the
    rows that choose them; ``owners``: the rows' sequences."""

    chunks: Items[Chunk]
    growing: frozenset[Chunk]
    requests: list[Request]
    owners: list[Sequence]

    @classmethod
    def of(cls, chunks: Items[Chunk]) -> Choosing:
        growing = frozenset(c for c in chunks if c.sequence.grows and c.completes)
        requests: list[Request] = []
        owners: list[Sequence] = []
        for chunk in chunks:
            if chunk not in growing:
                continue
            requests += chunk.requests
            owners += [chunk.sequence] * (1 + len(chunk.drafts))
        return cls(chunks, growing, requests, owners)

    def run(
        self,
        session: Session,
        sampler: TokenSampler | None,
        masking: Masking,
        pool: PagePool,
        step: StepPlan,
    ) -> list[Computed]:
        """Run the step, wait for its tokens, and say what each chunk computed."""
        if sampler is not None and not any(map(needs_logits, self.chunks)):
            choose = sampler.start(step)
            rows = rows_of(self.requests, masking.result())
            sampled = choose(rows).result()
            return self._kept(sampled, [NO_LOGITS] * len(self.chunks), pool)
        every = session.run(step)
        rows = rows_of(self.requests, masking.result())
        sampled = sample(self._rows(every), rows)
        return self._kept(sampled, divided(every, self.chunks), pool)

    def _rows(self, every: Rows) -> Rows:
        """Of a step's logits those that choose tokens."""
        if len(self.requests) == len(every):
            return every
        places: list[int] = []
        end = 0
        for chunk in self.chunks:
            end += len(chunk.wanted)
            if chunk in self.growing:
                places += range(end - 1 - len(chunk.drafts), end)
        return every[np.array(places, np.intp)]

    def _kept(
        self, sampled: Sampled, logits: Items[Rows], pool: PagePool
    ) -> list[Computed]:
        """What each chunk computed: of its guesses those that were right, and the token
        after them. The others' room is given back when the step commits.

        ``logits``: of each chunk.
        """
        choices = iter(chosen(self.owners, sampled))
        computed: list[Computed] = []
        for chunk, own in zip(self.chunks, logits, strict=True):
            given: list[Choice] = []
            if chunk in self.growing:
                given = list(islice(choices, 1 + len(chunk.drafts)))
                given = _right(chunk, given)
            if len(given) < 1 + len(chunk.drafts) and given:
                pool.shorten(chunk.reservation, len(given))
                chunk.count = len(given)
            computed.append(Computed(own, given))
        return computed


def _right(chunk: Chunk, choices: Items[Choice]) -> list[Choice]:
    """The choices up to the first that was guessed wrong, which is the last one whose
    row has seen only tokens that count."""
    for place, guessed in enumerate(chunk.drafts):
        if choices[place][0] != guessed:
            return list(choices[: place + 1])
    return list(choices)
