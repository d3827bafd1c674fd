"""Laws of sleep: memory goes back, and every answer is what it would have been."""

from __future__ import annotations

import os
import queue
import re
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import cast

import pytest

from kvlathe.base import machine
from kvlathe.base.errors import Asleep, Busy, KvlatheError
from kvlathe.plan import manifest as manifests
from kvlathe.runtime.async_engine import AsyncEngine
from kvlathe.runtime.cache.block_store import StoreSizes
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.requests.request import Delta
from kvlathe.runtime.sleeping import SleepMode
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.made_once import made_once
from tests.support.preemption import preempt_all
from tests.support.prefix_cases import prefixes
from tests.support.runtime_cases import built_folder, llm, text

PROMPT = list(text(300))
LONG = SamplingParams(max_new_tokens=60, ignore_eos=True, temperature=0.8, seed=3)
CACHE = 64 << 20


@cache
def folder(kind: str) -> Path:
    def build(into: Path) -> None:
        built_folder(into, kind)

    return made_once(f"built {kind}", build)


def loaded(kind: str = "split", share: bool = False, path: Path | None = None) -> LLM:
    where = path or folder(kind)
    return LLM.load(where, CACHE, threads=1, verify=False, share_prefixes=share)


@pytest.fixture
def engine() -> Iterator[LLM]:
    with loaded() as found:
        yield found


def resident() -> int:
    """Bytes of memory of this process."""
    status = Path(f"/proc/{os.getpid()}/status").read_text("ascii")
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found
    return int(found[1]) * 1024


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_weights_and_pages_go_back_and_answers_stay_the_same(engine: LLM) -> None:
    weights = (folder("split") / "model.onnx").stat().st_size
    weights += sum(path.stat().st_size for path in folder("split").glob("*.data"))
    first = engine.generate([PROMPT] * 4, LONG)
    pages = 4 * engine.layout.bytes_for(len(PROMPT))
    before, session = resident(), weakref.ref(engine.session)
    for _ in range(2):
        engine.sleep()
        assert engine.is_sleeping and session() is None
        assert before - resident() > 0.7 * (weights + pages)
        engine.wake_up()
        assert not engine.is_sleeping
        again = engine.generate([PROMPT] * 4, LONG)
        assert [one.token_ids for one in again] == [one.token_ids for one in first]
        session = weakref.ref(engine.session)


@pytest.mark.parametrize(
    "kind",
    [
        "split",
        pytest.param("sealed", marks=pytest.mark.slow),
        pytest.param("windowed", marks=pytest.mark.slow),
        "sealed budget",
    ],
)
def test_kept_answers_go_on_after_waking_as_if_nothing_had_been(kind: str) -> None:
    with loaded(kind) as engine:
        [alone] = engine.generate([PROMPT], LONG)
        inbox: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        sequence = engine.sequence(list(PROMPT), LONG)
        request = engine.thread.submit([sequence], inbox.put)
        inbox.get()
        engine.sleep("keep")
        said = sequence.answered
        assert 0 < said < len(alone.token_ids) and not sequence.finish_reason
        later = engine.thread.submit([engine.sequence(list(PROMPT), LONG)])
        assert engine.pool.bytes_in_use == 0
        assert sequence.answered == said
        engine.wake_up()
        for one in (request, later):
            assert one.done.wait(60)
            assert one.sequences[0].answer == alone.token_ids


