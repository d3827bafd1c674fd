"""Facts that follow from the groups of a plan: its buckets, and the parts in which the
CUDA kernels take them, each bucket once for each sight."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from kvlathe.plan.deal import deal
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.lives import (
    SEAL,
    Age,
    Budget,
    Compact,
    Divide,
    Keep,
    Life,
    SealAfter,
    Window,
)
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.sight import SEES_ALL
from kvlathe.plan.stages import Stage
from kvlathe.plan.token_score import ObservationWindow
from tests.support.attend_cases import plan_of

NEAR, FAR = Window(64, 128), Window(0, 256)
LIVES: tuple[Life, ...] = (SEAL, NEAR, FAR)
HOT, COLD = Tier(16, 16), (Tier(8, 8, "rank", "rank"), Tier(4, 4, "rank", "rank"))
ANY: tuple[Life, ...] = (
    Keep(), SEAL, NEAR, FAR, Budget(64), Budget(128), Divide((0.5, 0.5)), Compact(0.5),
    SealAfter(64), Age(64, 128), Age(0, 64),
)  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> CompressionPlan:
    """Four layers of three heads in one stage or two; any lives that go together."""
    lanes = [Lane(i // 3, i % 3, 64, 32, 32, projected=True) for i in range(12)]
    kinds = draw(
        st.sampled_from(
            [(*ANY[:4], *ANY[8:]), (*ANY[:2], *ANY[4:7]), (ANY[7],), (*ANY[4:6],)]
        )
    )
    staged = kinds[0].by_saliency and draw(st.booleans())
    groups: list[Group] = []
    for first, end in ((0, 6), (6, 12)):
        members: dict[object, list[int]] = {}
        for lane in range(first, end):
            members.setdefault(draw(st.integers(0, 3)), []).append(lane)
        for own in members.values():
            life = draw(st.sampled_from(kinds))
            count = draw(st.sampled_from([*life.cold_tiers]))
            groups.append(Group(tuple(own), HOT, COLD[:count], life))
    ranked = any(group.life.by_saliency for group in groups)
    shape = ModelShape(4, 6, 3, 64, 64, 97, 1024)
    return CompressionPlan(
        shape,
        tuple(lanes),
        tuple(groups),
        prefill_chunk=64,
        score=ObservationWindow(last=8) if ranked else None,
        stages=(Stage(0), Stage(2, 16)) if staged else (),
    )


@given(plan=plans())
def test_every_lane_has_one_hot_bucket_and_a_cold_one_for_each_cold_tier(
    plan: CompressionPlan,
) -> None:
    index = plan.index
    assert [bucket.number for bucket in index.buckets] == [*range(len(index.buckets))]
    for group in plan.groups:
        for lane in group.lanes:
            own = [bucket for bucket in index.buckets if lane in bucket.lanes]
            hot, *cold = sorted(own, key=lambda bucket: not bucket.is_hot)
            assert index.hot_bucket[lane] == hot.number == hot.hot
            assert hot.tier == group.hot
            assert tuple(bucket.tier for bucket in cold) == group.cold
            for bucket in cold:
                assert bucket.hot == hot.number and bucket.number in hot.cold
                assert bucket.life == group.life and bucket.stays
                assert bucket.lanes == group.lanes
            assert group.life in hot.lives and hot.stays == (not cold)
            layer = plan.lanes[lane].layer
            assert all(layer in index.layers_of(bucket.stage) for bucket in own)


@given(plan=plans())
def test_lanes_share_hot_pages_where_they_hold_equally_many_tokens_in_one_stage(
    plan: CompressionPlan,
) -> None:
    """Full pages that are sealed leave the same rest. All others are alone: the tokens
    that a life keeps hot are no other's."""
    for bucket in plan.index.buckets:
        groups = [group for group in plan.groups if set(group.lanes) & {*bucket.lanes}]
        if len(groups) > 1:
            assert bucket.is_hot
            assert all(group.cold and group.life.seals for group in groups)
    sealed = [
        bucket
        for bucket in plan.index.buckets
        if bucket.is_hot and bucket.cold and bucket.life.seals
    ]
    alike = {(bucket.stage, bucket.life.stay_hot) for bucket in sealed}
    assert len(alike) == len(sealed)
    for bucket in sealed:
        assert len({life.stay_hot for life in bucket.lives}) == 1


@given(plan=plans())
def test_buckets_of_a_stage_are_those_of_its_own_plan(plan: CompressionPlan) -> None:
    for stage in range(len(plan.stages)):
        part = plan.part(stage).index.buckets
        own = [plan.index.buckets[b] for b in plan.index.buckets_of(stage)]
        first = plan.index.layers_of(stage)[0] * plan.model.kv_heads
        found = [tuple(lane + first for lane in bucket.lanes) for bucket in part]
        assert found == [bucket.lanes for bucket in own]
        assert [bucket.tier for bucket in part] == [bucket.tier for bucket in own]


def sealed(lives: list[Life]) -> CompressionPlan:
    """Two layers of two heads; lane i is sealed and lives by ``lives[i]``, and the last
    one has a hot bucket of its own with a window."""
    lanes = [Lane(i // 2, i % 2, 64, 32, 32, projected=True) for i in range(4)]
    members: dict[Life, list[int]] = {}
    for lane, life in enumerate(lives):
        members.setdefault(life, []).append(lane)
    groups = [
        Group(tuple(own), HOT, (Tier(4, 4),), life) for life, own in members.items()
    ]
    groups.insert(1, Group((3,), HOT, life=NEAR))
    return plan_of(lanes, groups, 64, 2, 64)


@given(lives=st.lists(st.sampled_from(LIVES), min_size=3, max_size=3))
def test_every_lane_of_a_bucket_is_in_the_part_of_its_sight(lives: list[Life]) -> None:
    plan = sealed(lives)
    parts = plan.index.parts
    pairs = [(part.bucket, lane) for part in parts for lane in part.lanes]
    buckets = plan.index.buckets
    assert sorted(pairs) == [(b.number, lane) for b in buckets for lane in b.lanes]
    for part in parts:
        for lane in part.lanes:
            assert part.sight == plan.index.sight(lane)
            own = {bucket.number for bucket in buckets if lane in bucket.lanes}
            assert own == {b for b in (part.fresh, part.sealed) if b >= 0}
    sights = [(part.bucket, part.sight) for part in parts]
    assert len(sights) == len(set(sights))
    assert [part.bucket for part in parts] == sorted(part.bucket for part in parts)


def test_buckets_of_a_lane_and_of_a_layer_are_counted() -> None:
    plan = sealed([SEAL, NEAR, FAR])
    assert plan.index.most_slots == 2
    assert plan.index.most_in_a_layer == 3
    assert len(plan.index.parts) == 7


def test_a_bucket_without_lanes_has_a_part() -> None:
    """A rank may keep nothing of it; tables and lengths are by bucket all the same."""
    whole = sealed([NEAR, NEAR, NEAR])
    own = deal(whole, 1).plans[0]
    hot, alone = whole.groups
    own = dataclasses.replace(
        own,
        lanes=(
            *own.lanes[:3],
            dataclasses.replace(own.lanes[3], rank_k=0, rank_v=0, fill_from=0),
        ),
        groups=(hot, dataclasses.replace(alone, lanes=())),
    )
    parts = own.index.parts
    assert [part.bucket for part in parts] == [0, 1, 2]
    empty = next(part for part in parts if not part.lanes)
    assert not own.index.buckets[empty.bucket].lanes and empty.sight == SEES_ALL
