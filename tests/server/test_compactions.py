"""Laws of compactions under load: they hold nobody up, a number of them may wait, who
leaves leaves nothing behind, and a drain waits for them."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import numpy as np
import numpy.typing as npt
import pytest

from kvlathe.base.errors import Busy, KvlatheError
from kvlathe.runtime.async_engine import MAX_COMPACTIONS, AsyncEngine
from kvlathe.runtime.cache.arena import OutOfPages
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.sessions.protocols import StepPlan
from kvlathe.server.errors import refusal
from tests.server.test_prefixes import sharing
from tests.support.runtime_cases import text
from tests.support.serving_cases import KEY, MODEL_NAME, Served, post, serving, until


class Gated:
    """A session whose steps wait until ``gate`` is set. ``steps``: how many began."""

    def __init__(self, llm: LLM) -> None:
        self.gate, self.begun = threading.Event(), threading.Event()
        self.steps = 0
        self._run = llm.session.run
        llm.session.run = self.run

    def run(self, step: StepPlan) -> npt.NDArray[np.float32]:
        self.steps += 1
        self.begun.set()
        assert self.gate.wait(30)
        return self._run(step)


Stalled = tuple[Served, Gated, ThreadPoolExecutor]


@pytest.fixture
def stalled() -> Iterator[Stalled]:
    """A server whose model waits, and threads that ask it."""
    llm = sharing("compacted")
    gated = Gated(llm)
    with serving(llm, keys=[KEY]) as served, ThreadPoolExecutor(8) as pool:
        try:
            yield served, gated, pool
        finally:
            gated.gate.set()


def ids(first: int = 0) -> list[int]:
    return list(text(128, first))


def compact(served: Served, first: int = 0) -> httpx.Response:
    return post(served, "prefixes", prompt=ids(first))


def begun(stalled: Stalled, count: int = 1) -> list[Future[httpx.Response]]:
    """``count`` compactions, of which one runs."""
    served, gated, pool = stalled
    asked = [pool.submit(compact, served, 200 * i) for i in range(count)]
    until(lambda: served.engine.compactions == count and gated.begun.is_set())
    return asked


def leave(served: Served, first: int) -> None:
    """Ask for a compaction, and be gone before it is made."""
    body: dict[str, Any] = {"model": MODEL_NAME, "prompt": ids(first)}
    headers = {"Authorization": f"Bearer {KEY}"}
    with pytest.raises(httpx.TimeoutException):
        url = f"{served.url}/v1/prefixes"
        httpx.post(url, json=body, headers=headers, timeout=0.3)


def test_those_that_wait_hold_none_of_asyncios_threads() -> None:
    llm = sharing("compacted")
    gated = Gated(llm)

    async def work(engine: AsyncEngine) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        made = [
            asyncio.ensure_future(engine.compact(ids(200 * i)))
            for i in range(MAX_COMPACTIONS)
        ]
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="too many prefixes"):
            await engine.compact(ids())
        async with asyncio.timeout(10):
            await asyncio.to_thread(gated.begun.wait)
        assert not any(task.done() for task in made)
        gated.gate.set()
        found = await asyncio.gather(*made)
        assert [each.tokens for each in found] == [128] * MAX_COMPACTIONS

    with AsyncEngine(llm) as engine:
        asyncio.run(work(engine))
        assert engine.idle


def test_compactions_wait_tokenized_and_one_too_many_gets_429(stalled: Stalled) -> None:
    served, gated, pool = stalled
    asked = begun(stalled, MAX_COMPACTIONS)
    refused = compact(served, 3000)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "queue_full"
    answer = pool.submit(post, served, prompt="def main", max_tokens=1)
    until(lambda: served.engine.open == 1)
    assert served.engine.compactions == MAX_COMPACTIONS
    gated.gate.set()
    assert [each.result().status_code for each in asked] == [200] * MAX_COMPACTIONS
    assert answer.result().status_code == 200
    assert served.engine.idle


def test_who_goes_away_ends_the_compaction(stalled: Stalled) -> None:
    served, gated, pool = stalled
    gone = pool.submit(leave, served, 0)
    assert gated.begun.wait(10)
    leave(served, 500)  # it waits behind the first
    gone.result()
    # The one that waited is gone. The first ends after the step that it is in.
    until(lambda: served.engine.compactions == 1)
    answered = pool.submit(compact, served, 1000)
    until(lambda: served.engine.compactions == 2)
    before = gated.steps
    assert before == 1
    gated.gate.set()
    assert answered.result().status_code == 200
    alone = sharing("compacted")
    counted = Gated(alone)
    counted.gate.set()
    alone.compact(ids(1000))
    assert gated.steps == before + counted.steps
    assert served.llm.pool.bytes_in_use == alone.pool.bytes_in_use
    alone.close()


def test_a_drain_waits_for_those_that_have_begun(stalled: Stalled) -> None:
    served, gated, _ = stalled
    asked = begun(stalled, 2)
    served.server.drain_seconds = 20
    served.server.handle_exit(signal.SIGTERM, None)
    until(lambda: served.engine.draining)
    refused = compact(served, 3000)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"
    gated.gate.set()
    assert [each.result().status_code for each in asked] == [200, 200]


@pytest.mark.parametrize("seconds", [20, 0])
def test_closing_waits_and_says_whether_all_had_ended(seconds: float) -> None:
    llm = sharing("compacted")
    gated, engine = Gated(llm), AsyncEngine(llm)
    with ThreadPoolExecutor(2) as pool:
        made = pool.submit(asyncio.run, engine.compact(ids()))
        assert gated.begun.wait(10)
        closed = pool.submit(engine.close, seconds)
        until(lambda: engine.draining if seconds else not engine.alive)
        gated.gate.set()
        assert closed.result() is bool(seconds)
    assert (made.exception() is None) is bool(seconds)


def test_compactions_that_a_drain_cuts_get_503(stalled: Stalled) -> None:
    served, gated, pool = stalled
    asked = begun(stalled, 2)
    closed = pool.submit(served.engine.close)
    until(lambda: not served.engine.alive)
    gated.gate.set()
    assert closed.result() is False
    for each in asked:
        reply = each.result()
        assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1
        error = reply.json()["error"]
        assert error["code"] == "shutting_down" and error["param"] is None


def test_no_room_is_503_and_no_fault_of_the_prompt() -> None:
    found = refusal(OutOfPages("the cache is full"), "prompt")
    assert found.status_code == 503 and found.param is None
    assert found.headers and int(found.headers["Retry-After"]) >= 1
    assert refusal(KvlatheError("it is wrong"), "prompt").status_code == 400
