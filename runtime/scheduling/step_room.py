"""StepRoom: how many tokens a step may take, as far as its memory is known."""

from __future__ import annotations

PATIENCE = 1000
"""Steps after which twice as many tokens are tried again: what took the memory, another
process perhaps, may have gone."""


class StepRoom:
    """A step that runs out of memory halves the steps that follow; they grow again.
    ``most``: tokens that a step may have; None where none has found too little."""

    def __init__(self) -> None:
        self.most: int | None = None
        self._ran = 0

    def of(self, limit: int) -> int:
        """Tokens that a step may take where an engine takes ``limit``; 1 or more."""
        return limit if self.most is None else min(limit, self.most)

    def failed(self, tokens: int) -> None:
        """A step of ``tokens`` tokens found no memory."""
        self.most = max(1, tokens // 2)
        self._ran = 0

    def ran(self) -> None:
        """A step has found its memory."""
        if self.most is None:
            return
        self._ran += 1
        if self._ran == PATIENCE:
            self.most *= 2
            self._ran = 0
