"""Turns of clients at what their requests need before the engine takes them."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

import kvlathe.server.turns
from kvlathe.base.limited import MOST_CHILDREN
from kvlathe.server.errors import ApiError
from kvlathe.server.service import network_of
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


def test_requests_that_wait_leave_their_line_with_their_client() -> None:
    """With the body that it holds; what others have there goes on."""

    async def whole() -> None:
        turns, held = Turns(threads=1, more=0), Slow()
        first = asyncio.ensure_future(turns.run("a", held))
        stays = asyncio.ensure_future(turns.run("a", lambda: 3))
        leave = [asyncio.ensure_future(turns.run(c, held)) for c in "aabb"]
        assert await held.began(1)
        for one in leave:
            one.cancel()
        await asyncio.wait(leave)
        assert {c: len(line) for c, line in turns._lines.items()} == {"a": 1}
        held.ends.set()
        assert await first and await stays == 3 and not turns._lines

    asyncio.run(whole())


def test_a_client_with_a_full_line_is_told_to_come_back_and_no_other() -> None:
    async def whole() -> None:
        turns, held = Turns(threads=1, more=0, max_waiting=2), Slow()
        first = [asyncio.ensure_future(turns.run("a", held)) for _ in range(3)]
        assert await held.began(1)
        with pytest.raises(ApiError, match="too many") as refused:
            await turns.run("a", held)
        assert refused.value.status_code == 429 and refused.value.code == "queue_full"
        assert int((refused.value.headers or {})["Retry-After"]) > 0
        other = asyncio.ensure_future(turns.run("b", lambda: 3))
        held.ends.set()
        assert all(await asyncio.gather(*first)) and await other == 3

    asyncio.run(whole())


def test_no_thread_waits_for_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those of one client would hold up others that have threads."""
    for count in (1, 2, 64):
        monkeypatch.setattr(
            kvlathe.server.turns, "processors", lambda count=count: count
        )
        made = Turns()
        assert made._most <= MOST_CHILDREN
        assert made._threads >= min(2, count) and made._most > made._threads + 1


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("2001:db8:0:1:2:3:4:5", "2001:db8:0:1::/64"),
        ("2001:db8:0:1::9", "2001:db8:0:1::/64"),
        ("2001:db8:0:2::9", "2001:db8:0:2::/64"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("fe80::1%eth0", "fe80::/64"),
        ("192.0.2.1", "192.0.2.1"),
        ("", ""),
    ],
)
def test_a_client_without_a_key_is_its_network(host: str, expected: str) -> None:
    assert network_of(host) == expected
