"""Random schedules against an invariant checker that knows no model, and laws of turns,
admission control and preemption."""

from __future__ import annotations

import itertools
import time
import weakref
from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pytest

from kvlathe.base import machine
from kvlathe.base.memory import OutOfMemory
from kvlathe.plan.manifest import Limits
from kvlathe.runtime.requests.engine_thread import EngineThread
from kvlathe.runtime.scheduling.admission import Admission, Costs
from kvlathe.runtime.scheduling.fair_queue import FairQueue
from kvlathe.runtime.scheduling.step import PATIENCE
from kvlathe.runtime.sessions.protocols import StepPlan
from tests.support.fake_session import FakeSession, SamplesThere, solo
from tests.support.nightly import rest_nightly
from tests.support.schedule_cases import (
    KINDS,
    RANKED,
    check,
    engine_for,
    fake_of,
    play,
    sequence_for,
)

PARTS = rest_nightly(range(10), 0)
"""Parts of a hundred random schedules each; a nightly run has all thousand."""


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_random_schedules_by_the_hundred(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that counts its readings: what time decides, the seed decides."""
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) * 1e-5)
    ends: Counter[str] = Counter()
    preemptions = hits = 0
    for seed in range(100 * part, 100 * (part + 1)):
        engine, _, reasons = play(seed, KINDS[seed % len(KINDS)])
        ends += reasons
        preemptions += engine.scheduler.preemptions
        hits += engine.scheduler.prefixes.hits if engine.scheduler.prefixes else 0
    assert (
        set(ends) == {"length", "stop", "cancelled", "timeout", "error"}
        and preemptions > 50
        and hits > 100
    ), (
        ends,
        preemptions,
        hits,
    )


@pytest.mark.parametrize("kind", RANKED)
def test_random_schedules_of_ranked_tokens(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, where lanes lose tokens, move them or never compute them; some moves
    fail, and are done again."""
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) * 1e-5)
    preemptions = 0
    for seed in range(4):
        engine, _, _ = play(seed, kind)
        preemptions += engine.scheduler.preemptions
    assert preemptions > 3


