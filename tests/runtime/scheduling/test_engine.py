"""Laws of the loop, on the shipped small model: paged = at once, alone = in company,
and nothing is left behind."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.scheduling.admission import Costs
from kvlathe.runtime.sessions.host.onnx import Graph, OrtSession
from kvlathe.runtime.sessions.protocols import StepPlan
from kvlathe.runtime.text.sampler import Sampler
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.nightly import rest_nightly
from tests.support.runtime_cases import (
    BACKENDS,
    LIMITS,
    RANKED,
    at_once,
    decoder,
    forced,
    llm,
    session,
    text,
)

LENGTHS = (3, 64, 130, 700)


def ragged(seed: int) -> Iterator[list[int]]:
    """Chunk sizes for LENGTHS, without end: prompts in pieces of any size, single
    tokens among them."""
    random = np.random.default_rng(seed)
    while True:
        yield [int(random.choice([0, 1, 1, 17, 64, 200])) for _ in LENGTHS]


def until_done(sizes: Iterator[list[int]]) -> Iterator[list[int]]:
    left = np.array(LENGTHS)
    while left.any():
        step = next(sizes)
        left = np.maximum(left - step, 0)
        yield step


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", rest_nightly(["one", "split"], "split"))
def test_paged_in_any_chunks_equals_at_once(backend: str, kind: str) -> None:
    engine = llm(backend, kind)
    texts = [text(n, 100 * i) for i, n in enumerate(LENGTHS)]
    for i, logits in enumerate(forced(engine, texts, until_done(ragged(1)))):
        assert np.abs(logits - at_once(LENGTHS[i], 100 * i)).max() < 1e-3
    assert engine.pool.bytes_in_use == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_oracle_is_the_engine(backend: str) -> None:
    rows = [699, 0, 63, 64, 512]
    assert (
        np.abs(llm(backend, "split").logits(text(700), rows) - at_once(700)[rows]).max()
        < 1e-3
    )


@pytest.mark.parametrize("kind", ["split", "sealed", RANKED[0]])
def test_logits_in_blocks_are_those_of_the_whole(kind: str) -> None:
    """Blocks of any size, and gaps between them; one left early gives its pages
    back."""
    engine = llm("torch", kind)
    blocks = [range(299, 300), range(300, 364), range(370, 371), range(371, 420)]
    rows = [row for block in blocks for row in block]
    texts = [list(text(420, 50 * i)) for i in range(3)]
    wholes = [engine.logits(ids, rows) for ids in texts]
    found = list(engine.logits_in_blocks(texts, blocks))
    assert [x.shape[:2] for x in found] == [(3, len(block)) for block in blocks]
    for i, whole in enumerate(wholes):
        joined = np.concatenate([block[i] for block in found])
        # Other products in float32 may turn a code.
        difference = np.abs(joined - whole)
        assert np.sqrt(np.square(difference).mean()) < 1e-3 and difference.max() < 0.02
    asked = engine.logits_in_blocks(texts, blocks)
    next(asked)
    assert engine.pool.bytes_in_use > 0
    asked.close()
    assert engine.pool.bytes_in_use == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_answers_do_not_depend_on_the_batch(backend: str) -> None:
    engine = llm(backend, "split")
    prompts = [list(text(n, 50 * n)) for n in (5, 90, 300, 64)]
    params = [
        SamplingParams(max_new_tokens=12, ignore_eos=True),
        SamplingParams(
            max_new_tokens=20, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True
        ),
        SamplingParams(
            max_new_tokens=9, temperature=1.2, top_k=40, seed=6, ignore_eos=True
        ),
        SamplingParams(max_new_tokens=15, repetition_penalty=1.3, ignore_eos=True),
    ]
    together = engine.generate(prompts, params)
    for prompt, each, answer in zip(prompts, params, together, strict=True):
        alone = engine.generate([prompt], each)[0]
        assert (
            alone.token_ids == answer.token_ids
            and len(alone.token_ids) == each.max_new_tokens
        )
        assert alone.text == answer.text == engine.tokenizer.decode(alone.token_ids)
    assert engine.pool.bytes_in_use == 0


def test_greedy_answers_are_the_argmax_of_one_pass() -> None:
    engine = llm("torch", "one")
    answer = engine.generate(
        [list(text(40))], SamplingParams(max_new_tokens=8, logprobs=2, ignore_eos=True)
    )[0]
    ids = [*text(40), *answer.token_ids]
    logits = decoder("one").logits(ids, range(39, 47))
    assert answer.token_ids == logits.argmax(-1).tolist()
    assert answer.logprobs is not None
    for row, entry, token in zip(
        logits.double().log_softmax(-1), answer.logprobs, answer.token_ids, strict=True
    ):
        assert entry.token_id == token == entry.top[0][0] and len(entry.top) == 2
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)


@pytest.mark.parametrize(
    "kind",
    rest_nightly(
        ["one", "split", "sealed", "sealed split", *RANKED],
        "split",
        "sealed split",
        "sealed budget",
    ),
)
def test_the_cache_holds_what_the_layout_promises(kind: str) -> None:
    engine = llm("torch", kind)
    prompt, new = (300, 90) if kind in RANKED else (100, 40)
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    sequence = engine.sequence(list(text(prompt)), params)
    engine.engine.scheduler.add(sequence)
    while not sequence.finish_reason:
        engine.engine.step()
        if sequence.answered and not sequence.finish_reason:
            cached, lengths = sequence.cached, sequence.table.lengths
            assert engine.pool.bytes_in_use == engine.layout.bytes_for(cached)
            held = engine.layout.all_held(cached)
            assert lengths == held
    assert engine.pool.bytes_in_use == 0


# -- memory ----------------------------------------------------------------------------
def test_requests_wait_for_room_and_answers_do_not_change() -> None:
    prompts = [list(text(120 + 10 * i, 77 * i)) for i in range(4)]
    params = SamplingParams(max_new_tokens=10, ignore_eos=True)
    roomy = llm("torch", "split").generate(prompts, params)
    tight = llm("torch", "split", tokens=64)
    running = []
    step = tight.engine.step

    def watched() -> list:
        grown = step()
        running.append(len(tight.engine.scheduler.running))
        return grown

    tight.engine.step = watched
    assert [a.token_ids for a in tight.generate(prompts, params)] == [
        a.token_ids for a in roomy
    ]
    assert max(running) < 4 and tight.pool.bytes_in_use == 0


SENT_AWAY = ["split", "sealed", "coded", "threes", "windowed", "sealed windows"]


@pytest.mark.parametrize(
    "kind", rest_nightly([*SENT_AWAY, *RANKED], "sealed windows", "sealed budget")
)
def test_a_sequence_that_was_sent_away_goes_on_as_if_nothing_had_happened(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed again and moved to the host by turns, where the plan allows both."""
    prompts = [list(text(400 if kind in RANKED else 100)), list(text(70, 200))]
    params = SamplingParams(
        max_new_tokens=70 if kind in RANKED else 30, ignore_eos=True
    )
    engine = llm("torch", kind)
    expected = engine.generate(prompts, params)
    scheduler, step = engine.engine.scheduler, engine.engine.step
    calls, again, turns = list[None](), set[bool](), itertools.cycle([True, False])
    monkeypatch.setattr(Costs, "recompute_is_cheaper", lambda *_: next(turns))

    def preempting() -> list:
        calls.append(None)
        if len(calls) % 7 == 0 and scheduler.running:
            again.add(not scheduler.preempt().cached)
        return step()

    engine.engine.step = preempting
    assert [a.token_ids for a in engine.generate(prompts, params)] == [
        a.token_ids for a in expected
    ]
    assert engine.pool.bytes_in_use == 0
    assert again == ({True, False} if engine.plan.index.recomputable else {False})


