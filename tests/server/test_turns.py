"""Turns of clients at what their requests need before the engine takes them."""

from __future__ import annotations

import asyncio
import threading

from kvlathe.server.turns import Turns


def test_work_that_takes_long_holds_up_its_own_client_alone() -> None:
    """Also where the client has left: its threads are not free before it ends."""
    ends, begun = threading.Event(), threading.Semaphore(0)

    def slow() -> bool:
        begun.release()
        return ends.wait(60)

    async def whole() -> None:
        turns = Turns(threads=6)
        flood = [asyncio.ensure_future(turns.run("a", slow)) for _ in range(20)]
        for _ in range(2):
            assert await asyncio.to_thread(begun.acquire, timeout=60)
        for one in flood[:10]:
            one.cancel()
        more = [asyncio.ensure_future(turns.run("b", slow)) for _ in range(9)]
        assert await asyncio.wait_for(turns.run("c", lambda: 3), 60) == 3
        for _ in range(2):
            assert await asyncio.to_thread(begun.acquire, timeout=60)
        assert not begun.acquire(timeout=0.05)
        ends.set()
        assert all(await asyncio.gather(*flood[10:], *more))

    asyncio.run(whole())
