"""Turns: threads for what requests need before the engine takes them: templates and
tokenizers, which may take seconds of what a client sends."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from kvlathe.base.machine import processors

MORE_THREADS = 4
"""For clients that have nothing running while all processors are taken."""
MOST_THREADS = 32
T = TypeVar("T")


class Turns:
    """As many threads as there are processors take what waits; the client goes next that
    has the least running. So one client alone has them all. Another that comes then has
    nothing running, and begins at once, in one of ``more`` threads: it waits behind
    nobody's line. Work whose client has left keeps its thread until it ends.

    All is called in the thread of one loop.

    >>> import asyncio
    >>> asyncio.run(Turns().run("somebody", lambda: 3))
    3
    """

    def __init__(self, threads: int | None = None, more: int = MORE_THREADS) -> None:
        self._threads = min(MOST_THREADS, threads or processors())
        self._most = self._threads + more
        self._pool = ThreadPoolExecutor(self._most, "kvlathe-turns")
        # What waits, by client: whose turn is longest ago comes first; none is empty.
        self._lines: dict[str, deque[Callable[[], None]]] = {}
        self._running: Counter[str] = Counter()

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """The result of ``work``, once it is the client's turn."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(client, deque()).append(
            partial(self._start, client, work, result)
        )
        self._take_turns()
        return await result

    def _take_turns(self) -> None:
        """Start whatever may run now."""
        while self._lines:
            client = min(self._lines, key=self._running.__getitem__)
            if self._running.total() >= (
                self._threads if self._running[client] else self._most
            ):
                return
            line = self._lines.pop(client)
            line.popleft()()
            if line:
                self._lines[client] = line

    def _start(
        self, client: str, work: Callable[[], T], result: asyncio.Future[T]
    ) -> None:
        if result.cancelled():
            return
        loop = result.get_loop()
        self._running[client] += 1

        def ended(done: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._end, client, done, result)

        self._pool.submit(work).add_done_callback(ended)

    def _end(self, client: str, done: Future[T], result: asyncio.Future[T]) -> None:
        self._running -= Counter([client])
        self._take_turns()
        if result.cancelled():
            return
        if error := done.exception():
            result.set_exception(error)
        else:
            result.set_result(done.result())
