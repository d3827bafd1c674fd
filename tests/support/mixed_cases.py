"""Plans whose heads lie in many buckets: formats and windows mixed in one layer, behind
one fresh bucket, as a build chooses them. And random steps of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.plan.lives import SEAL, Age, Life, Window
from kvlathe.plan.plan import CompressionPlan
from tests.support.attend_cases import Case, plan_of, scored
from tests.support.runtime_cases import F8, model_shape, plan_for

HOT = Tier(16, 16)
NORMAL: dict[str, Any] = {"coding_k": "normal", "coding_v": "normal"}
FLOATS = (
    F8,
    dataclasses.replace(F8, bits_v=4, axis_v="token", group_v=32, coding_v="affine"),
    dataclasses.replace(F8, bits_k=3, axis_k="token", group_k=32, coding_k="affine"),
    dataclasses.replace(F8, bits_k=16, group_k=64, coding_k="affine"),
    dataclasses.replace(F8, bits_v=4, group_v=48, coding_v="normal"),
)
"""Of 8 bits: K and V, and one of them beside other formats."""
TIERS = (
    Tier(8, 8),
    Tier(4, 4),
    Tier(2, 2, "rank", "rank"),
    Tier(4, 2, "token", "rank"),
    Tier(3, 3),
    Tier(8, 4, "token", "token"),
    Tier(4, 4, "rank", "rank", **NORMAL),
    Tier(3, 2, "rank", "rank", **NORMAL),
    Tier(2, 3, "token", "rank"),
    Tier(2, 2, "token", "token"),
    Tier(3, 8, "token", "rank"),
    Tier(16, 4, "rank", "rank"),
    Tier(2, 16, "token", "rank"),
    Tier(4, 8, "token", "rank", 32, 48),
    Tier(3, 4, "token", "token", 64, 16),
    Tier(8, 2, "token", "token", 16, 32),
    Tier(2, 3, "rank", "rank", 48, 32),
    *FLOATS,
)
RANKS = ((48, 64), (128, 16), (16, 128), (32, 32), (96, 80), (80, 112), (64, 48))
Kind = tuple[Tier, Life]
NEAR, NEWEST = Window(64, 64), Window(0, 128)
SEALED: tuple[Kind, ...] = (
    (Tier(8, 8), SEAL),
    (Tier(8, 8, "token", "rank"), NEAR),
    (Tier(4, 4), NEAR),
    (Tier(4, 8, "token", "rank"), SEAL),
    (Tier(8, 8), NEWEST),
    (Tier(8, 4, "rank", "rank", coding_v="normal"), NEWEST),
    (F8, SEAL),
)
OF_LANES = (0, 1, 2, 3, 4, 6, 5, 1)
"""The two heads of every layer of lathe-5m see different windows."""


def model_plan(chunk: int) -> CompressionPlan:
    """A plan of lathe-5m, for whole sessions."""
    groups = []
    for kind, (tier, life) in enumerate(SEALED):
        lanes = tuple(lane for lane, of in enumerate(OF_LANES) if of == kind)
        groups.append(Group(lanes, HOT, (tier,), life))
    return plan_for(model_shape(), tuple(groups), 64, chunk)


def mixed_plan(
    kinds: Sequence[Kind], of: Sequence[int], page: int, group: int, apart: bool = False
) -> CompressionPlan:
    """One layer whose lane i is sealed into the bucket of ``kinds[of[i]]``. ``apart``:
    the last lane has a hot bucket of its own, with a window, and is never sealed."""
    lanes: list[Lane] = []
    members: dict[int, list[int]] = {}
    for i, kind in enumerate(of):
        ranks = RANKS[i % len(RANKS)]
        lanes.append(Lane(0, i, 64, *ranks, projected=True))
        members.setdefault(kind, []).append(i)
    groups: list[Group] = []
    for kind, of_kind in members.items():
        tier, life = kinds[kind]
        groups.append(Group(tuple(of_kind), HOT, (tier,), life))
    if apart:
        lanes.append(Lane(0, len(of), 64, 80, 96, projected=True))
        groups.insert(1, Group((len(of),), HOT, life=Window(page, page)))
    return plan_of(lanes, groups, 64, group, page)


def lengths_of(
    plan: CompressionPlan, tail: int, whole: int, kept: dict[Life, int]
) -> list[int]:
    """Tokens of one sequence in every bucket: ``tail`` in hot ones, ``whole`` where all
    are sealed, ``kept`` under each window."""
    lengths: list[int] = []
    for bucket in plan.index.buckets:
        held = kept.get(bucket.life, whole)
        lengths.append(tail if bucket.is_hot else held)
    return lengths


@st.composite
def kinds_of(draw: st.DrawFn, page: int, most: int) -> list[Kind]:
    """Formats and lives of cold buckets, up to ``most``."""
    exact = Window.of_tokens(draw(st.integers(1, 3 * page)), page)
    lives = [SEAL, Window(page, 2 * page), Window(0, page), exact]
    every = [(tier, life) for tier in TIERS for life in lives]
    return draw(
        st.lists(st.sampled_from(every), min_size=4, max_size=most, unique=True)
    )


@st.composite
def mixed_steps(
    draw: st.DrawFn,
    pages: Sequence[int],
    most: int,
    queries: Sequence[int],
    has_scoring: bool = True,
) -> Case:
    """A ragged step of such a plan. ``most``: cold buckets. ``queries``: new rows of a
    sequence. ``has_scoring``: whether models may bound scores or have sink logits."""
    page = draw(st.sampled_from(pages))
    kinds = draw(kinds_of(page, most))
    some = st.integers(0, len(kinds) - 1)
    of = [*range(len(kinds)), *draw(st.lists(some, max_size=3))]
    order = draw(st.permutations(of))
    group = draw(st.integers(1, 8))
    plan = mixed_plan(kinds, order, page, group, draw(st.booleans()))
    if has_scoring:
        plan = scored(plan, draw)
    batch = draw(st.integers(1, 4))
    counts = st.lists(st.sampled_from(queries), min_size=batch, max_size=batch)
    rows = draw(counts.filter(any))
    lengths: list[list[int]] = []
    for _ in range(batch):
        whole = draw(st.integers(0, 5)) * page
        kept: dict[Life, int] = {}
        for _, life in kinds:
            if life.drops and life not in kept:
                kept[life] = draw(st.integers(0, 4)) * page
        tail = draw(st.integers(0, 2 * page))
        lengths.append(lengths_of(plan, tail, whole, kept))
    case = Case(plan, 0, rows, lengths, draw(st.integers(0, 99)))
    case.scale = 0.05  # sharper scores would show the rounding of q', not a fault
    return case


@st.composite
def aged_steps(draw: st.DrawFn, pages: Sequence[int], queries: Sequence[int]) -> Case:
    """A ragged step of a layer whose lanes have newest tokens in one format and older
    ones in another, in one group or two. What waits in the older one is poisoned."""
    page = draw(st.sampled_from(pages))
    count = draw(st.integers(1, 4))
    lanes = [
        Lane(0, i, 64, *draw(st.sampled_from(RANKS)), projected=True)
        for i in range(count)
    ]
    first, cut = draw(st.integers(0, 1)) * page, draw(st.integers(0, count - 1))
    groups: list[Group] = []
    for own in (range(cut), range(cut, count)):
        life = Age(first, draw(st.integers(1, 4)) * page)
        tiers = draw(st.sampled_from(TIERS)), draw(st.sampled_from(TIERS))
        if own:
            groups.append(Group(tuple(own), HOT, tiers, life))
    plan = plan_of(lanes, groups, 64, draw(st.integers(1, 8)), page)
    batch = draw(st.integers(1, 4))
    counts = st.lists(st.sampled_from(queries), min_size=batch, max_size=batch)
    rows = draw(counts.filter(any))
    buckets = len(plan.index.buckets)
    lengths = [[0] * buckets for _ in rows]
    waiting = np.zeros((batch, buckets), np.int32)
    (route,) = plan.index.routes
    for b in range(batch):
        arrived = draw(st.integers(0, 12 * page))
        counts = zip(route.held(arrived), route.written(arrived), strict=True)
        for bucket, (seen, there) in zip(route.buckets, counts, strict=True):
            lengths[b][bucket] = seen
            waiting[b, bucket] = (there - seen) // page
    case = Case(plan, 0, rows, lengths, draw(st.integers(0, 99)))
    case.scale = 0.05  # as in mixed_steps
    case.waiting = waiting
    return case
