"""Laws of an LLM in many hands: answers as alone, nobody waits for ever, nothing is
left."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import pytest

from kvlathe.base.errors import EngineStopped, KvlatheError
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.requests.request import Delta
from kvlathe.runtime.sessions.protocols import StepPlan
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.tokenizer import TextStream
from tests.support.nightly import rest_nightly
from tests.support.runtime_cases import LIMITS, llm, text

ROOT = Path(__file__).resolve().parents[3]
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=2000, ignore_eos=True)
PROMPTS = [list(text(20 + i, 30 * i)) for i in range(2 * LIMITS.max_batch_size)]


@pytest.fixture
def engine() -> Iterator[LLM]:
    with llm("torch", "split") as opened:
        yield opened
    assert opened.pool.bytes_in_use == 0 and not opened.thread.open


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """The answer to each prompt, computed with nobody else there."""
    with llm("torch", "split") as single:
        return [single.generate([prompt], PARAMS)[0].token_ids for prompt in PROMPTS]


def until(condition: Callable[[], object], seconds: float = 30) -> bool:
    """Whether a condition comes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def engine_threads() -> int:
    return sum(thread.name == "kvlathe-engine" for thread in threading.enumerate())


# -- answers ---------------------------------------------------------------------------
def test_threads_get_the_answers_they_would_get_alone(
    engine: LLM, alone: list[list[int]]
) -> None:
    def ask(i: int) -> list[int]:
        return engine.generate([PROMPTS[i % len(PROMPTS)]], PARAMS)[0].token_ids

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(ask, range(40)))
    assert answers == [alone[i % len(PROMPTS)] for i in range(40)]


def test_more_prompts_than_run_at_once_are_answered_in_order(
    engine: LLM, alone: list[list[int]]
) -> None:
    assert len(PROMPTS) > LIMITS.max_batch_size
    answers = engine.generate(PROMPTS, PARAMS)
    assert [answer.token_ids for answer in answers] == alone


def test_tasks_and_threads_share_the_engine(
    engine: LLM, alone: list[list[int]]
) -> None:
    async def everything() -> None:
        whole, thread, pieces = await asyncio.gather(
            engine.agenerate(PROMPTS[:3], PARAMS),
            asyncio.to_thread(engine.generate, PROMPTS[3:6], PARAMS),
            streamed(PROMPTS[6]),
        )
        assert [answer.token_ids for answer in (*whole, *thread)] == alone[:6]
        assert pieces == engine.generate([PROMPTS[6]], PARAMS)[0].text

    async def streamed(prompt: list[int]) -> str:
        return "".join([piece async for piece in engine.astream(prompt, PARAMS)])

    asyncio.run(everything())


def test_a_task_that_is_cancelled_takes_its_pages_with_it(engine: LLM) -> None:
    async def leave() -> None:
        task = asyncio.ensure_future(engine.agenerate(PROMPTS[:2], LONG))
        while not engine.pool.bytes_in_use:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert until(lambda: not engine.thread.open)


def test_a_stream_that_is_left_takes_its_pages_with_it(engine: LLM) -> None:
    stream = engine.stream(PROMPTS[0], LONG)
    next(stream)
    stream.close()
    assert not engine.thread.open and engine.pool.bytes_in_use == 0


@pytest.mark.parametrize(
    "kind", rest_nightly(["split", "sealed", "budget"], "sealed", "budget")
)
def test_logits_are_exact_beside_running_requests(kind: str) -> None:
    """Even where the cache has no room for both: who runs makes room, and goes on."""
    tokens, rows = list(text(200)), range(150, 199)
    expected = llm("torch", kind, tokens=512).logits(tokens, rows)
    params = dataclasses.replace(PARAMS, max_new_tokens=100)
    with llm("torch", kind, tokens=256) as engine:
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(engine.generate, [PROMPTS[0]], params)
            assert until(lambda: engine.pool.bytes_in_use)
            assert np.array_equal(engine.logits(tokens, rows), expected)
            whole = answer.result()[0].token_ids
        assert engine.pool.bytes_in_use == 0
        assert engine.generate([PROMPTS[0]], params)[0].token_ids == whole


# -- failures --------------------------------------------------------------------------
def test_a_step_that_fails_reaches_its_caller_alone(
    engine: LLM, alone: list[list[int]]
) -> None:
    run = engine.session.run

    def breaking(step: StepPlan) -> npt.NDArray[np.float32]:
        if 8191 in step.input_ids:
            raise RuntimeError("the engine broke")
        return run(step)

    engine.session.run = breaking
    with ThreadPoolExecutor(3) as threads:
        good = threads.submit(engine.generate, PROMPTS[:4], PARAMS)
        bad = threads.submit(engine.generate, [[8191, 5], PROMPTS[5]], LONG)
        pieces = threads.submit(lambda: list(engine.stream([8191], LONG)))
        for failed in (bad, pieces):
            with pytest.raises(RuntimeError, match="the engine broke"):
                failed.result()
        assert [answer.token_ids for answer in good.result()] == alone[:4]


def test_a_fault_of_the_thread_reaches_every_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = llm("torch", "split")

    def fault() -> None:
        raise SystemExit("no more")

    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(engine.generate, [p], LONG) for p in PROMPTS[:3]]
        assert until(lambda: engine.thread.open == 3)
        monkeypatch.setattr(engine.engine, "step", fault)
        for caller in waiting:
            with pytest.raises(EngineStopped, match="no more"):
                caller.result(30)
    with pytest.raises(KvlatheError, match="the engine has stopped"):
        engine.generate([PROMPTS[0]], PARAMS)
    with pytest.raises(KvlatheError, match="the engine has stopped"):
        engine.logits(PROMPTS[0], [3])


