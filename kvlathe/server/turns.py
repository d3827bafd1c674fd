"""Turns: threads for what requests need before the engine takes them: templates and
tokenizers, which may take seconds of what a client sends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar
from weakref import WeakValueDictionary

THREADS = min(32, (os.cpu_count() or 1) + 4)
T = TypeVar("T")


class Turns:
    """``threads`` threads, of which one client has a third at most: whose work takes
    long leaves the others to others. Work whose client has left keeps its thread, and
    its turn, until it ends.

    >>> import asyncio
    >>> asyncio.run(Turns().run("somebody", lambda: 3))
    3
    """

    def __init__(self, threads: int = THREADS) -> None:
        self._most = max(1, threads // 3)
        self._pool = ThreadPoolExecutor(threads, "kvlathe-turns")
        self._free: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """The result of ``work``, once it is the client's turn."""
        loop = asyncio.get_running_loop()
        free = self._free.get(client) or asyncio.Semaphore(self._most)
        self._free[client] = free
        await free.acquire()

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(free.release)

        future = self._pool.submit(work)
        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)
