"""Prefixes that a worker holds, and its load, for the router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvlathe.runtime.async_engine import AsyncEngine


class Publisher(Protocol):
    """Dynamo's KvEventPublisher, as far as we use it. Any thread may call it."""

    def publish_stored(
        self,
        token_ids: list[int],
        num_block_tokens: list[int],
        block_hashes: list[int],
        parent_hash: int | None,
        *,
        cache_salt: str | None,
    ) -> None: ...
    def publish_removed(self, block_hashes: list[int]) -> None: ...


class BlockEvents:
    """Passes on what the prefix cache keeps and gives up (a BlockObserver). It is
    called in the engine's thread."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def stored(
        self, key: bytes, before: bytes | None, tokens: Sequence[int], salt: bytes
    ) -> None:
        parent = None if before is None else name_of(before)
        ids = list(tokens)
        self._publisher.publish_stored(
            ids,
            [len(ids)],
            [name_of(key)],
            parent,
            cache_salt=salt.decode() or None,
        )

    def removed(self, key: bytes) -> None:
        self._publisher.publish_removed([name_of(key)])


def name_of(key: bytes) -> int:
    """A block's key as the signed 64 bits that the router keeps."""
    return int.from_bytes(key[:8], "little", signed=True)


class Load:
    """Load of an engine, in blocks of ``block`` tokens."""

    def __init__(self, engine: AsyncEngine, block: int) -> None:
        self._engine = engine
        self._block_bytes = engine.llm.layout.bytes_per_token() * block
        self.total = max(1, int(engine.llm.pool.arena_bytes / self._block_bytes))

    @property
    def used(self) -> int:
        """Blocks' worth of pages of running sequences."""
        return min(self.total, round(self._engine.bytes_used / self._block_bytes))

    @property
    def hit_rate(self) -> float | None:
        """The share of looked-up tokens that were cached; None before there are any."""
        scheduler = self._engine.llm.engine.scheduler
        if scheduler.prefixes is None or not scheduler.queries:
            return None
        return scheduler.prefixes.hits / scheduler.queries
