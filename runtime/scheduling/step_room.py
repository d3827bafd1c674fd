"""StepRoom: how many tokens a step may take, as far as its memory is known."""

from __future__ import annotations

from collections.abc import Iterable

from kvlathe.runtime.scheduling.sequence import Chunk

PATIENCE = 1000
"""Steps after which twice as many tokens are tried again: what took the memory, another
process perhaps, may have gone."""


class StepRoom:
    """A step that runs out of memory halves the steps that follow; they grow again."""

    def __init__(self) -> None:
        self._most: int | None = None
        self._ran = 0

    def of(self, limit: int) -> int:
        """Tokens that a step may take where an engine takes ``limit``; 1 or more."""
        return limit if self._most is None else min(limit, self._most)

    def holds(self, chunks: Iterable[Chunk]) -> bool:
        """Whether a step of these chunks may be tried."""
        tokens = tokens_of(chunks)
        return self.of(tokens) == tokens

    def failed(self, tokens: int) -> None:
        """A step of ``tokens`` tokens found no memory."""
        self._most = max(1, tokens // 2)
        self._ran = 0

    def ran(self) -> None:
        """A step has found its memory."""
        if self._most is None:
            return
        self._ran += 1
        if self._ran == PATIENCE:
            self._most *= 2
            self._ran = 0


def tokens_of(chunks: Iterable[Chunk]) -> int:
    return sum(chunk.count for chunk in chunks)
