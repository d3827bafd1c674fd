"""Deltas of a request that begins in some other thread, read in asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol

from kvlathe.runtime.async_engine import AsyncEngine
from kvlathe.runtime.requests.request import Delta, OnDelta, Request

Begin = Callable[[OnDelta], Awaitable[Request]]


class Context(Protocol):
    """Dynamo's, as far as we use it."""

    def id(self) -> str: ...


class Following:
    """The open requests of one worker, by Dynamo's name of them."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._open: dict[str, Request] = {}

    async def follow(
        self, context: Context, begin: Begin
    ) -> AsyncGenerator[Delta, None]:
        """Every delta of the request that ``begin`` makes, until all its sequences have
        ended. Leaving the loop early cancels it."""
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Delta] = asyncio.Queue()

        def post(delta: Delta) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, delta)

        request = await begin(post)
        self._open[context.id()] = request
        left = len(request.sequences)
        try:
            while left:
                delta = await inbox.get()
                left -= delta.finish_reason is not None
                yield delta
        finally:
            self._open.pop(context.id(), None)
            if left:
                self._engine.cancel(request)

    def abort(self, context: Context) -> None:
        """The client has gone: end its request before the next step."""
        request = self._open.get(context.id())
        if request is not None:
            self._engine.cancel(request)
