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

from kvlathe.base.limited import MOST_CHILDREN
from kvlathe.base.machine import processors
from kvlathe.runtime.async_engine import MAX_WAITING
from kvlathe.server.errors import AGAIN, ApiError

MORE_THREADS = 4
"""For clients that have nothing running while all other threads are taken."""
MOST_THREADS = MOST_CHILDREN - MORE_THREADS
"""With ``MORE_THREADS`` no more than templates have children: none waits for one."""
T = TypeVar("T")


class Turns:
    """As many threads as there are processors, four at most, take what waits; the client
    goes next that has the least running. So one client alone has them all. Others that
    come then have nothing running: the first ``more`` of them begin at once, in threads
    of their own. Those after them wait until any work ends, and then come before whoever
    has something running. What waits ends with its request; work whose client has left
    keeps its thread until it ends. A client's line has at most ``max_waiting`` (or 1).

    All is called in the thread of one loop.

    >>> import asyncio
    >>> asyncio.run(Turns().run("somebody", lambda: 3))
    3
    """

    def __init__(
        self,
        threads: int | None = None,
        more: int = MORE_THREADS,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._max_waiting = max(1, max_waiting)
        self._threads = threads or min(MOST_THREADS, processors())
        self._most = self._threads + more
        self._pool = ThreadPoolExecutor(self._most, "kvlathe-turns")
        # What waits, by client: whose turn is longest ago comes first; none is empty.
        self._lines: dict[str, deque[Callable[[], None]]] = {}
        self._running: Counter[str] = Counter()

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """The result of ``work``, once it is the client's turn. Raises ApiError where
        too many of its requests wait."""
        if len(self._lines.get(client, ())) >= self._max_waiting:
            said = "too many requests of this client wait to be prepared"
            raise ApiError(429, said, code="queue_full", headers=AGAIN)
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        begin = partial(self._start, client, work, result)
        self._lines.setdefault(client, deque()).append(begin)
        self._take_turns()
        try:
            return await result
        except asyncio.CancelledError:
            self._leave(client, begin)
            raise

    def _leave(self, client: str, begin: Callable[[], None]) -> None:
        """Take what has not begun out of its client's line."""
        line = self._lines.get(client, deque())
        with suppress(ValueError):  # it has begun
            line.remove(begin)
        if not line:
            self._lines.pop(client, None)

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