def test_forks_share_pages_and_then_part() -> None:
    engine = llm("torch", "split")
    sequence = engine.sequence(list(text(100)), SamplingParams(max_new_tokens=50))
    scheduler = engine.engine.scheduler
    scheduler.add(sequence)
    while sequence.cached < 100:
        engine.engine.step()
    before = engine.pool.bytes_in_use
    other = dataclasses.replace(
        sequence,
        tokens=[*text(100), 17],
        table=engine.pool.fork(sequence.table),
        sampler=Sampler(sequence.params),
    )
    assert engine.pool.bytes_in_use == before
    scheduler.running.append(other)
    for _ in range(3):
        engine.engine.step()
    assert before < engine.pool.bytes_in_use <= before + 2 * sum(engine.pool.strides)
    for s in (sequence, other):
        expected = (
            decoder("one")
            .logits(s.tokens[:-1], range(99, len(s.tokens) - 1))
            .argmax(-1)
            .tolist()
        )
        assert s.tokens[101:] == expected[1:]
        scheduler.remove(s)
    assert engine.pool.bytes_in_use == 0


class Failing:
    """A session's ``run`` that raises when it has run: at its ``at``-th step, or
    whenever token ``guilty`` is in it."""

    def __init__(self, engine: LLM, at: int = 0, guilty: int = -1) -> None:
        self.run_step, self.left, self.guilty = engine.session.run, at, guilty

    def __call__(self, step: StepPlan) -> npt.NDArray[np.float32]:
        logits = self.run_step(step)
        self.left -= 1
        if self.left == 0 or self.guilty in step.input_ids:
            raise RuntimeError("the engine broke")
        return logits


