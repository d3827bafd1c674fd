"""Random schedules of an engine, and what must hold after every step."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from functools import cache
from typing import Any

import numpy as np

from kvlathe.plan.groups import Group
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import KEEP, Budget
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.stages import Stage
from kvlathe.plan.token_score import ObservationWindow
from kvlathe.runtime.cache.observed_rows import ObservedRows
from kvlathe.runtime.cache.page_table import PageTable
from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.cache.prefix import PrefixCache
from kvlathe.runtime.scheduling.engine import Engine
from kvlathe.runtime.scheduling.parts.speculation import Drafter
from kvlathe.runtime.scheduling.prompt import PromptPath, Staged, path_of
from kvlathe.runtime.scheduling.scheduler import Scheduler
from kvlathe.runtime.scheduling.sequence import Sequence, SharedPrompt
from kvlathe.runtime.text.sampler import Sampler
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.support.drafts import trying
from tests.support.fake_session import (
    SHAPE,
    STATE_NUMBERS,
    FakeSession,
    RankedSession,
    SamplesThere,
    exact,
    solo,
)
from tests.support.runtime_cases import HOT, plan_for, plans, ranked_plans

KINDS = ("one", "split", "sealed", "sealed after", "sealed split", "windowed")
KINDS += ("sealed windows", "aged windows", "one with states", "sealed with states")
WITH_STATES = " with states"
RANKED = ("divided", "budget", "sealed budget", "staged", "staged budget")
BROKEN = 250
LIMITS = Limits(max_batch_size=6, max_num_tokens=48, max_input_len=96, max_seq_len=160)


@cache
def plan_of(kind: str) -> CompressionPlan:
    if kind in KINDS:
        plan = plans(SHAPE, page=32, chunk=64)[kind.removesuffix(WITH_STATES)]
        if not kind.endswith(WITH_STATES):
            return plan
        shape = dataclasses.replace(plan.model, states=(STATE_NUMBERS,))
        return dataclasses.replace(plan, model=shape)
    return exact(
        staged(kind == "staged budget")
        if "staged" in kind
        else ranked_plans(SHAPE, page=16, chunk=32)[kind]
    )


def staged(budgets: bool) -> CompressionPlan:
    """Three layers, of which the second computes 48 rows of a prompt and the third
    24."""
    shape = dataclasses.replace(SHAPE, layers=3)
    lives = [Budget(16 * n, recent=8) for n in (3, 2, 1)] if budgets else [KEEP] * 3
    groups = tuple(
        Group((2 * i, 2 * i + 1), HOT, life=life) for i, life in enumerate(lives)
    )
    whole = plan_for(shape, (Group(tuple(range(6)), HOT),), 16, 32)
    stages, observation = (
        (Stage(0), Stage(1, 48), Stage(2, 24)),
        ObservationWindow(last=8, accumulated=not budgets),
    )
    return dataclasses.replace(whole, groups=groups, stages=stages, score=observation)


def engine_for(
    kind: str,
    tokens: int,
    broken: int = -1,
    share: bool = False,
    limits: Limits = LIMITS,
    faulty: int = 0,
) -> Engine:
    """With room for about ``tokens`` tokens; where they are ranked, just enough for one
    sequence of so many."""
    plan, layout = plan_of(kind), CacheLayout(plan_of(kind))
    size = layout.bytes_for(tokens) + 2 * len(layout.page_stride) * max(
        layout.page_stride
    )
    while plan.index.ranked and not holds(PagePool(layout, size), tokens):
        size += min(layout.page_stride)
    pool = PagePool(layout, size)
    session = (
        RankedSession(plan, pool, broken, faulty)
        if plan.index.ranked
        else FakeSession(plan, pool, broken)
    )
    prefixes = PrefixCache(pool) if share else None
    return Engine(
        session, pool, Scheduler(pool, session, limits, prefixes, prompt_tokens=32), ()
    )


def fake_of(engine: Engine) -> FakeSession | RankedSession:
    """The session that computes, wherever its tokens are chosen."""
    session: object = engine.session
    if isinstance(session, SamplesThere):
        session = session.session
    assert isinstance(session, FakeSession | RankedSession)
    return session


def holds(pool: PagePool, tokens: int) -> bool:
    """Whether it surely has room for a sequence of ``tokens`` tokens."""
    return pool.has_room_for(tokens, LIMITS.max_input_len)


def sequence_for(
    engine: Engine,
    prompt: list[int],
    new: int,
    salt: bytes = b"",
    **asked: Any,  # noqa: ANN401
) -> Sequence:
    params = SamplingParams(max_new_tokens=new, **asked)
    plan, sampler = engine.pool.plan, Sampler(params)
    observed_rows = ObservedRows(plan, len(prompt))
    table = engine.pool.open()
    return Sequence(
        list(prompt),
        len(prompt),
        table,
        path_of(plan, len(prompt), plan.prefill_chunk),
        sampler,
        salt=salt,
        observed_rows=observed_rows,
    )


def alone(kind: str, prompt: list[int], new: int) -> list[int]:
    """The answer to a prompt: what the model-free model says or, where it ranks, that
    of an engine that has room for everything in steps of a whole prompt."""
    if kind in KINDS:
        return solo(prompt, new)
    if not new:
        return []
    engine = engine_for(
        kind, 2000, limits=dataclasses.replace(LIMITS, max_num_tokens=200)
    )
    sequence = sequence_for(engine, prompt, new)
    engine.scheduler.add(sequence)
    while not sequence.finish_reason:
        engine.step()
    return sequence.answer


def tables(engine: Engine) -> list[PageTable]:
    """Everything that may own pages."""
    scheduler = engine.scheduler
    kept = [b.table for b in scheduler._shared.computed if b.table]
    blocks = scheduler.prefixes._blocks.values() if scheduler.prefixes else ()
    return (
        [s.table for s in scheduler.running]
        + kept
        + [PageTable(block.pages, [], []) for block in blocks]
    )


def check(engine: Engine, everyone: list[Sequence]) -> None:
    pool, scheduler = engine.pool, engine.scheduler
    for b in range(len(pool.strides)):
        owners = Counter(page for table in tables(engine) for page in table.pages[b])
        assert owners == pool._owners[b], "a page has other owners than tables"
    assert len(scheduler.running) <= LIMITS.max_batch_size
    here = [*scheduler.running, *scheduler.waiting]
    assert len(set(here)) == len(here) and set(here) == {
        s for s in everyone if not s.finish_reason
    }
    assert all(not any(s.table.pages) for s in everyone if s not in scheduler.running)
    for sequence in (
        scheduler.running
    ):  # nobody of its tenant who came before still waits for a first turn
        assert not any(
            w.salt == sequence.salt and w.arrival < sequence.arrival and not w.admitted
            for w in here
        )
    arrivals = [s.arrival for s in scheduler.running]
    assert arrivals == sorted(arrivals)
    if pool.plan.index.ranked:
        check_ranked(engine)


def check_ranked(engine: Engine) -> None:
    """Tokens and bytes are those that the layout promises, nothing is shared, and who
    left is in host memory."""
    pool, scheduler, layout = engine.pool, engine.scheduler, engine.pool.layout
    assert set(scheduler._swapped) == {s for s in scheduler.waiting if s.admitted}
    promised = 0
    for sequence in scheduler.running:
        table, held = sequence.table, []
        staged = staged_path(sequence.path)
        passed = range(
            staged.stages.start
            if staged
            else pool.plan.index.graphs * (sequence.cached > 0)
        )
        ranked = {b for stage in passed for b in pool.plan.index.buckets_of(stage)}
        for b, bucket in enumerate(pool.plan.index.buckets):
            arrived = table.arrived[bucket.hot]
            if b not in ranked or (
                not staged and sequence.cached < sequence.prompt_tokens
            ):
                held.append(0 if not bucket.is_hot else arrived)
            else:
                held.append(layout.all_held(arrived)[b])
        assert table.lengths == held
        promised += sum(
            -(-n // pool.plan.page_tokens) * size
            for n, size in zip(held, pool.strides, strict=True)
        )
        assert pool.plan.stages or sequence.cached == max(table.arrived)
    assert pool.bytes_in_use == promised


def staged_path(path: PromptPath) -> Staged | None:
    """The path of a prompt that passes the stages of its plan; None for others."""
    return path if isinstance(path, Staged) else None


def progress(everyone: list[Sequence]) -> list[object]:
    return [
        (s.cached, len(s.tokens), s.path.rows and sum(s.path.rows)) for s in everyone
    ]


def play(
    seed: int, kind: str, memory: int = 1 << 30, drafter: Drafter | None = None
) -> tuple[Engine, list[Sequence], Counter[str]]:
    """One random schedule, checked after every step. ``memory``: tokens of the largest
    step that finds memory. ``drafter``: guesses tokens, and all are tried."""
    random, sharable = np.random.default_rng(seed), plan_of(kind).index.sharable
    engine = engine_for(
        kind,
        int(random.integers(170, 220)),
        BROKEN,
        bool(random.integers(2)) and sharable,
        faulty=9,
    )
    scheduler, session, everyone = engine.scheduler, fake_of(engine), []
    session.affordable = memory
    if seed % 2:
        engine.session = SamplesThere(session)
    if random.random() < 0.5:
        ends = random.integers(0, BROKEN, 8)
        engine.stop_ids = frozenset(ends.tolist())
    if drafter is not None:
        engine.speculate(trying(drafter, engine.stop_ids))
    scheduler.costs.token.add(
        float(random.choice([1e-9, 1.0]))
    )  # computing again is free, or dear
    scheduler.costs.byte.add(1e-6)
    if random.random() < 0.9:  # too hopeful, and never the wiser
        scheduler.admission.share.add(0.05)
        scheduler.admission.ended = lambda sequence: None
    if not sharable:  # whoever comes is let in: pages run out
        scheduler.admission.fits = lambda sequences: True
    stem = [int(t) for t in random.integers(0, BROKEN, 80)]
    planned, steps = int(random.integers(2, 5)), 0

    def submit() -> None:
        own = [int(t) for t in random.integers(0, BROKEN, random.integers(1, 40))]
        prompt = stem[: random.choice([0, 0, 17, 40, 64])] + own
        if random.random() < 0.06:
            prompt[-1] = BROKEN
        twins = int(random.choice([1, 1, 1, 1, 3]))
        shared = SharedPrompt() if twins > 1 and sharable else None
        for _ in range(twins):
            new = int(
                random.integers(1, 20)
                if random.random() < 0.4
                else random.integers(34, 72)
            )
            asked: dict[str, Any] = {}
            if random.random() < 0.2:  # too small to change what is likeliest
                asked["presence_penalty"] = 1e-3
            if random.random() < 0.1 and not engine.pool.plan.stages:
                asked["prompt_logprobs"] = 0
            salt = random.choice([b"a", b"b"])
            sequence = sequence_for(engine, prompt[:96], new, salt, **asked)
            if shared:
                sequence.salt, sequence.shared_prompt = b"a", shared
                shared.followers.add(sequence)
            if random.random() < 0.08:
                sequence.deadline = time.perf_counter() + float(
                    random.choice([0, 2e-3])
                )
            everyone.append(sequence)
            scheduler.add(sequence)

    while planned or any(not s.finish_reason for s in everyone):
        if planned and random.random() < 0.4:
            planned -= 1
            for _ in range(random.integers(1, 4)):
                submit()
        if everyone and random.random() < 0.03:
            engine.cancel(everyone[random.integers(len(everyone))])
        if len(scheduler.running) > 1 and random.random() < 0.02:
            # as if the pool had run out here; it does so by itself too
            scheduler.preempt()
        before = time.perf_counter()
        done = progress(everyone)
        gone = scheduler.preemptions
        changed = engine.step()
        assert len(set(changed)) == len(changed), "somebody is told of twice"
        steps += 1
        assert all(s.finish_reason for s in everyone if s.deadline < before), (
            "a deadline was not kept"
        )
        moved = progress(everyone) != done or changed or gone != scheduler.preemptions
        assert moved or all(s.finish_reason for s in everyone)
        check(engine, everyone)
        work = sum(
            -(-s.prompt_tokens // 16) + s.params.max_new_tokens for s in everyone
        )
        assert steps < 100 + 20 * work, "somebody starves"
    assert (
        session.largest[0] <= LIMITS.max_num_tokens
        and session.largest[1] <= LIMITS.max_batch_size
    )
    for sequence in everyone:
        expected = alone(
            kind, sequence.tokens[: sequence.prompt_tokens], sequence.answered
        )
        assert sequence.answer == expected, "an answer depends on the schedule"
        assert sequence.finish_reason != "error" or BROKEN in sequence.tokens, (
            sequence.error
        )
        assert (
            sequence.finish_reason != "length"
            or sequence.answered == sequence.params.max_new_tokens
        )
        assert sequence.finish_reason != "length" or BROKEN not in sequence.tokens[:-1]
        stops = [t in engine.stop_ids for t in sequence.answer]
        assert any(stops) == (sequence.finish_reason == "stop") and not any(stops[:-1])
    while scheduler._reclaim():
        pass
    assert not engine.pool.bytes_in_use
    return engine, everyone, Counter(str(s.finish_reason) for s in everyone)