@pytest.mark.parametrize("room", [True, False], ids=["moved", "computed again"])
def test_kept_answers_draw_the_tokens_that_they_would_have_drawn(
    room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their random numbers, their penalties and their places in the batch, wherever in
    an answer the engine falls asleep, and however often. Pages move to the host, even
    where computing them again takes less time: in 16 bit that rounds otherwise, and one
    draw in some hundred parts there. Without room on the host they are computed
    again."""
    seeded = partial(SamplingParams, max_new_tokens=30, ignore_eos=True)
    asked = [
        (PROMPT[:90], seeded()),
        (PROMPT[9:74], seeded(temperature=1.5, seed=7, repetition_penalty=1.2)),
        (PROMPT[50:250], seeded(temperature=0.8, seed=8, presence_penalty=0.5)),
    ]
    with loaded() as engine:
        preempt_all(engine.engine.scheduler, True, monkeypatch)
        if not room:
            monkeypatch.setattr(machine, "free_bytes", lambda: 0)
        alone = [engine.generate([text], own)[0].token_ids for text, own in asked]
        inbox: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        sequences = [engine.sequence(list(text), own) for text, own in asked]
        request = engine.thread.submit(sequences, inbox.put)
        for deltas in (1, 4, 20):
            for _ in range(deltas):
                inbox.get(timeout=60)
            engine.sleep("keep")
            assert not request.done.is_set()
            assert all((one.cached > 0) == room for one in sequences)
            engine.wake_up()
        assert request.done.wait(60)
        assert [one.answer for one in sequences] == alone


def test_answers_that_sleep_ends_say_so_and_what_comes_meanwhile_waits(
    engine: LLM,
) -> None:
    served = AsyncEngine(engine, max_waiting=2)
    inbox: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    ended = served.submit([PROMPT], LONG, inbox.put)
    inbox.get()
    engine.sleep()
    assert isinstance(ended.sequences[0].error, Asleep) and ended.done.is_set()
    waits = served.submit([PROMPT], LONG, inbox.put)
    late = served.submit([PROMPT], LONG, inbox.put, seconds=0.01)
    until(late.done.is_set)
    assert late.sequences[0].finish_reason == "timeout"
    left = served.submit([PROMPT], LONG, inbox.put)
    served.cancel(left)
    until(left.done.is_set)
    assert not waits.done.is_set() and not waits.sequences[0].answered
    room = served.max_waiting + engine.limits.max_batch_size
    with pytest.raises(Busy, match="the queue is full"):
        served.submit([PROMPT] * room, LONG, inbox.put)
    engine.wake_up()
    assert waits.done.wait(60)
    assert waits.sequences[0].answer == engine.generate([PROMPT], LONG)[0].token_ids


def test_calls_that_need_a_sleeping_engine_are_refused_in_words(engine: LLM) -> None:
    engine.sleep()
    engine.sleep()  # it does already
    with pytest.raises(Asleep, match="given back until it is woken"):
        engine.logits(PROMPT, [3])
    with pytest.raises(KvlatheError, match="Choose abort or keep"):
        engine.sleep(cast(SleepMode, "wait"))
    engine.wake_up()
    engine.wake_up()
    assert len(engine.logits(PROMPT, [3])) == 1


def test_shared_prefixes_are_gone_but_for_those_on_the_host(tmp_path: Path) -> None:
    few = SamplingParams(max_new_tokens=2)
    sizes = StoreSizes(host_bytes=CACHE, folder=tmp_path, disk_bytes=CACHE)
    for stores in (None, sizes):
        with loaded(share=True) as engine:
            if stores is not None:
                engine.keep_evicted(stores)
            engine.generate([PROMPT], few)
            assert engine.pool.bytes_in_use
            engine.sleep()
            assert not engine.pool.bytes_in_use
            engine.wake_up()
            engine.generate([PROMPT], few)
            assert (prefixes(engine).hits > 0) == (stores is not None)
            engine.sleep()  # and it is closed asleep: the disk gets what the host has
    with loaded(share=True) as engine:
        engine.keep_evicted(StoreSizes(None, tmp_path, CACHE))
        engine.generate([PROMPT], few)
        assert prefixes(engine).hits > 0


def test_an_engine_that_was_built_again_does_not_wake(tmp_path: Path) -> None:
    path = tmp_path / "engine"
    shutil.copytree(folder("split"), path)
    ours = manifests.read(path)
    with loaded(path=path) as engine:
        engine.sleep()
        shutil.rmtree(path)
        shutil.copytree(folder("sealed"), path)
        with pytest.raises(KvlatheError, match="was built again"):
            engine.wake_up()
        assert engine.is_sleeping
        shutil.rmtree(path)
        shutil.copytree(folder("split"), path)
        assert manifests.read(path) == ours
        engine.wake_up()
        assert engine.generate([PROMPT], LONG)[0].token_ids


def test_an_engine_without_a_folder_does_not_sleep() -> None:
    with pytest.raises(KvlatheError, match="was not loaded from a folder"):
        llm("torch", "split").sleep()


def test_an_engine_does_not_sleep_while_pages_are_lent(engine: LLM) -> None:
    lent = engine.engine.scheduler.borrowed_pages()
    engine.thread.call(partial(lent.__enter__))
    with pytest.raises(Busy, match="a prefix is compacted"):
        engine.sleep()
    engine.thread.call(partial(lent.__exit__, None, None, None))
    table = engine.pool.open()
    engine.thread.call(partial(engine.pool.reserve, table, 5))
    with pytest.raises(Busy, match="others read its pages"):
        engine.sleep()
    assert not engine.is_sleeping and engine.generate([PROMPT], LONG)[0].token_ids
