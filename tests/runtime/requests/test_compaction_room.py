"""Compaction in a cache that is short of room: it and everybody else come to their
ends, or it is refused before it disturbs anybody."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers.processors import TemplateProcessing

from kvlathe.base.errors import KvlatheError
from kvlathe.base.memory import OutOfMemory
from kvlathe.runtime.cache.prefix import PrefixCache
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.requests import compaction
from kvlathe.runtime.requests.compaction import NEXT, Compaction
from kvlathe.runtime.sessions.protocols import StepPlan
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.support.runtime_cases import LIMITS, MODEL, decoder, session, text


def cache_of(kind: str, size: int) -> LLM:
    """An engine with a cache of ``size`` bytes."""
    plan = decoder(kind).plan
    made = LLM(
        session("torch", kind, size, LIMITS), plan, LIMITS, Tokenizer(MODEL), size
    )
    made.engine.scheduler.prefixes = PrefixCache(made.pool)
    return made


class Starved:
    """The session of ``llm`` finds no memory for steps of more than ``affordable``
    tokens. ``tokens``: of each step that was tried."""

    def __init__(self, llm: LLM, affordable: int) -> None:
        self.affordable, self.tokens = affordable, list[int]()
        self.session: Any = llm.session
        self.session.run, self._run = self.run, self.session.run

    def run(self, step: StepPlan) -> npt.NDArray[np.float32]:
        self.tokens.append(len(step.input_ids))
        logits = self._run(step)  # its pages are written to
        if len(step.input_ids) > self.affordable:
            raise RuntimeError("CUDA out of memory")
        return logits


@pytest.mark.slow
@pytest.mark.parametrize("mebibytes", [8, pytest.param(10, marks=pytest.mark.nightly)])
def test_others_wait_for_the_room_of_a_compaction_and_end(mebibytes: int) -> None:
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    with cache_of("compacted", mebibytes << 20) as llm:
        others = [llm.sequence(list(text(300, 100 * i)), params) for i in range(4)]
        request = llm.thread.submit(others)
        made = llm.compact(list(text(896)), 0.3)
        assert request.done.wait(60) and made.tokens == 896
        assert [one.finish_reason for one in others] == ["length"] * 4
        assert llm.engine.scheduler.preemptions > 0


def test_a_compaction_that_cannot_fit_preempts_nobody() -> None:
    with cache_of("sealed compacted", 8 << 20) as llm:
        assert llm.pool.has_room_for(3000, 3000)  # quantized it would fit
        with pytest.raises(KvlatheError, match=r"unquantized.*8,388,608"):
            llm.compact(list(text(3000)), 0.3)
        assert not llm.engine.scheduler.preemptions


def test_parts_shrink_to_the_room_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "PART", 896)
    with cache_of("compacted", 6 << 20) as llm:
        prefix = list(text(896))
        work = Compaction(llm.engine, llm._sequences, llm.tokenizer, prefix)
        assert work._part < 896
        assert llm.compact(prefix, 0.3).tokens == 896


def test_a_prefix_in_use_is_not_given_up() -> None:
    with cache_of("compacted", 1 << 24) as llm:
        ids = list(text(512))
        llm.compact(ids, 0.5)
        prefixes = llm.engine.scheduler.prefixes
        assert prefixes is not None
        table, cached = prefixes.find([*ids, 7])
        assert cached == 512 and not prefixes.reclaim()
        llm.pool.release(table)
        assert prefixes.reclaim() and not llm.pool.bytes_in_use


def test_the_instruction_has_no_beginning_of_text() -> None:
    with cache_of("compacted", 1 << 24) as llm:
        work = Compaction(
            llm.engine, llm._sequences, llm.tokenizer, list(text(512)), 0.5
        )
        plain = llm.tokenizer.encode(NEXT)
        begins = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        llm.tokenizer.backend.post_processor = begins
        assert llm.tokenizer.encode(NEXT) == [1, *plain]
        assert work._said(NEXT) == plain


@pytest.mark.parametrize(
    ("kind", "affordable"), [("compacted", 90), ("sealed compacted", 200)]
)
def test_a_compaction_short_of_memory_takes_smaller_steps_alone(
    kind: str, affordable: int
) -> None:
    """The same pairs stay as where there is room."""
    ids = list(text(512))
    found: list[tuple[Compaction, object]] = []
    for limit in (1 << 30, affordable):
        with cache_of(kind, 1 << 25) as llm:
            starved = Starved(llm, limit)
            work = Compaction(llm.engine, llm._sequences, llm.tokenizer, ids, 0.4)
            steps = work.steps()
            try:
                while True:
                    next(steps)
            except StopIteration as end:
                made = end.value
            found.append((work, (made.tokens, made.lane_tokens, made.bytes)))
            assert llm.engine.scheduler.room.of(1024) == 1024
    failed = [tokens for tokens in starved.tokens if tokens > affordable]
    assert failed and len(failed) == len(set(failed))  # no size twice
    (plenty, expected), (scarce, same) = found
    assert same == expected
    np.testing.assert_allclose(scarce.scores, plenty.scores, rtol=1e-4, atol=1e-6)


def test_a_compaction_without_memory_for_a_page_fails_alone() -> None:
    with cache_of("compacted", 1 << 24) as llm:
        starved, ids = Starved(llm, 63), list(text(512))
        with pytest.raises(OutOfMemory, match=r"prefix of 512 tokens: CUDA out of"):
            llm.compact(ids, 0.5)
        assert starved.tokens == [512, 256, 128, 64]
        assert not llm.pool.bytes_in_use and llm.engine.scheduler.room.of(1024) == 1024
        starved.affordable = 1024
        assert llm.compact(ids, 0.5).tokens == 512


def test_steps_of_a_compaction_are_no_larger_than_the_schedulers() -> None:
    with cache_of("compacted", 1 << 24) as llm:
        starved = Starved(llm, 1024)
        llm.engine.scheduler.room.failed(200)
        llm.compact(list(text(512)), 0.5)
        assert max(starved.tokens) == 100