# -- memory ----------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [*KINDS, *RANKED])
def test_steps_that_find_no_memory_are_cut_until_they_do(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few tokens a step has memory for, everybody is answered as alone."""
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) * 1e-5)
    starved = 0
    for seed, memory in enumerate((1, 2, 7, 20)):
        engine, _, _ = play(seed, kind, memory)
        session = fake_of(engine)
        starved += session.largest[0] > memory
    assert starved == 4


def test_a_step_that_found_no_memory_halves_later_ones_for_a_while() -> None:
    """Not every step is tried in vain."""
    engine = engine_for("one", 600)
    session: object = engine.session
    assert isinstance(session, FakeSession)
    session.affordable = 20
    failed = 0
    run = session.run

    def counted(step: StepPlan) -> npt.NDArray[np.float32]:
        nonlocal failed
        failed += step.cu_seqlens_q[-1] > session.affordable
        return run(step)

    session.run = counted
    first = sequence_for(engine, [1] * 96, 30)
    engine.scheduler.add(first)
    while not first.finish_reason:
        engine.step()
    assert first.answer == solo([1] * 96, 30) and failed == 2
    room = engine.scheduler.room
    assert room.of(1000) == 12
    for _ in range(PATIENCE):
        room.ran()
    assert room.of(1000) == 24


def test_who_finds_no_memory_alone_is_refused_and_nobody_else() -> None:
    """The words reach the caller of a sequence whose single token finds none."""
    engine = engine_for("one", 600)
    session: object = engine.session
    assert isinstance(session, FakeSession)
    run = session.run

    def starving(step: StepPlan) -> npt.NDArray[np.float32]:
        if 7 in step.input_ids:
            raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling")
        return run(step)

    session.run = starving
    good = sequence_for(engine, [1] * 40, 20)
    bad = sequence_for(engine, [7] * 40, 20)
    for sequence in (good, bad):
        engine.scheduler.add(sequence)
    while not (good.finish_reason and bad.finish_reason):
        engine.step()
    assert good.answer == solo([1] * 40, 20)
    assert isinstance(bad.error, OutOfMemory)
    said = str(bad.error)
    assert said.startswith("there is no memory for a step of 1 tokens: CUBLAS_STATUS")
    assert not engine.pool.bytes_in_use and not engine.scheduler.running


def test_a_failed_step_has_left_memory_before_a_smaller_one_is_tried() -> None:
    """An error's traceback holds the arrays of the frames that it passed."""
    engine = engine_for("one", 600)
    session: object = engine.session
    assert isinstance(session, FakeSession)
    run, alive = session.run, list[weakref.ref[Scratch]]()

    def holding(words: str, step: StepPlan) -> npt.NDArray[np.float32]:
        assert not any(scratch() for scratch in alive), "memory of a failed step"
        scratch = Scratch()
        alive.append(weakref.ref(scratch))
        if step.cu_seqlens_q[-1] > 3:
            raise RuntimeError(words)
        return run(step)

    for words in ("out of memory", "something else"):
        session.run = partial(holding, words)
        sequences = [sequence_for(engine, [token], 2) for token in range(5)]
        for sequence in sequences:
            engine.scheduler.add(sequence)
        while not all(sequence.finish_reason for sequence in sequences):
            engine.step()
        assert all(sequence.answered == 2 for sequence in sequences)
    assert len(alive) > 4


class Scratch:
    """The memory that a step takes while it runs."""


# -- steps ahead -----------------------------------------------------------------------
def test_who_gets_two_tokens_in_a_step_is_told_of_once() -> None:
    """One lands from the step before, and one comes from a step that is waited for,
    because somebody's prompt is reported."""
    engine = engine_for("one", 600)
    engine.session = SamplesThere(engine.session)
    first = sequence_for(engine, [1] * 10, 3)
    engine.scheduler.add(first)
    engine.step()
    engine.step()
    assert (first.answered, first.pending) == (1, 1)
    second = sequence_for(engine, [2] * 10, 0, prompt_logprobs=0)
    engine.scheduler.add(second)
    assert engine.step() == [first, second]
    assert first.finish_reason == second.finish_reason == "length"
    assert first.answer == solo([1] * 10, 3) and len(second.prompt_logprobs) == 9


def test_answers_go_ahead_beside_one_whose_prompt_was_reported() -> None:
    engine = engine_for("one", 600)
    engine.session = SamplesThere(engine.session)
    sequences = [
        sequence_for(engine, [1] * 10, 8),
        sequence_for(engine, [2] * 10, 8, prompt_logprobs=0),
    ]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    engine.step()
    for _ in range(6):
        engine.step()
        assert all(sequence.pending for sequence in sequences)


@pytest.mark.parametrize("asked", [{"repetition_penalty": 1.3}, {}])
def test_who_looks_back_gets_a_token_every_step(asked: dict[str, Any]) -> None:
    """The step runs ahead; only the choice of its token waits for the one before."""
    engine = engine_for("one", 600)
    engine.session = SamplesThere(engine.session)
    sequences = [sequence_for(engine, [1] * 10, 8, **asked) for _ in range(2)]
    sequences.append(sequence_for(engine, [2] * 10, 8))
    for sequence in sequences:
        engine.scheduler.add(sequence)
    engine.step()
    for count in range(1, 8):
        engine.step()
        assert [sequence.answered for sequence in sequences] == [count] * 3
    engine.step()
    assert all(sequence.finish_reason for sequence in sequences)


def test_a_choice_that_fails_ends_its_step_alone() -> None:
    engine = engine_for("one", 600)
    sampler = SamplesThere(engine.session)
    engine.session = sampler
    sequences = [sequence_for(engine, [1] * 10, 8, presence_penalty=1.0)]
    engine.scheduler.add(sequences[0])
    engine.step()
    choose = sampler.choose

    def broken(logits: object, rows: object) -> NoReturn:
        raise RuntimeError("no memory for a choice")

    sampler.choose = broken
    assert engine.step() == sequences, "told of once, though a token landed too"
    assert sequences[0].finish_reason == "error" and engine._launched is None
    sampler.choose = choose
    assert engine.pool.bytes_in_use == 0


def test_nothing_flies_once_nobody_waits() -> None:
    """Else the time until the next request would count as that of a step."""
    engine = engine_for("one", 600)
    engine.session = SamplesThere(engine.session)
    engine.stop_ids = frozenset(solo([1] * 10, 2)[1:])
    thread = EngineThread(engine)
    request = thread.submit([sequence_for(engine, [1] * 10, 5)])
    assert request.done.wait(30)
    assert thread.call(lambda: engine._launched) is None
    thread.close()
    assert request.sequences[0].finish_reason == "stop"


# -- preemption ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "price", "swaps"),
    [("one", 1.0, True), ("one", 1e-12, False), ("sealed", 1e-12, True)],
)
def test_preemption_takes_the_cheaper_way_that_the_plan_allows(
    kind: str, price: float, swaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that counts its readings: a busy machine does not change the prices."""
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) * 1e-12)
    engine = engine_for(kind, 400)
    scheduler = engine.scheduler
    scheduler.costs.token.add(price)
    scheduler.costs.byte.add(1e-6)
    first, second = (sequence_for(engine, list(range(i, i + 50)), 20) for i in (0, 60))
    for sequence in (first, second):
        scheduler.add(sequence)
    while not second.answered:
        engine.step()
    scheduler.preempt()
    assert (second in scheduler._swapped) == swaps and scheduler.running == [first]
    assert second.cached == (second.cached if swaps else 0) and not any(
        second.table.pages
    )
    while not (first.finish_reason and second.finish_reason):
        engine.step()
    assert [s.answer for s in (first, second)] == [
        solo(range(i, i + 50), 20) for i in (0, 60)
    ]


@pytest.mark.parametrize("kind", ["one", "split", "one with states"])
@pytest.mark.parametrize("seed", range(3))
def test_pages_move_to_the_host_as_far_as_each_sequence_finds_room(
    kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a shared prefix each takes a copy there: together more than the pool has. Those
    for whom there is no room are computed again, and everybody is answered as alone."""
    draw = np.random.default_rng(seed)
    engine = engine_for(kind, 600, share=True)
    scheduler, prefix = engine.scheduler, list(range(64))
    prompts = [[*prefix, 100 + i, *draw.integers(0, 99, 2 * i)] for i in range(6)]
    sequences = [sequence_for(engine, prompt, 20) for prompt in prompts]
    scheduler.add(sequences[0])
    while not sequences[0].answered:
        engine.step()
    for sequence in sequences[1:]:
        scheduler.add(sequence)
    while not all(sequence.answered for sequence in sequences):
        engine.step()
    sizes = {one: scheduler._bytes(one.table.pages) for one in sequences}
    held, room = (
        engine.pool.bytes_in_use,
        int(draw.uniform(0.4, 0.9) * sum(sizes.values())),
    )
    assert held < sum(sizes.values())

    def copied() -> int:
        return sum(sizes[one] for one in scheduler._swapped)

    monkeypatch.setattr(machine, "free_bytes", lambda: machine.REST + room - copied())
    scheduler.vacate()
    assert not engine.pool.bytes_in_use and copied() < room
    again = [one for one in sequences if one not in scheduler._swapped]
    assert 0 < len(again) < 6 and not any(one.cached for one in again)
    while not all(sequence.finish_reason for sequence in sequences):
        engine.step()
    assert [one.answer for one in sequences] == [solo(one, 20) for one in prompts]


def test_swapping_that_fails_leaves_the_pool_whole() -> None:
    engine = engine_for("split", 400)
    sequences = [sequence_for(engine, list(range(i, i + 50)), 20) for i in (0, 60)]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    engine.step()
    engine.step()
    engine.scheduler.preempt()
    write, calls = engine.session.write_page, []

    def failing(bucket: int, page: int, data: bytes) -> None:
        calls.append(page)
        if len(calls) == 2:
            raise OSError("the host failed")
        write(bucket, page, data)

    engine.session.write_page = failing
    engine.scheduler._blocked = False
    with pytest.raises(OSError, match="host failed"):
        engine.step()
    check(engine, sequences)
    while any(not s.finish_reason for s in sequences):
        engine.step()
    assert [s.answer for s in sequences] == [
        solo(range(i, i + 50), 20) for i in (0, 60)
    ]
    assert not engine.pool.bytes_in_use


# -- admission control -----------------------------------------------------------------
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "aged" not in kind])
def test_requests_foreseen_with_full_answers_are_never_preempted(kind: str) -> None:
    """Answers that take all they may, in the lockstep that is assumed: the fullest
    moment is an upper bound. Not where two cold tiers take turns: pages that come and go
    leave holes in the slabs of an arena as small as this one."""
    random = np.random.default_rng(3)
    engine = engine_for(kind, 600)
    sequences = [
        sequence_for(
            engine,
            [int(t) for t in random.integers(0, 99, 16)],
            int(random.integers(1, 120)),
        )
        for _ in range(40)
    ]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    together = 0
    while any(not s.finish_reason for s in sequences):
        engine.step()
        together = max(together, len(engine.scheduler.running))
    assert engine.scheduler.preemptions == 0 and together > 2


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_that_wait_for_their_turn_hold_nothing(kind: str) -> None:
    """Prompts of many chunks that come at once are hot one after the other: two at a
    time where a step is shorter than a chunk. As many run as then fit; none leaves."""
    engine = engine_for(kind, 4800, limits=Limits(32, 48, 400, 400))
    sequences = [sequence_for(engine, [i] * 300, 8) for i in range(20)]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    together = 0
    while any(not s.finish_reason for s in sequences):
        engine.step()
        together = max(together, len(engine.scheduler.running))
    assert engine.scheduler.preemptions == 0
    pool = engine.pool
    steady, prompt = pool.worst_pages(308, 0), pool.demand.prompt(300)
    hot = [max(pair) for pair in zip(steady, prompt, strict=True)]
    most = [n for n in range(1, 20) if pool.fits([hot, hot] + [steady] * n)]
    assert together >= 2 + max(most)