@pytest.mark.parametrize("kind", ["split", "sealed"])
@pytest.mark.parametrize("at", [1, 3])
def test_a_step_that_fails_once_is_taken_again_and_changes_nothing(
    kind: str, at: int
) -> None:
    engine = llm("torch", kind)
    prompts, params = (
        [list(text(150)), list(text(60, 9))],
        SamplingParams(max_new_tokens=9, ignore_eos=True),
    )
    expected = engine.generate(prompts, params)
    engine.session.run = failing = Failing(engine, at)
    assert [a.token_ids for a in engine.generate(prompts, params)] == [
        a.token_ids for a in expected
    ]
    assert failing.left < 0 and engine.pool.bytes_in_use == 0


@pytest.mark.parametrize("kind", ["split", "sealed"])
def test_only_the_request_whose_step_fails_ends(kind: str) -> None:
    engine = llm("torch", kind)
    prompts, params = (
        [list(text(60, 9 * i)) for i in range(5)],
        SamplingParams(max_new_tokens=9, ignore_eos=True),
    )
    expected = engine.generate(prompts, params)
    prompts[3][30] = 8191
    assert not any(
        8191 in [*prompt, *a.token_ids]
        for prompt, a in zip(prompts[:3], expected, strict=False)
    )
    engine.session.run = Failing(engine, guilty=8191)
    sequences = [engine.sequence(list(prompt), params) for prompt in prompts]
    for sequence in sequences:
        engine.engine.scheduler.add(sequence)
    while not all(s.finish_reason for s in sequences):
        engine.engine.step()
    assert [s.finish_reason for s in sequences] == ["length"] * 3 + ["error", "length"]
    assert (
        str(sequences[3].error) == "the engine broke" and engine.pool.bytes_in_use == 0
    )
    for i in (0, 1, 2, 4):
        assert sequences[i].answer == expected[i].token_ids
    with pytest.raises(RuntimeError, match="broke"):
        engine.generate([prompts[3]], params)
    assert engine.pool.bytes_in_use == 0


def test_an_abandoned_stream_leaks_nothing() -> None:
    engine = llm("torch", "one")
    stream = engine.stream(
        list(text(50)), SamplingParams(max_new_tokens=500, ignore_eos=True)
    )
    next(stream)
    assert engine.pool.bytes_in_use > 0
    stream.close()
    assert engine.pool.bytes_in_use == 0 and not engine.engine.scheduler.running


# -- the session -----------------------------------------------------------------------
def test_onnx_runtime_reads_the_pool_in_place_and_refuses_steps_beyond_the_profile() -> (
    None
):
    found = session(
        "onnx", "one", 1 << 26, dataclasses.replace(LIMITS, max_num_tokens=8)
    )
    assert isinstance(found, OrtSession)
    (graph,) = found.graphs
    assert isinstance(graph, Graph)
    pool = graph.pool
    assert [view.data_ptr() for view in pool.values()] == [
        found.memory.ctypes.data
    ] * len(pool)
    assert found.memory.ctypes.data % 4096 == 0
    step = StepPlan(
        np.zeros(9, np.int32),
        np.zeros(9, np.int32),
        np.array([0, 9], np.int32),
        np.arange(9, dtype=np.int32),
        np.zeros((1, 1), np.int32),
        (np.zeros((1, 1), np.int32),),
        np.zeros(1, np.int32),
    )
    with pytest.raises(KvlatheError, match="max-num-tokens is 8"):
        found.run(step)


def test_logits_of_a_step_are_the_callers_whatever_runs_after_it() -> None:
    found = session("onnx", "one", 1 << 26)

    def step(tokens: int, first: int) -> StepPlan:
        places = np.arange(tokens, dtype=np.int32)
        ends = np.array([0, tokens], np.int32)
        nothing, page = np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int32)
        last = np.array([tokens - 1], np.int32)
        return StepPlan(places + first, places, ends, places, nothing, (page,), last)

    first = found.run(step(5, 7))
    kept = first.copy()
    other, longer = found.run(step(5, 90)), found.run(step(9, 40))
    np.testing.assert_array_equal(first, kept)
    np.testing.assert_array_equal(found.run(step(5, 7)), kept)
    assert not np.array_equal(other, kept) and not np.array_equal(longer, other)


@pytest.mark.parametrize(
    ("kind", "first"),
    [("one", [124, 900]), ("split", [124, 900]), ("sealed", [300, 512])],
)
def test_one_prompt_is_through_before_the_next_where_nothing_seals(
    kind: str, first: list[int]
) -> None:
    """A step of 1,024 tokens, chunks of 512: pages that seal do so on their grid."""
    engine = llm("torch", kind)
    scheduler = engine.engine.scheduler
    for length in (900, 300):
        scheduler.add(engine.sequence(list(text(length)), SamplingParams()))
    chunks = scheduler.schedule().chunks
    assert [chunk.count for chunk in chunks] == first
    for chunk in chunks:
        engine.pool.rollback(chunk.reservation)
