"""Logits of a text that is already known, computed through the paged cache: what
evaluation measures."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.cache.pool import Reservation
from kvlathe.runtime.cache.prefix import PrefixCache
from kvlathe.runtime.requests.sequences import SequenceFactory
from kvlathe.runtime.scheduling.engine import Engine
from kvlathe.runtime.scheduling.sequence import PrefillChunk
from kvlathe.runtime.text.sampler import Sampler
from kvlathe.runtime.text.sampling_params import SamplingParams

Row = npt.NDArray[np.float32]


class ForcedText:
    """The tokens of one text and the places ``rows`` whose next-token logits are
    wanted. The first ``prompt`` tokens are a prompt, the others an answer.
    ``adapter``: the name of the one that all of them pass."""

    def __init__(
        self,
        engine: Engine,
        factory: SequenceFactory,
        tokens: list[int],
        rows: Items[int],
        prompt: int | None,
        adapter: str | None = None,
    ) -> None:
        factory.check(tokens, 0)
        plan = engine.pool.plan
        self._engine, self._tokens, self._rows = engine, tokens, rows
        self._ranked = plan.index.ranked
        self._prompt = self._prompt_tokens(prompt)
        seals = plan.index.seals
        grid = (
            plan.page_tokens if seals and not plan.index.ranked else plan.prefill_chunk
        )
        sampler = Sampler(SamplingParams())
        self._sequence = factory.open(tokens, self._prompt, grid, sampler)
        self._sequence.adapter = factory.adapter(adapter)
        self._begun = False
        self._wanted = set(rows)
        self._coming: list[int] = []
        self._found: dict[int, Row] = {}

    def _begin(self, prefixes: PrefixCache | None) -> None:
        """Put a compacted prefix before the rows of a text that begins with it."""
        sequence = self._sequence
        before = self._tokens[: min(self._rows)]
        base = prefixes and prefixes.compacted(before, sequence.prefix_salt)
        if prefixes and base:
            sequence.table, sequence.cached = prefixes.table(base)

    def logits(self, given_up: Callable[[], bool]) -> npt.NDArray[np.float32]:
        """[len(rows), vocab], in the order of ``rows``. Stops between two steps once
        the caller has ``given_up``; the cache's pages go back in any case."""
        try:
            return until(self._engine, [self], len(self._tokens), self._rows, given_up)
        finally:
            self.close()

    def chunk_before(self, end: int, most: int) -> PrefillChunk | None:
        """The next chunk of at most ``most`` tokens, which stops before ``end`` where it
        may stop anywhere; None where the tokens before ``end`` are cached."""
        if not self._begun:
            self._begun = True
            self._begin(self._engine.scheduler.prefixes)
        sequence = self._sequence
        if sequence.cached >= end:
            return None
        most = min(most, self._most_rows(), end - sequence.cached)
        count = sequence.next_tokens(most)
        places = sequence.places(count)
        offsets = []
        if sequence.sees_logits:
            offsets = [i for i, place in enumerate(places) if place in self._wanted]
        self._coming = [places[i] for i in offsets]
        return PrefillChunk(sequence, count, self._reserve(count), offsets)

    def keep(self, rows: Row) -> int:
        """Keep the logits of the chunk that was computed, which come first in ``rows``
        [.., vocab]; returns how many they are."""
        count = len(self._coming)
        self._found |= dict(zip(self._coming, rows[:count], strict=True))
        return count

    def take(self, rows: Items[int]) -> list[Row]:
        """The logits of these rows, which were computed. They are kept no longer."""
        found = [self._found[row] for row in rows]
        for row in set(rows):
            del self._found[row]
        return found

    def close(self) -> None:
        """Give the cache's pages back."""
        self._engine.pool.release(self._sequence.table)

    def _prompt_tokens(self, prompt: int | None) -> int:
        """Tokens of the prompt. It matters where tokens are ranked: by default it goes
        up to the first wanted row. Elsewhere the whole text is one."""
        count = len(self._tokens)
        if not self._ranked:
            return count
        tokens = min(self._rows) + 1 if prompt is None else prompt
        if not 1 <= tokens <= count:
            raise KvlatheError(
                f"a prompt of {tokens} tokens cannot be",
                f"the text has {count}",
                "give a part of it",
            )
        return tokens

    def _most_rows(self) -> int:
        """Rows of the next step. Past a ranked prompt they are few enough that each
        attends what its decode would attend."""
        most = self._engine.scheduler.limits.max_num_tokens
        if self._ranked and self._sequence.cached >= self._prompt:
            return min(most, self._engine.pool.steady(self._sequence.table))
        return most

    def _reserve(self, count: int) -> Reservation:
        """Pages for the next ``count`` tokens."""
        sequence, pool = self._sequence, self._engine.pool
        arriving, seals = sequence.arriving(count), sequence.seals_after(count)
        reserve = partial(pool.reserve, sequence.table, arriving, seals)
        return self._engine.scheduler.make_room(reserve)


def until(
    engine: Engine,
    texts: Items[ForcedText],
    end: int,
    rows: Items[int],
    given_up: Callable[[], bool],
) -> npt.NDArray[np.float32]:
    """[len(texts) * len(rows), vocab] of those ``rows`` of every text, all before
    ``end``, the tokens before which are cached then. Several texts share steps."""
    while True:
        if given_up():
            raise KvlatheError("the logits were given up")
        chunks = _next_chunks(engine, texts, end)
        if not chunks:
            return np.stack([row for text in texts for row in text.take(rows)])
        found = engine.run(list(chunks.values()))
        at = 0
        for text in chunks:
            at += text.keep(found[at:])


def _next_chunks(
    engine: Engine, texts: Items[ForcedText], end: int
) -> dict[ForcedText, PrefillChunk]:
    """The chunks of the next step, the shortest first; their pages are reserved."""
    left = engine.scheduler.limits.max_num_tokens
    chunks: dict[ForcedText, PrefillChunk] = {}
    try:
        for text in texts:
            chunk = text.chunk_before(end, left) if left else None
            if chunk is not None:
                chunks[text] = chunk
                left -= chunk.count
    except BaseException:
        for chunk in chunks.values():
            engine.pool.rollback(chunk.reservation)
        raise
    return dict(sorted(chunks.items(), key=lambda item: item[1].count))