def test_an_older_prompt_is_not_passed_by_those_whose_prefix_is_known() -> None:
    """A prefix may end within a chunk; who has it has not begun that chunk."""
    engine = engine_for("one", 40_000, share=True, limits=Limits(16, 96, 400, 400))
    prefix = list(range(96))
    first = sequence_for(engine, [*prefix, 7], 1)
    engine.scheduler.add(first)
    while not first.finish_reason:
        engine.step()
    old = sequence_for(engine, [5] * 120, 4)
    engine.scheduler.add(old)
    for n in range(60):
        while len(engine.scheduler.running) + len(engine.scheduler.waiting) < 14:
            young = sequence_for(engine, [*prefix, *[n] * 28], 1)
            engine.scheduler.add(young)
        engine.step()
    assert old.finish_reason


@pytest.mark.parametrize("kind", [*KINDS, *RANKED])
def test_pages_are_foreseen_to_the_page(kind: str) -> None:
    """Also where a page is begun but not full: a cold page too many for each sequence
    would be memory left idle."""
    pool = engine_for(kind, 600).pool
    tokens = np.arange(1, 400)
    found, exact = (
        Admission(pool, Costs(), 64)._pages_of(tokens),
        np.array([pool.worst_pages(int(t), 0) for t in tokens]),
    )
    assert (found >= exact).all() and (
        found <= [pool.worst_pages(int(t) + pool.plan.page_tokens, 0) for t in tokens]
    ).all()
    assert (found == exact).all() or kind in RANKED


