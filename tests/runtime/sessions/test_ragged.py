"""Laws of the shares of a step, for sessions that pad: they are a partition, and no
sequence pays for another one that is much longer."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvlathe.runtime.sessions.host.ragged import by_size
from kvlathe.runtime.sessions.protocols import StepPlan

PAGE = 16


def step_of(lengths: list[int], counts: list[int]) -> StepPlan:
    """A step of two buckets, of which the second holds half of what is cached; pages
    have numbers of their own."""
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    cached = np.array([[n, n // 2] for n in lengths], np.int32)
    new = np.array(counts)
    tables: list[np.ndarray] = []
    for bucket in range(2):
        pages = -(-(cached[:, bucket] + new) // PAGE)
        columns = np.arange(max(1, pages.max()))
        numbers = columns + 1000 * np.arange(1, len(lengths) + 1)[:, None]
        tables.append(np.where(columns < pages[:, None], numbers, 0).astype(np.int32))
    ends = starts[1:][new > 0] - 1
    return StepPlan(
        input_ids=np.arange(starts[-1], dtype=np.int32),
        positions=np.zeros(starts[-1], np.int32),
        cu_seqlens_q=starts,
        query_offsets=np.arange(max(counts), dtype=np.int32),
        lengths=cached,
        page_tables=tuple(tables),
        logit_rows=ends.astype(np.int32),
    )


@st.composite
def steps(draw: st.DrawFn) -> StepPlan:
    size = draw(st.integers(1, 8))
    lengths = st.lists(st.integers(0, 600), min_size=size, max_size=size)
    counts = st.lists(st.integers(0, 70), min_size=size, max_size=size)
    return step_of(draw(lengths), draw(counts.filter(any)))


@given(step=steps())
def test_shares_are_a_partition(step: StepPlan) -> None:
    """Every token and every row of logits is in one share, with the pages that it
    needs."""
    tokens: list[int] = []
    logits: list[int] = []
    every = np.arange(len(step.input_ids))
    for share in by_size(step, 0, PAGE):
        part = share.step
        tokens += every[share.tokens].tolist()
        logits += np.arange(len(step.logit_rows))[share.logits].tolist()
        assert (part.input_ids == step.input_ids[share.tokens]).all()
        wanted = part.input_ids[part.logit_rows]
        assert (wanted == step.input_ids[step.logit_rows][share.logits]).all()
        for mine, table in zip(part.page_tables, step.page_tables, strict=True):
            rows = table[share.sequences]
            assert (mine == rows[:, : mine.shape[1]]).all()
            assert not rows[:, mine.shape[1] :].any()
    assert sorted(tokens) == every.tolist()
    assert sorted(logits) == list(range(len(step.logit_rows)))


@given(step=steps())
def test_nobody_is_padded_to_twice_its_size(step: StepPlan) -> None:
    """Neither queries nor pages, where sequences differ."""
    shares = list(by_size(step, 0, PAGE))
    if len(shares) == 1:
        return
    for share in shares:
        counts = np.diff(share.step.cu_seqlens_q)
        held = share.step.lengths + counts[:, None]
        pages = (-(-held // PAGE)).sum(1)
        assert counts.max() < 2 * counts.min()
        assert pages.max() < 2 * pages.min()
        for table, of_bucket in zip(share.step.page_tables, held.T, strict=True):
            assert table.shape[1] == max(1, -(-of_bucket.max() // PAGE))


def test_a_long_sequence_runs_apart_from_short_ones() -> None:
    """22 decodes at 20 tokens beside one at 900 and one at 700."""
    step = step_of([20] * 22 + [900, 700], [1] * 24)
    widths = [s.step.page_tables[0].shape[1] for s in by_size(step, 0, PAGE)]
    assert widths == [2, 57]
