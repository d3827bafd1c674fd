"""The parts in which the CUDA kernels take a plan: each bucket once for each window."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from kvlathe.plan.formats import Tier
from kvlathe.plan.heads import Lane
from kvlathe.plan.kernel_parts import kernel_parts, most_in_a_layer, most_slots
from kvlathe.plan.plan import Bucket, CompressionPlan
from kvlathe.plan.token_rules import KEEP_ALL, SEES_ALL, TokenRule, Window
from tests.support.attend_cases import plan_of

NEAR, FAR = Window(64, 128), Window(0, 256)
RULES: tuple[TokenRule, ...] = (KEEP_ALL, NEAR, FAR)


def sealed(rules: list[TokenRule]) -> CompressionPlan:
    """Two layers of two heads; lane i is sealed under ``rules[i]``, and the last one has a
    fresh bucket of its own with a window."""
    lanes = [Lane(i // 2, i % 2, 64, 32, 32, projected=True) for i in range(4)]
    members: dict[TokenRule, list[int]] = {}
    for lane, rule in enumerate(rules):
        members.setdefault(rule, []).append(lane)
    buckets = [Bucket(0, (0, 1, 2)), Bucket(0, (3,), tokens=NEAR)]
    for rule, of_rule in members.items():
        buckets.append(Bucket(1, tuple(of_rule), source=0, tokens=rule))
    return plan_of(lanes, [Tier(16, 16), Tier(4, 4)], buckets, 64, 2, 64)


@given(rules=st.lists(st.sampled_from(RULES), min_size=3, max_size=3))
def test_every_lane_of_a_bucket_is_in_the_part_of_its_window(
    rules: list[TokenRule],
) -> None:
    plan = sealed(rules)
    parts = kernel_parts(plan)
    pairs = [(part.bucket, lane) for part in parts for lane in part.lanes]
    buckets = enumerate(plan.buckets)
    assert sorted(pairs) == [(b, i) for b, bucket in buckets for i in bucket.lanes]
    for part in parts:
        for lane in part.lanes:
            assert part.window == plan.window(lane)
            own = [b for b, x in enumerate(plan.buckets) if lane in x.lanes]
            assert own == [b for b in (part.fresh, part.sealed) if b >= 0]
    windows = [(part.bucket, part.window) for part in parts]
    assert len(windows) == len(set(windows))
    assert [part.bucket for part in parts] == sorted(part.bucket for part in parts)


def test_buckets_of_a_lane_and_of_a_layer_are_counted() -> None:
    plan = sealed([KEEP_ALL, NEAR, FAR])
    assert most_slots(plan) == 2
    assert most_in_a_layer(plan) == 3
    assert len(kernel_parts(plan)) == 7


def test_a_bucket_without_lanes_has_a_part() -> None:
    """A rank may keep nothing of it; tables and lengths are by bucket all the same."""
    plan = sealed([NEAR, NEAR, NEAR])
    empty = dataclasses.replace(plan.buckets[1], lanes=())
    own = SimpleNamespace(buckets=(plan.buckets[0], empty, plan.buckets[2]))
    parts = kernel_parts(cast(CompressionPlan, own))
    assert [part.bucket for part in parts] == [0, 1, 2]
    assert not parts[1].lanes and parts[1].window == SEES_ALL