def test_foresight_admits_more_than_worst_cases_would() -> None:
    engine = engine_for("one", 640)
    almost = [sequence_for(engine, list(range(16)), 200) for _ in range(4)]
    for i, sequence in enumerate(almost):
        sequence.tokens += [7] * (190 - 50 * i)  # they end one after the other
    fresh = sequence_for(engine, list(range(16)), 200)
    assert engine.scheduler.admission.fits([*almost, fresh])
    assert not engine.pool.fits(
        [engine.pool.worst_pages(s.most_tokens) for s in [*almost, fresh]]
    )
    assert not engine.scheduler.admission.fits(
        [sequence_for(engine, list(range(16)), 200) for _ in range(5)]
    )


def test_short_answers_let_more_in_and_dear_preemption_fewer() -> None:
    admission = engine_for("one", 640).scheduler.admission
    sequence = sequence_for(engine_for("one", 640), list(range(16)), 1000)
    assert admission.to_go(sequence) == 1000
    for _ in range(50):
        admission.share.add(0.2)
    assert admission.to_go(sequence) == 200
    for i in range(50):
        admission.share.add(0.1 + 0.2 * (i % 2))
    calm = admission.to_go(sequence)
    assert 300 < calm < 500
    admission.costs.ran(10, 10, 1.0)
    admission.costs.moved(1000, 0.5)
    admission.costs.judge()
    assert admission.to_go(sequence) > calm


