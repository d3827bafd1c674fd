"""Turns of clients at what their requests need before the engine takes them."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from kvlathe.server.turns import Turns


class Slow:
    """Work that ends when it may."""

    def __init__(self) -> None:
        self.ends, self.begun = threading.Event(), threading.Semaphore(0)

    def __call__(self) -> bool:
        self.begun.release()
        return self.ends.wait(60)

    async def began(self, count: int) -> bool:
        """Whether ``count`` more have begun, and no other."""
        for _ in range(count):
            if not await asyncio.to_thread(self.begun.acquire, timeout=60):
                return False
        return not await asyncio.to_thread(self.begun.acquire, timeout=0.05)


def test_one_client_alone_has_all_threads_and_another_waits_for_none_of_them() -> None:
    """Also where clients have left: their threads are not free before the work ends."""

    async def whole() -> None:
        turns, flood, other = Turns(threads=6, more=2), Slow(), Slow()
        first = [asyncio.ensure_future(turns.run("a", flood)) for _ in range(20)]
        assert await flood.began(6)
        for one in first[:10]:
            one.cancel()
        second = [asyncio.ensure_future(turns.run("b", other)) for _ in range(9)]
        assert await other.began(1)
        assert await asyncio.wait_for(turns.run("c", lambda: 3), 60) == 3
        assert await flood.began(0)
        flood.ends.set()
        assert all(await asyncio.gather(*first[10:]))
        assert await other.began(5)
        other.ends.set()
        assert all(await asyncio.gather(*second))

    asyncio.run(whole())


def test_threads_that_become_free_go_to_whoever_has_the_fewest() -> None:
    """Clients that have as many take turns."""

    async def whole() -> None:
        turns, held, order = Turns(threads=1, more=0), Slow(), list[str]()
        first = asyncio.ensure_future(turns.run("a", held))
        assert await held.began(1)
        more = [turns.run(client, partial(order.append, client)) for client in "aaabbc"]
        others = [asyncio.ensure_future(one) for one in more]
        await asyncio.sleep(0)
        held.ends.set()
        await asyncio.gather(first, *others)
        assert order == list("abcaba")

    asyncio.run(whole())


def test_turns_end_with_what_their_work_raises() -> None:
    async def whole() -> None:
        turns = Turns(threads=1, more=0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await turns.run("a", lambda: 1 // 0)

    asyncio.run(whole())
