"""Laws of ranked tokens: every bucket holds as many as the layout promises and those
that rank there, whatever the schedule; where a rule keeps everything alike, the plan is
one without it."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.token_score import ObservationWindow
from kvlathe.runtime.cache.observed_rows import ObservedRows
from kvlathe.runtime.cache.pool import PagePool
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.scheduling.sequence import PrefillChunk
from tests.support.ranking_cases import (
    PAGE,
    SHAPE,
    Numbers,
    engine_of,
    exact,
    expected,
    observed_rows,
    plans,
    sequence_of,
    slice_ends,
    tokens_of,
)
from tests.support.runtime_cases import (
    ranked_plans,
)


@given(
    observation=observed_rows(),
    prompt=st.integers(1, 400),
    cuts=st.lists(st.integers(1, 90), min_size=1, max_size=9),
)
def test_observed_rows_follow_from_the_sequence_alone(
    observation: ObservationWindow, prompt: int, cuts: list[int]
) -> None:
    plan = dataclasses.replace(
        ranked_plans(SHAPE, PAGE, PAGE)["divided"], score=observation
    )
    tokens = np.random.default_rng(prompt).integers(0, 97, 1000).tolist()
    whole, end, pieces, found = (
        ObservedRows(plan, prompt).weights(tokens, 0, 1000),
        0,
        ObservedRows(plan, prompt),
        [],
    )
    for count in cuts:
        found.append(pieces.weights(tokens, end, end + count))
        end += count
    np.testing.assert_array_equal(np.concatenate(found), whole[:end])
    plain = whole.copy()
    plain[np.isin(tokens, observation.special)] = 0
    size = observation.slice_tokens or prompt
    slices = range(0, prompt, size)
    borders = [*slices, prompt, *range(prompt // PAGE * PAGE + PAGE, 1000, PAGE)]
    for start, stop in pairwise(borders):
        size = stop - start
        last = min(size, max(observation.last, round(observation.recent * size)))
        assert whole[stop - last : stop].all()
        if not observation.special:
            assert plain[start:stop].sum() == last + min(
                size - last, round(observation.random * size)
            )
    seen = ObservedRows(plan, prompt).seen(tokens, 300)
    assert seen.tolist() == [whole[i:300].sum() for i in range(300)]


@settings(max_examples=40)
@given(plan=plans(), seed=st.integers(0, 2**32 - 1))
def test_tokens_are_where_they_rank_under_any_schedule(
    plan: CompressionPlan, seed: int
) -> None:
    """Several sequences in steps of random chunks, swapped and failing in between:
    buckets hold what the rules say, in the order of age, and as many as the layout
    promises; so do pages and bytes."""
    plan, random = exact(plan), np.random.default_rng(seed)
    layout = CacheLayout(plan)
    size = 400 * max(layout.page_stride) * len(layout.page_stride)
    session = Numbers(layout, size)
    engine = engine_of(plan, session, size)
    lengths = [
        (int(random.integers(1, 150)), int(random.integers(0, 80)))
        for _ in range(random.integers(1, 4))
    ]
    live = [
        sequence_of(engine, tokens_of(i)[: sum(n)], n[0]) for i, n in enumerate(lengths)
    ]
    while any(s.cached < len(s.tokens) for s in live):
        going = [s for s in live if s.cached < len(s.tokens) and random.random() < 0.7]
        chunks = []
        for s in going:
            most = (
                s.prompt_tokens - s.cached
                if s.cached < s.prompt_tokens
                else engine.pool.steady(s.table)
            )
            count = min(int(random.integers(1, 60)), most, s.next_tokens(1000))
            chunks.append(
                PrefillChunk(
                    s, count, engine.pool.reserve(s.table, count, s.seals_after(count))
                )
            )
        if not chunks:
            continue
        if random.random() < 0.2:
            fail(engine, session, chunks)
            continue
        engine.engine.run(chunks)
        if random.random() < 0.2:
            s = going[0]
            s.table = engine.pool.swap_in(
                engine.pool.swap_out(s.table, session), session
            )
    promised = 0
    for i, (s, n) in enumerate(zip(live, lengths, strict=True)):
        held = expected(plan, n[0], sum(n), i)
        for b, bucket in enumerate(plan.index.buckets):
            assert s.table.lengths[b] == layout.all_held(sum(n))[b]
            for lane in bucket.lanes:
                found = session.positions(b, lane, s.table.pages[b], s.table.lengths[b])
                assert found.tolist() == held[b][lane]
        promised += layout.bytes_for(sum(n))
    assert engine.pool.bytes_in_use == promised
    for s in live:
        engine.pool.release(s.table)
    assert engine.pool.bytes_in_use == 0


def fail(engine: LLM, session: Numbers, chunks: list[PrefillChunk]) -> None:
    """The step runs, then something breaks: everything is as before."""
    before = engine.pool.pages_in_use
    changes = [chunk.reservation.change for chunk in chunks if chunk.reservation.change]
    taken = sum(len(ids) for change in changes for ids in change.taken)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "seal", broken)
        patch.setattr(session, "move", broken)
        if any(change.moves for change in changes):
            with pytest.raises(RuntimeError, match="broken"):
                engine.engine.run(chunks)
        else:
            for chunk in chunks:
                engine.pool.rollback(chunk.reservation)
    assert sum(engine.pool.pages_in_use) == sum(before) - taken


def broken(*_: object) -> None:
    raise RuntimeError("broken")


@settings(max_examples=60)
@given(
    plan=plans(),
    prompt=st.integers(1, 200),
    more=st.integers(0, 150),
    chunk=st.sampled_from([16, 32, 200]),
)
def test_a_sequence_never_needs_more_pages_than_its_worst(
    plan: CompressionPlan, prompt: int, more: int, chunk: int
) -> None:
    layout = CacheLayout(plan)
    pool = PagePool(layout, 400 * max(layout.page_stride) * len(layout.page_stride))
    table, worst, done = pool.open(), pool.worst_pages(prompt + more, prompt), 0
    unknown = pool.worst_pages(prompt + more)
    assert all(known <= most for known, most in zip(worst, unknown, strict=True))
    while done < prompt + more:
        count = min(chunk, prompt - done) if done < prompt else 1
        if plan.index.prompt_step and done < prompt:
            count = min(count, plan.index.prompt_step - done % plan.index.prompt_step)
        settles = done + count >= prompt or slice_ends(plan, done + count)
        reservation = pool.reserve(table, count, settles)
        assert all(
            now <= most for now, most in zip(pool.pages_in_use, worst, strict=True)
        )
        pool.commit(reservation)
        done += count
        if done >= prompt:
            assert pool.bytes_in_use == layout.bytes_for(done)
            assert table.lengths == layout.all_held(done)
