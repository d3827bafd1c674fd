"""The interface of whoever wants to know which blocks of prefixes are kept: a
router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class BlockObserver(Protocol):
    """Told which blocks are kept, in the engine's thread. It must not block or
    raise."""

    def stored(
        self, key: bytes, before: bytes | None, tokens: Sequence[int], salt: bytes
    ) -> None:
        """A block of ``tokens``, after the block ``before``, of the tenant ``salt``."""
        ...

    def removed(self, key: bytes) -> None: ...
