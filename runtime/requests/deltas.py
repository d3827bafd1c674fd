"""Deltas of the engine's thread, read in an asyncio event loop."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable

from kvlathe.runtime.requests.request import Delta, OnDelta, Request

Inbox = asyncio.Queue[Delta]


class Mailbox:
    """Passes deltas to queues of one event loop from the engine's thread. Many deltas
    wake the loop once."""

    def __init__(self) -> None:
        self._letters: deque[tuple[Inbox, Delta]] = deque()
        self._called = False

    def post(self, loop: asyncio.AbstractEventLoop, inbox: Inbox, delta: Delta) -> None:
        self._letters.append((inbox, delta))
        if not self._called:
            self._called = True
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._called = False
        while self._letters:
            inbox, delta = self._letters.popleft()
            inbox.put_nowait(delta)


_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = (
    weakref.WeakKeyDictionary()
)


async def deltas(
    submit: Callable[[OnDelta], Request], cancel: Callable[[Request], None]
) -> AsyncGenerator[Delta, None]:
    """Every delta of the request that ``submit`` makes, until all its sequences have
    ended. Leaving the loop early, or cancelling its task, cancels the request."""
    loop = asyncio.get_running_loop()
    mailbox = _mailboxes.setdefault(loop, Mailbox())
    inbox = Inbox()
    request = submit(lambda delta: mailbox.post(loop, inbox, delta))
    left = len(request.sequences)
    try:
        while left:
            delta = await inbox.get()
            left -= delta.finish_reason is not None
            yield delta
    finally:
        if left:
            cancel(request)
