"""Laws of the engine's thread: answers as alone, whoever leaves leaves nothing behind,
whoever fails fails alone."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from kvlathe.base.errors import Busy, KvlatheError
from kvlathe.runtime.async_engine import AsyncEngine
from kvlathe.runtime.cache.prefix import PrefixCache
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.requests.engine_thread import Pace
from kvlathe.runtime.requests.request import Delta, Request
from kvlathe.runtime.sessions.protocols import StepPlan
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.nightly import rest_nightly
from tests.support.runtime_cases import LIMITS, llm, text

PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=800, ignore_eos=True)


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    with AsyncEngine(llm("torch", "split"), max_waiting=4) as running:
        yield running
    assert running.llm.pool.bytes_in_use == 0 and not running.open


class Answers:
    """Collects the deltas of a request, by index."""

    def __init__(self) -> None:
        self.text: dict[int, str] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Delta] = {}
        self.begun = threading.Event()

    def __call__(self, delta: Delta) -> None:
        assert delta.index not in self.ends
        self.text[delta.index] = self.text.get(delta.index, "") + delta.text
        self.tokens.setdefault(delta.index, []).extend(delta.token_ids)
        self.begun.set()
        if delta.finish_reason:
            self.ends[delta.index] = delta


def wait(request: Request) -> None:
    assert request.done.wait(60)


def test_answers_are_those_of_the_llm_alone(engine: AsyncEngine) -> None:
    prompts = [list(text(n, 40 * n)) for n in (5, 90, 300)]
    each = [
        PARAMS,
        dataclasses.replace(PARAMS, temperature=0.9, seed=3),
        dataclasses.replace(PARAMS, stop=("e",)),
    ]
    found = [Answers() for _ in prompts]
    for request in [
        engine.submit([p], s, a) for p, s, a in zip(prompts, each, found, strict=True)
    ]:
        wait(request)
    for prompt, params, answers in zip(prompts, each, found, strict=True):
        alone = llm("torch", "split").generate([prompt], params)[0]
        assert (answers.tokens[0], answers.text[0]) == (alone.token_ids, alone.text)
        assert answers.ends[0].finish_reason == alone.finish_reason


@pytest.mark.parametrize("kind", rest_nightly(["split", "sealed"], "sealed"))
def test_several_answers_of_one_prompt_compute_it_once(kind: str) -> None:
    model, prompt = llm("torch", kind), list(text(130))
    params = dataclasses.replace(PARAMS, temperature=1.0, seed=7)
    run, computed = model.session.run, []

    def counting(step: StepPlan) -> npt.NDArray[np.float32]:
        computed.append(int(step.cu_seqlens_q[-1]))
        return run(step)

    model.session.run = counting
    with AsyncEngine(model) as engine:
        wait(
            engine.submit([prompt], params, found := Answers(), n=11)
        )  # more than run at once
    assert sum(computed) == 130 + 11 * 11 and model.pool.bytes_in_use == 0
    for i in range(11):
        alone = llm("torch", kind).generate(
            [prompt], dataclasses.replace(params, seed=7 + i)
        )[0]
        assert found.tokens[i] == alone.token_ids
    assert len({tuple(tokens) for tokens in found.tokens.values()}) > 1


def test_pages_that_are_only_kept_do_not_count_as_used() -> None:
    """Else a cache looks full for ever, and whoever adds machines by that adds them for
    ever."""
    made = llm("torch", "split")
    made.engine.scheduler.prefixes = PrefixCache(made.pool)
    with AsyncEngine(made) as engine:
        seen = Answers()
        request = engine.submit([text(300)], LONG, seen)
        assert seen.begun.wait(60) and 0 < engine.bytes_used <= made.pool.bytes_in_use
        engine.cancel(request)
        wait(request)
        assert engine.bytes_used == 0 < made.pool.bytes_in_use


def test_a_cancelled_request_ends_at_once_and_gives_its_pages_back(
    engine: AsyncEngine,
) -> None:
    request = engine.submit([list(text(50))], LONG, found := Answers(), n=2)
    assert found.begun.wait(60)
    engine.cancel(request)
    wait(request)
    assert [end.finish_reason for end in found.ends.values()] == ["cancelled"] * 2
    assert engine.llm.pool.bytes_in_use == 0
    engine.cancel(request)  # again: harmless


def test_a_deadline_ends_what_runs_and_what_waits(engine: AsyncEngine) -> None:
    ahead = engine.submit([list(text(20, i)) for i in range(8)], LONG, Answers())
    late = engine.submit([list(text(9))], PARAMS, found := Answers(), seconds=0.05)
    wait(late)
    assert found.ends[0].finish_reason == "timeout" and not found.tokens[0]
    wait(engine.submit([list(text(9))], LONG, found := Answers(), seconds=0.0))
    assert found.ends[0].finish_reason == "timeout"
    engine.cancel(ahead)
    wait(ahead)


def test_a_full_queue_refuses_and_says_when_to_come_back(engine: AsyncEngine) -> None:
    first = engine.submit(
        [list(text(20, i)) for i in range(8)], LONG, found := Answers()
    )
    assert found.begun.wait(60)
    waiting = engine.submit([[1, 2, 3]], PARAMS, Answers(), n=4)
    with pytest.raises(Busy, match="queue is full") as refused:
        engine.submit([[1, 2, 3]], PARAMS, Answers())
    assert (
        refused.value.retry_after >= 1 and engine.waiting == 4 and engine.running == 8
    )
    engine.cancel(first)
    wait(waiting)


def test_idle_time_is_not_taken_for_slow_answers(engine: AsyncEngine) -> None:
    """Else the first who is told to come back after a quiet night waits a minute."""
    pace = engine.llm.thread.pace = Pace()
    pace._last -= 3600
    for _ in range(2):
        wait(engine.submit([text(5)], PARAMS, Answers()))
        assert pace.seconds < 60  # a tenth of the hour would be 360


def test_prompts_that_cannot_be_served_are_refused_in_the_callers_thread(
    engine: AsyncEngine,
) -> None:
    with pytest.raises(KvlatheError, match="max-seq-len"):
        engine.submit(
            [[5], [5] * 3000], dataclasses.replace(LONG, max_new_tokens=2000), Answers()
        )
    assert engine.open == 0


def test_a_request_that_breaks_the_engine_fails_alone(engine: AsyncEngine) -> None:
    run = engine.llm.session.run

    def breaking(step: StepPlan) -> npt.NDArray[np.float32]:
        if 8191 in step.input_ids:
            raise RuntimeError("the engine broke")
        return run(step)

    engine.llm.session.run = breaking
    well = engine.submit([list(text(30)), list(text(40, 7))], PARAMS, good := Answers())
    ill = engine.submit([[8191, 5]], PARAMS, bad := Answers())
    wait(well)
    wait(ill)
    assert (
        bad.ends[0].finish_reason == "error"
        and str(bad.ends[0].error) == "the engine broke"
    )
    expected = llm("torch", "split").generate(
        [list(text(30)), list(text(40, 7))], PARAMS
    )
    assert [good.tokens[i] for i in (0, 1)] == [a.token_ids for a in expected]


def test_a_receiver_that_fails_cancels_its_request_only(engine: AsyncEngine) -> None:
    def broken(delta: Delta) -> None:
        raise ValueError("gone")

    request = engine.submit([list(text(30))], LONG, broken)
    wait(engine.submit([list(text(30))], PARAMS, found := Answers()))
    wait(request)
    assert len(found.tokens[0]) == 12 and engine.alive


def test_draining_finishes_what_was_begun() -> None:
    engine = AsyncEngine(llm("torch", "one"))
    request = engine.submit([list(text(30))], PARAMS, found := Answers())
    engine.drain()
    with pytest.raises(Busy, match="shutting down"):
        engine.submit([[5]], PARAMS, Answers())
    assert (
        engine.close(60)
        and request.done.is_set()
        and found.ends[0].finish_reason == "length"
    )


def test_closing_cancels_what_is_left() -> None:
    engine = AsyncEngine(llm("torch", "one"))
    request = engine.submit([list(text(30))], LONG, found := Answers())
    assert (
        not engine.close()
        and request.done.is_set()
        and found.ends[0].finish_reason == "cancelled"
    )
    assert engine.llm.pool.bytes_in_use == 0 and not engine.alive


def test_streams_in_asyncio_and_leaving_one_cancels_it(engine: AsyncEngine) -> None:
    async def read(start: int) -> str:
        return "".join(
            [
                delta.text
                async for delta in engine.stream([list(text(40, start))], PARAMS)
            ]
        )

    async def leave() -> None:
        stream = engine.stream([list(text(40))], LONG)
        await anext(stream)
        await stream.aclose()

    async def everything() -> list[str]:
        *texts, _ = await asyncio.gather(read(0), read(50), read(100), leave())
        return texts

    expected = [
        a.text
        for a in llm("torch", "split").generate(
            [list(text(40, s)) for s in (0, 50, 100)], PARAMS
        )
    ]
    assert asyncio.run(everything()) == expected
    until = time.perf_counter() + 60
    while engine.open and time.perf_counter() < until:
        time.sleep(0.01)


def test_more_prompts_than_run_at_once_take_turns() -> None:
    params = dataclasses.replace(PARAMS, max_new_tokens=3)
    prompts = [list(text(20, 30 * i)) for i in range(2 * LIMITS.max_batch_size)]
    with AsyncEngine(llm("torch", "one", tokens=256)) as engine:
        wait(engine.submit(prompts, params, found := Answers()))
    expected: LLM = llm("torch", "one")
    for i in (0, 9, 15):
        assert found.tokens[i] == expected.generate([prompts[i]], params)[0].token_ids
