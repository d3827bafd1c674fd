"""Laws of compacted prefixes: scores are the largest attention in transformers' float64
arithmetic, answers are those of masked attention, pages are shared and come back."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.cache.kept_pairs import kept_places
from kvlathe.runtime.requests import compaction
from kvlathe.runtime.requests.compaction import Compaction
from kvlathe.runtime.sessions.page_moves import PageMoves
from kvlathe.runtime.sessions.protocols import StepPlan
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.compaction_cases import (
    PART,
    PREFIX,
    attention_maxima,
    lanes_apart,
    masked_logits,
    prompt,
)
from tests.support.fake_session import SamplesThere
from tests.support.nightly import rest_nightly
from tests.support.prefix_cases import forget, prefixes, sharing
from tests.support.runtime_cases import llm, text

PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)
KINDS = ("compacted", "compacted alike", "sealed compacted")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "PART", PART)


# -- laws ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("backend", "kind"), [*(("torch", kind) for kind in KINDS), ("onnx", "compacted")]
)
def test_scores_are_the_largest_attention_in_float64(backend: str, kind: str) -> None:
    engine = sharing(kind, backend=backend)
    tokens = prompt()[:PREFIX]
    work = Compaction(engine.engine, engine._sequences, engine.tokenizer, tokens)
    for _ in work.steps():
        pass
    np.testing.assert_allclose(work.scores, attention_maxima(), rtol=2e-3, atol=1e-6)
    forget(engine)


@pytest.mark.parametrize(
    ("kind", "keep"),
    rest_nightly(
        itertools.product(KINDS, [0.25, 0.6]),
        ("compacted", 0.25),
        ("compacted alike", 0.6),
        ("sealed compacted", 0.6),
    ),
)
def test_answers_are_those_of_attention_with_the_dropped_pairs_masked(
    kind: str, keep: float
) -> None:
    engine, ids = sharing(kind), prompt()
    made = engine.compact(ids[:PREFIX], keep)
    apart, scores = lanes_apart(kind), attention_maxima().astype(np.float32)
    places = kept_places([scores[lanes] for lanes in apart], keep, 64)
    kept: dict[int, npt.NDArray[np.int64]] = {}
    for lanes, of_lanes in zip(apart, places, strict=True):
        kept |= dict(zip(lanes, of_lanes, strict=True))
    assert made.lane_tokens == [len(kept[lane]) for lane in range(8)]
    found = engine.logits(ids, range(PREFIX, len(ids)))
    tolerance = 0.3 if kind == "sealed compacted" else 2e-3
    np.testing.assert_allclose(found, masked_logits(ids, kept), atol=tolerance, rtol=0)
    forget(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_compacting_nothing_changes_no_answer(kind: str) -> None:
    engine, ids = sharing(kind), prompt()
    rows = range(PREFIX, len(ids))
    expected = sharing(kind).generate([ids], PARAMS)[0]
    plain = engine.logits(ids, rows)
    made = engine.compact(ids[:PREFIX], 1.0)
    assert made.kept == 1 and made.bytes == made.whole_bytes
    if kind != "sealed compacted":  # there plain logits see pages sealed one by one
        np.testing.assert_allclose(engine.logits(ids, rows), plain, atol=1e-5)
    assert engine.generate([ids], PARAMS)[0].token_ids == expected.token_ids
    forget(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_share_a_compacted_prefix_and_keep_their_position(kind: str) -> None:
    engine, ids = sharing(kind), prompt()
    engine.compact(ids[:PREFIX], 0.5)
    held = engine.pool.bytes_in_use
    cache = prefixes(engine)
    first, cached = cache.find(ids)
    second, _ = cache.find([*ids[:PREFIX], 7, 8])
    assert cached == PREFIX and first.pages == second.pages
    assert engine.pool.bytes_in_use == held
    fork = engine.pool.fork(first)
    assert fork.base is first.base
    for table in (first, second, fork):
        engine.pool.release(table)
    assert engine.pool.bytes_in_use == held
    whole = engine.pool.layout.bytes_for(PREFIX)
    assert held == pytest.approx(whole / 2, rel=0.02)
    forget(engine)


def test_blocks_after_a_compacted_prefix_are_shared_and_are_its_own() -> None:
    engine, ids = sharing("compacted"), list(text(PREFIX + 200))
    engine.generate([ids], PARAMS)  # whole blocks, computed before
    engine.compact(ids[:PREFIX], 0.3)
    cache = prefixes(engine)
    before = cache.hits
    first = engine.generate([ids], PARAMS)[0]
    again = engine.generate([ids], PARAMS)[0]
    assert cache.hits - before == PREFIX + PREFIX + 192
    assert first.token_ids == again.token_ids
    engine.compact(ids[:PREFIX], 0.6)
    before = cache.hits
    engine.generate([ids], PARAMS)
    assert cache.hits - before == PREFIX
    forget(engine)


def test_another_tenant_computes_the_prefix_itself() -> None:
    engine, ids = sharing("compacted"), prompt()
    engine.compact(ids[:PREFIX], 0.3, b"one")
    cache = prefixes(engine)
    assert cache.find(ids)[1] == cache.find(ids, b"another")[1] == 0
    table, cached = cache.find(ids, b"one")
    assert cached == PREFIX
    engine.pool.release(table)
    forget(engine)


def test_a_sequence_that_is_swapped_keeps_its_prefix() -> None:
    engine, ids = sharing("compacted"), prompt()
    engine.compact(ids[:PREFIX], 0.3)
    expected = engine.generate([ids], PARAMS)[0].token_ids
    scheduler, core = engine.engine.scheduler, engine.engine
    sequence = engine.sequence(ids, PARAMS)
    scheduler.add(sequence)
    for _ in range(3):
        core.step()
    scheduler.preempt()
    assert sequence.cached > PREFIX
    while not sequence.finish_reason:
        core.step()
    assert sequence.answer == expected
    forget(engine)


def test_a_compaction_that_finds_no_room_gives_everything_back() -> None:
    engine = sharing("compacted", tokens=64)
    with pytest.raises(KvlatheError):
        engine.compact(prompt()[:PREFIX], 0.5)
    assert engine.pool.bytes_in_use == 0


@pytest.mark.parametrize(
    ("kind", "tokens", "keep", "said"),
    [
        ("one", PREFIX, None, "keeps prefixes whole"),
        ("compacted", 40, None, "blocks of 64"),
        ("sealed compacted", 400, None, r"blocks of 512[\s\S]*--prefill-chunk"),
        ("compacted", PREFIX, 1.5, "a share"),
        ("compacted", PREFIX, 0.0, "a share"),
    ],
)
def test_compaction_refuses_plans_lengths_and_shares_that_it_cannot_take(
    kind: str, tokens: int, keep: float | None, said: str
) -> None:
    engine = sharing(kind)
    with pytest.raises(KvlatheError, match=said):
        engine.compact(prompt()[:tokens], keep)


def test_an_engine_without_shared_prefixes_says_so() -> None:
    with pytest.raises(KvlatheError, match="keeps no prefixes"):
        llm("torch", "compacted").compact(prompt()[:PREFIX])


class QueuesOnly:
    """A session as if on a GPU: what it is given costs a second each, and is computed
    where somebody waits. Observed steps are waited for at once. ``now`` is the clock."""

    def __init__(self, session: Any) -> None:  # noqa: ANN401  (any session)
        self.session, self.now, self.owed = session, 100.0, 0

    def run(self, step: StepPlan) -> npt.NDArray[np.float32]:
        self.owed += 1
        rows = self.session.run(step)
        if step.observed_attention is not None:
            self.lost()
        return rows

    def apply(self, moves: Sequence[PageMoves]) -> None:
        self.owed += 1
        self.session.apply(moves)

    def lost(self) -> str:
        self.now += self.owed
        self.owed = 0
        return ""

    def perf_counter(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (the session's own)
        return getattr(self.session, name)


def test_seconds_are_those_of_work_that_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = sharing("compacted alike")
    queue: Any = QueuesOnly(engine.session)
    engine.engine.session = queue
    queue.owed = 7  # of somebody else
    monkeypatch.setattr(compaction, "time", queue)
    made = engine.compact(prompt()[:PREFIX], 0.5)
    parts, moves = -(-PREFIX // PART), 1
    assert made.prefill_seconds == 1
    assert made.seconds == 1 + parts + moves
    forget(engine)


BESIDE = itertools.product(("compacted", "sealed compacted"), (False, True))


@pytest.mark.parametrize(
    ("kind", "samples"), rest_nightly(BESIDE, ("sealed compacted", True))
)
def test_requests_and_a_compaction_beside_them_come_to_what_each_does_alone(
    kind: str, samples: bool
) -> None:
    """``samples``: where the logits are, so that a step of the others flies while the
    compaction takes its own."""
    others = [list(text(60 + 30 * i, 4000)) for i in range(3)]
    params = [
        SamplingParams(max_new_tokens=40, ignore_eos=True),
        SamplingParams(max_new_tokens=30, ignore_eos=True, temperature=0.8, seed=2),
        SamplingParams(max_new_tokens=35, ignore_eos=True, frequency_penalty=0.5),
    ]
    alone = [one.token_ids for one in llm("torch", kind).generate(others, params)]
    apart = sharing(kind)
    made = apart.compact(prompt()[:PREFIX], 0.5)
    [behind] = apart.generate([prompt()], PARAMS)
    engine = sharing(kind)
    if samples:
        engine.engine.session = SamplesThere(engine.session)
    begun, taken = threading.Event(), itertools.count()
    requests = [engine.sequence(*one) for one in zip(others, params, strict=True)]
    pending = engine.thread.submit(
        requests, lambda _: begun.set() if next(taken) == 3 else None
    )
    assert begun.wait(30)
    beside = engine.compact(prompt()[:PREFIX], 0.5)
    running = [request.answered for request in requests]
    engine.thread.wait(pending)
    assert [request.answer for request in requests] == alone
    assert max(running) > 1
    assert (beside.lane_tokens, beside.bytes) == (made.lane_tokens, made.bytes)
    assert engine.generate([prompt()], PARAMS)[0].token_ids == behind.token_ids
    for one in (apart, engine):
        forget(one)