def test_answers_that_ended_before_a_failing_step_are_delivered(
    engine: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = engine.sequence([*PROMPTS[0]], LONG)
    late.deadline = time.perf_counter()

    def faulty() -> NoReturn:
        monkeypatch.undo()
        raise ValueError("no more")

    monkeypatch.setattr(engine.engine.scheduler, "schedule", faulty)
    request = engine.thread.submit([late])
    assert request.done.wait(30) and late.finish_reason == "timeout"


def test_an_interrupt_ends_the_request_and_is_raised(engine: LLM) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        assert until(lambda: engine.pool.bytes_in_use)
        signal.pthread_kill(main, signal.SIGINT)

    for wait in (
        lambda: engine.generate(PROMPTS, LONG),
        lambda: list(engine.stream(PROMPTS[0], LONG)),
    ):
        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            wait()
        interrupter.join()
        # The engine's thread ends what it runs after the step that it is in.
        assert until(lambda: not engine.thread.open)
        assert until(lambda: engine.pool.bytes_in_use == 0)
    assert engine.generate([PROMPTS[0]], PARAMS)[0].token_ids


def test_a_callback_that_waits_for_the_engine_is_refused(engine: LLM) -> None:
    refused: list[KvlatheError] = []

    def ask(delta: Delta) -> None:
        for wait in (
            lambda: engine.generate([PROMPTS[0]], PARAMS),
            lambda: list(engine.stream(PROMPTS[0], PARAMS)),
            lambda: engine.logits(PROMPTS[0], [3]),
        ):
            with pytest.raises(KvlatheError, match="waits for the engine") as said:
                wait()
            refused.append(said.value)

    sequence = engine.sequence([*PROMPTS[1]], PARAMS)
    assert engine.thread.submit([sequence], ask).done.wait(30)
    assert until(lambda: len(refused) >= 3)


# -- the end ---------------------------------------------------------------------------
def test_a_closed_engine_refuses_and_tells_who_waits() -> None:
    with llm("torch", "split") as engine, ThreadPoolExecutor(2) as threads:
        answer = threads.submit(engine.generate, [PROMPTS[0]], LONG)
        pieces = threads.submit(lambda: list(engine.stream(PROMPTS[1], LONG)))
        assert until(lambda: engine.thread.open == 2)
        engine.close()
        for caller in (answer, pieces):
            with pytest.raises(KvlatheError, match="the engine was closed"):
                caller.result(30)
    engine.close()  # again: harmless
    assert engine.pool.bytes_in_use == 0
    for ask in (
        lambda: engine.generate([PROMPTS[0]], PARAMS),
        lambda: list(engine.stream(PROMPTS[0], PARAMS)),
        lambda: engine.logits(PROMPTS[0], [3]),
        lambda: asyncio.run(engine.agenerate([PROMPTS[0]], PARAMS)),
    ):
        with pytest.raises(KvlatheError, match="the engine is closed"):
            ask()


def test_a_forgotten_llm_takes_its_thread_with_it() -> None:
    gc.collect()
    before = engine_threads()
    engine = llm("torch", "split")
    engine.generate([PROMPTS[0]], PARAMS)
    engine.logits(PROMPTS[0], [3])
    assert engine_threads() == before + 1
    del engine
    gc.collect()
    assert until(lambda: engine_threads() == before)


EXIT = """
import threading, time
from tests.support.runtime_cases import llm
from kvlathe.runtime.requests import engine_thread
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.tokenizer import TextStream
class Late(type(engine_thread._running)):  # whoever asks is slow where it counts
    def add(self, thread):
        time.sleep(0.3)
        super().add(thread)
engine_thread._running = Late()
engine = llm("torch", "one")
params = SamplingParams(max_new_tokens=3000, ignore_eos=True)
ask = lambda: engine.generate([[5, 6, 7]], params)
threading.Thread(target=ask, daemon=True).start()
while not engine.pool.bytes_in_use:
    time.sleep(0.01)
print("bye")
"""


@pytest.mark.nightly
def test_the_interpreter_ends_while_an_engine_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXIT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "bye"), done.stderr


@pytest.mark.parametrize("where", ["push", "close"])
def test_a_text_that_cannot_be_decoded_ends_its_own_request_alone(
    engine: LLM, alone: list[list[int]], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokenizer's library panics at a token, which is a refusal by then."""
    sequences = [engine.sequence([*prompt], PARAMS) for prompt in PROMPTS[:4]]

    def refused(*_: object) -> NoReturn:
        raise KvlatheError("tokens cannot be decoded")

    broken = sequences[2].text
    assert broken is not None
    own = getattr(TextStream, where)

    def maybe(stream: TextStream, *given: int) -> object:
        asked = stream is broken and (where == "close" or sequences[2].answered > 2)
        return refused() if asked else own(stream, *given)

    monkeypatch.setattr(TextStream, where, maybe)
    done = engine.thread.submit(sequences, lambda _: None)
    assert done.done.wait(60)
    assert sequences[2].finish_reason == "error"
    assert "cannot be decoded" in str(sequences[2].error)
    for index in (0, 1, 3):
        assert sequences[index].finish_reason == "length"
        assert sequences[index].answer == alone[index]
    assert engine.generate([PROMPTS[0]], PARAMS)[0].token_ids == alone[0]
