"""Shards as threads of one process, for laws of what they compute together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
PATIENCE = 60.0
"""Seconds after which a shard that nobody joins fails."""


class ThreadGroup:
    """A ShardGroup of threads, which share ``table``."""

    def __init__(
        self, shard: int, table: list[Tensor], meeting: threading.Barrier
    ) -> None:
        self.shard, self.size = shard, len(table)
        self._table, self._meeting = table, meeting

    def gather(self, x: Tensor) -> Tensor:
        self._table[self.shard] = x
        self._meeting.wait(PATIENCE)
        every = torch.stack(self._table)
        self._meeting.wait(PATIENCE)
        return every

    def sum(self, x: Tensor) -> Tensor:
        return x.copy_(self.gather(x.clone()).sum(0))

    def abort(self) -> None:
        self._meeting.abort()


def on_shards(
    size: int, work: Callable[[ThreadGroup], T], kind: type[ThreadGroup] = ThreadGroup
) -> list[T]:
    """Run ``work`` on every shard: returns what each gets."""
    table = [torch.zeros(0)] * size
    meeting = threading.Barrier(size)

    def run(shard: int) -> T:
        try:
            return work(kind(shard, table, meeting))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