# -- turns -----------------------------------------------------------------------------
def test_tenants_take_turns_whoever_came_first() -> None:
    engine, queue = engine_for("one", 640), FairQueue()
    for tenant, count in ((b"flood", 50), (b"single", 1), (b"pair", 2)):
        for _ in range(count):
            queue.push(sequence_for(engine, [1] * 10, 10, tenant))
    order = [queue.pop().salt for _ in range(len(queue))]
    assert (
        order.index(b"single") <= 2
        and [i for i, s in enumerate(order) if s == b"pair"][1] <= 5
    )


def test_requests_that_leave_the_queue_cost_their_tenant_nothing() -> None:
    engine, queue = engine_for("one", 640), FairQueue()
    gone = [sequence_for(engine, [1] * 10, 10, b"leaver") for _ in range(50)]
    for sequence in (
        *gone,
        *(sequence_for(engine, [1] * 10, 10, b"steady") for _ in range(10)),
    ):
        queue.push(sequence)
    for sequence in gone:
        queue.remove(sequence)
    queue.pop()
    queue.push(sequence_for(engine, [1] * 10, 10, b"leaver"))
    assert [queue.pop().salt for _ in range(len(queue))].index(b"leaver") <= 1


def test_one_tenant_is_served_in_order_and_those_who_come_back_go_first() -> None:
    engine, queue = engine_for("one", 640), FairQueue()
    sequences = [sequence_for(engine, [1] * n, 10) for n in (30, 5, 20, 1)]
    for sequence in sequences:
        queue.push(sequence)
    first, second = queue.pop(), queue.pop()
    queue.push_back(second)
    queue.push_back(first)
    queue.remove(sequences[2])
    assert [queue.pop() for _ in range(len(queue))] == [
        first,
        second,
        sequences[3],
    ] and queue.peek() is None


def test_a_tenants_lower_priorities_go_first_and_delay_no_other_tenant() -> None:
    engine, queue = engine_for("one", 640), FairQueue()
    for priority in (0, 5, -1, 0, -1):
        sequence = sequence_for(engine, [1] * 10, 10, b"own")
        sequence.priority = priority
        queue.push(sequence)
        other = sequence_for(engine, [1] * 10, 10, b"other")
        other.priority = 9
        queue.push(other)
    gone = next(one for one in queue if one.priority == 5)
    queue.remove(gone)
    order = [queue.pop() for _ in range(len(queue))]
    own = [one for one in order if one.salt == b"own"]
    assert [one.priority for one in own] == [-1, -1, 0, 0]
    for one, then in pairwise(own):
        assert one.priority < then.priority or one.arrival < then.arrival
    for place in range(0, 8, 2):
        assert {one.salt for one in order[place : place + 2]} == {b"own", b"other"}


def test_a_long_prompt_does_not_hold_answers_up() -> None:
    engine = engine_for("one", 640)
    short, long = sequence_for(engine, [1, 2, 3], 40), sequence_for(engine, [5] * 96, 4)
    engine.scheduler.add(short)
    engine.step()
    engine.scheduler.add(long)
    steps = 0
    while not long.answered:
        before = short.answered
        engine.step()
        steps += 1
        assert short.answered == before + 1
    assert steps == 3  # 96 tokens, at most 32 beside a decode
