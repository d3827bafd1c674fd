"""Natively written pages hold the bytes that runtime/sessions/host/pages.py writes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.codec import Positions
from kvlathe.plan.formats import Bits, Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import SEAL
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cpu import PageWriter
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.sessions.host.pages import HostPages
from tests.native_cpu.library import AUTO, AVX2, NEON, PORTABLE
from tests.support.attend_cases import plan_of
from tests.support.mixed_cases import FLOATS

GROUPS = st.sampled_from([16, 32, 48, 64])
AXES = st.sampled_from(["rank", "token"])
BITS, SPANS = (
    st.sampled_from([2, 3, 4, 8, 16, 32]),
    st.sampled_from([1.0, 0.9, 0.75, 0.6321]),
)
TIERS = st.builds(
    Tier, BITS, BITS, AXES, AXES, GROUPS, GROUPS, span_k=SPANS, span_v=SPANS,
    rounding=st.sampled_from(["nearest", "stochastic"]),
)  # fmt: skip
FIXED = st.builds(
    Tier,
    *[st.sampled_from([2, 3, 4])] * 2,
    axis_v=st.just("rank"),
    group_k=GROUPS,
    group_v=GROUPS,
    coding_k=st.just("normal"),
    coding_v=st.just("normal"),
)
COUNTED = st.builds(
    Tier,
    BITS,
    BITS,
    st.just("rank"),
    st.just("token"),
    GROUPS,
    st.just(16),
    st.just("int"),
    sums=st.just(True),
)


def sealing_plan(tier: Tier, hot: Bits, page: int, seed: int = 0) -> CompressionPlan:
    lanes = [
        Lane(0, 0, 64, 48, 80, projected=True),
        Lane(0, 1, 64, 112, 16, projected=True),
    ]
    plan = plan_of(
        lanes,
        [Group((0, 1), Tier(hot, hot), (tier,), SEAL)],
        64,
        2,
        page,
    )
    return dataclasses.replace(plan, seed=seed)


def filled(plan: CompressionPlan, seed: int) -> HostPages:
    pages, random = HostPages(CacheLayout(plan), 1 << 20), np.random.default_rng(seed)
    for pair in pages.matrices[0].values():
        for part in pair:
            values = random.normal(1, 2, (plan.page_tokens, part.rank)).astype(
                np.float32
            )
            values[:, ::5] = 3  # constant groups among them, along the tokens
            part.write(pages.rows[0][1], values)
    return pages


@settings(max_examples=150)
@given(
    isa=st.sampled_from([PORTABLE, AVX2, NEON, AUTO]),
    tier=TIERS | FIXED | COUNTED | st.sampled_from(FLOATS),
    hot=st.sampled_from([16, 32]),
    page=st.sampled_from([16, 64, 80]),
    seed=st.integers(0, 2**33),
    first=st.integers(0, 2**33) | st.none(),
)
def test_native_seals_the_same_bytes(
    native: Native,
    isa: int,
    tier: Tier,
    hot: Bits,
    page: int,
    seed: int,
    first: int | None,
) -> None:
    """Two pages in one call. A page's tokens follow each other from ``first``, or every
    lane holds others of its own."""
    plan = sealing_plan(tier, hot, page, seed)
    pages = filled(plan, seed)
    random = np.random.default_rng(seed)
    own = random.integers(0, 1 << 30, (2, 2, page)).astype(np.int32)
    positions: list[list[Positions]] = [list(own[0]), list(own[1])]
    if first is not None:
        positions = [[first, first], [first + page, first + page]]
    source = pages.rows[0][1]
    targets = [len(pages.rows[1]) - 1, len(pages.rows[1]) - 2]
    for target, places in zip(targets, positions, strict=True):
        pages.encode(0, source, 1, target, places)
    expected = pages.rows[1][targets].copy()
    pages.rows[1][targets] = 0
    written = [(source, pages.rows[1][target]) for target in targets]
    jobs = [(*pair, places) for pair, places in zip(written, positions, strict=True)]
    try:
        PageWriter(native, plan, 2, isa).seal(0, 1, jobs)
    except KvlatheError as refusal:
        assume("not available" not in str(refusal))
        raise
    np.testing.assert_array_equal(pages.rows[1][targets], expected)


class NativePages(HostPages):
    """Whose tokens are copied by the library."""

    def __init__(self, plan: CompressionPlan, native: Native) -> None:
        super().__init__(CacheLayout(plan), 1 << 21)
        self.writer = PageWriter(native, plan)

    def copy_tokens(self, source, pages, target, targets, fields, places) -> None:  # noqa: ANN001  as HostPages
        self.writer.move(fields, source, pages, target, targets, places)


@settings(max_examples=60)
@given(
    bits=BITS,
    group=GROUPS,
    page=st.sampled_from([16, 64]),
    kept=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_native_moves_the_same_tokens(
    native: Native, bits: Bits, group: int, page: int, kept: int, seed: int
) -> None:
    """Within a bucket, and into another number format; the rest of the last page is
    zeroed."""
    tier = Tier(bits, bits, "rank", "rank", group, group)
    random = np.random.default_rng(seed)
    plan = sealing_plan(tier, 32, page)
    ours, theirs = NativePages(plan, native), HostPages(CacheLayout(plan), 1 << 21)
    count = kept * page + int(random.integers(0, page))
    ours.memory[:] = random.integers(0, 60, len(ours.memory))  # finite in every format
    theirs.memory[:] = ours.memory
    places = np.array(
        [np.sort(random.choice(5 * page, count, replace=False)) for _ in range(2)],
        np.int64,
    )
    for pages in (ours, theirs):
        pages.move(
            1, [7, 3, 5, 4, 6], 1, list(range(10, 10 + -(-count // page))), places
        )
        pages.move(
            0, [1, 2, 0, 3, 4], 1, list(range(15, 15 + kept)), places[:, : kept * page]
        )
    np.testing.assert_array_equal(ours.memory, theirs.memory)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ({"places": [[320]]}, "past the source"),
        ({"places": [[-1]]}, "past the source"),
        ({"pages": [1 << 20]}, "outside the source"),
        ({"target_pages": [-1]}, "outside the target"),
        ({"target_pages": []}, "do not fit"),
        ({"fields": [[[0, 1 << 20]]]}, "page stride"),
    ],
)
def test_moves_that_leave_the_pages_are_refused(
    native: Native, spoil: dict[str, list], said: str
) -> None:
    plan = sealing_plan(Tier(8, 8), 32, 64)
    pages = filled(plan, 0)
    before = pages.memory.copy()
    call: dict[str, list[Any]] = {
        "fields": [[[0, 192]]],
        "pages": [1, 2, 3, 4, 5],
        "target_pages": [9],
        "places": [[5]],
    } | spoil
    arrays = {name: np.array(call[name], np.int64) for name in ("fields", "places")}
    with pytest.raises(KvlatheError, match=said):
        PageWriter(native, plan).move(
            arrays["fields"],
            pages.rows[0],
            call["pages"],
            pages.rows[0],
            call["target_pages"],
            arrays["places"],
        )
    np.testing.assert_array_equal(pages.memory, before)
