"""Dealing KV heads to shards: every query head once, every layer evenly, bytes
alike."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.base.errors import KvlatheError
from kvlathe.export.methods.composition import CacheSettings, compose
from kvlathe.export.methods.compression import parse
from kvlathe.export.methods.options import RankOptions
from kvlathe.export.search import measured
from kvlathe.plan.deal import Deal, deal
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.layer_table import layer_table
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import SEAL, Budget, Window
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.token_score import ObservationWindow
from tests.support import stats_cases
from tests.support.nightly import rest_nightly
from tests.support.priced_cases import priced

HOT = Tier(16, 16)
MOST = 1.03
"""Bytes that a shard sets aside, over the mean of what shards fill."""


@st.composite
def plans(draw: st.DrawFn) -> CompressionPlan:
    """Any ranks, removed heads, formats by lane, and windows."""
    layers, heads = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    group = draw(st.integers(1, 8))
    seed = draw(st.integers(0, 999))
    rng = np.random.default_rng(seed)
    shape = ModelShape(layers, heads * group, heads, 128, 64, 100, 8192)
    lanes: list[Lane] = []
    for layer in range(layers):
        keeper = int(rng.integers(heads))
        for head in range(heads):
            k, v = (16 * rng.integers(1, 9, 2)).tolist()
            lane = Lane(layer, head, 128, k, v, projected=True)
            if head != keeper and rng.random() < 0.2:
                lane = dataclasses.replace(lane, rank_k=0, rank_v=0, fill_from=keeper)
            lanes.append(lane)
    kept = [i for i, lane in enumerate(lanes) if not lane.removed]
    eight = tuple(i for i in kept if rng.random() < 0.5)
    four = tuple(i for i in kept if i not in eight)
    groups = (
        Group(eight, HOT, (Tier(8, 8),), SEAL),
        Group(four, HOT, (Tier(4, 4),), Window(64, 128)),
    )
    kept_groups = tuple(group for group in groups if group.lanes)
    return CompressionPlan(shape, tuple(lanes), kept_groups)


def every_head_is_dealt_once(dealt: Deal) -> None:
    plan = dealt.plan
    heads: Counter[tuple[int, int]] = Counter()
    for lane_shards in dealt.shards:
        for lane_shard in lane_shards:
            queries = range(lane_shard.first, lane_shard.first + lane_shard.queries)
            heads.update((lane_shard.lane, query) for query in queries)
    kept = [i for i, lane in enumerate(plan.lanes) if not lane.removed]
    group = range(plan.model.group_size)
    assert heads == Counter({(lane, query): 1 for lane in kept for query in group})


@settings(max_examples=150)
@given(plan=plans(), num_shards=st.integers(1, 6))
def test_every_query_head_has_one_shard_and_every_layer_is_dealt_evenly(
    plan: CompressionPlan, num_shards: int
) -> None:
    group, layers = plan.model.group_size, range(plan.model.layers)
    fewest = min(len(plan.index.active(layer)) for layer in layers)
    if fewest * group < num_shards:
        with pytest.raises(KvlatheError, match=f"at most {fewest * group} shards"):
            deal(plan, num_shards)
        return
    dealt = deal(plan, num_shards)
    every_head_is_dealt_once(dealt)
    for layer in layers:
        counts = [len(own.index.active(layer)) for own in dealt.plans]
        assert max(counts) - min(counts) <= 1 and min(counts) > 0


@settings(max_examples=100)
@given(plan=plans(), num_shards=st.integers(1, 4))
def test_pages_have_one_size_and_hold_the_own_lanes(
    plan: CompressionPlan, num_shards: int
) -> None:
    """A page's number says where it is on every shard; what a shard lays out lies
    inside, and is what it lays out alone."""
    try:
        dealt = deal(plan, num_shards)
    except KvlatheError:
        return
    strides = {CacheLayout(own).page_stride for own in dealt.plans}
    assert len(strides) == 1
    largest = strides.pop()
    filled = [CacheLayout(own).filled for own in dealt.plans]
    assert largest == tuple(np.max(filled, axis=0))
    for own, lane_shards in zip(dealt.plans, dealt.shards, strict=True):
        layout = CacheLayout(own)
        assert own.model.group_size == max(
            lane_shard.queries for lane_shard in lane_shards
        )
        for bucket in range(len(own.index.buckets)):
            rows = layout.lane_table(bucket)
            assert set(own.index.buckets[bucket].lanes) <= set(
                plan.index.buckets[bucket].lanes
            )
            assert (rows[:, 4:8] <= largest[bucket]).all()
        for layer in range(plan.model.layers):
            assert len(layer_table(CacheLayout(own), layer))
    if num_shards == 1:
        assert filled[0] == CacheLayout(plan).page_stride


SHAPE = ModelShape(32, 32, 8, 32, 96, 50, 32768)


AUTO = {2: (MOST, MOST), 3: (MOST, 1.06), 4: (1.05, 1.1), 8: (1.13, 1.31)}
"""For ``auto`` in 17 to 20 buckets, by shards: bytes held by the fullest shard, and set
aside."""


@cache
def method_plans() -> dict[str, CompressionPlan]:
    """Plans that methods make of statistics whose heads differ as those of models
    do."""
    stats = stats_cases.stats(3, SHAPE)
    form = CacheSettings(16)
    asked: dict[str, dict[str, Any]] = {
        "fdc": {"removal_rate": 0.3},
        "fdc+hack:bits=8": {"removal_rate": 0.3},
        "fdc+hack:bits=4": {"compression_ratio": 0.8, "allocation": "global"},
    }
    found: dict[str, CompressionPlan] = {}
    for request, options in asked.items():
        given = RankOptions(**options)
        found[request] = compose(parse(request), SHAPE, True, stats, given, form)[0]
    return found


@cache
def auto_plan(ratio: float) -> CompressionPlan:
    """Forms and windows by losses that differ a thousandfold."""
    found = priced(1, shape=SHAPE)
    return measured.variant(parse("auto"), found, CacheSettings(16)).at(ratio)[0]


def worst(dealt: Deal, tokens: int) -> float:
    """The bytes that the fullest shard holds, over the mean."""
    filled = dealt.filled(tokens)
    return max(filled) * dealt.num_shards / sum(filled)


def set_aside(dealt: Deal, tokens: int) -> float:
    """The bytes that pages take on every shard, over the mean of what is filled of
    them."""
    return dealt.taken(tokens) * dealt.num_shards / sum(dealt.filled(tokens))


@pytest.mark.parametrize("num_shards", [2, 3, 4, 8])
def test_shards_hold_the_same_bytes_of_what_methods_make(num_shards: int) -> None:
    for name, plan in method_plans().items():
        dealt = deal(plan, num_shards)
        for tokens in (plan.prefill_chunk, 8192, 32768):
            assert worst(dealt, tokens) <= set_aside(dealt, tokens) <= MOST, name


@pytest.mark.parametrize("ratio", rest_nightly([0.6, 0.8, 0.9], 0.8))
@pytest.mark.parametrize("num_shards", [2, 3, 4, 8])
def test_shards_hold_about_the_same_bytes_of_auto(
    num_shards: int, ratio: float
) -> None:
    """It has up to twenty buckets here. A page has one size on every shard, so each of them
    costs what its fullest shard has more."""
    dealt = deal(auto_plan(ratio), num_shards)
    for tokens in (8192, 32768):
        assert worst(dealt, tokens) <= AUTO[num_shards][0]
        assert set_aside(dealt, tokens) <= AUTO[num_shards][1]


@settings(max_examples=10)
@given(seed=st.integers(0, 999), num_shards=st.sampled_from([2, 3, 4, 6, 8]))
def test_shards_set_aside_the_same_bytes_of_a_large_model(
    seed: int, num_shards: int
) -> None:
    """32 layers of 8 heads, any ranks, two formats: pages are no larger than 1.03 of
    what shards hold on average."""
    rng = np.random.default_rng(seed)
    shape = ModelShape(32, 32, 8, 128, 4096, 128256, 131072)
    pairs = (16 * rng.integers(1, 9, (32, 8, 2))).tolist()
    lanes = tuple(
        Lane(layer, head, 128, *pairs[layer][head], projected=True)
        for layer in range(32)
        for head in range(8)
    )
    every = tuple(range(len(lanes)))
    eight = tuple(i for i in every if rng.random() < 0.4)
    four = tuple(i for i in every if i not in eight)
    groups = (
        Group(eight, HOT, (Tier(8, 8),), SEAL),
        Group(four, HOT, (Tier(4, 4),), SEAL),
    )
    dealt = deal(CompressionPlan(shape, lanes, groups), num_shards)
    for tokens in (100, 8192, 131072):
        assert set_aside(dealt, tokens) <= MOST


def test_shards_beyond_the_heads_hold_some_twice() -> None:
    plan = method_plans()["fdc"]
    for num_shards in (12, 16, 32):
        dealt = deal(plan, num_shards)
        assert all(len(own.index.active(0)) == 1 for own in dealt.plans)
        assert set_aside(dealt, 32768) <= MOST
        copies = sum(dealt.filled(8192)) / CacheLayout(plan).bytes_for(8192)
        assert 1 < copies <= num_shards / SHAPE.kv_heads * 1.01
    with pytest.raises(KvlatheError, match=r"has 32 query heads.*at most 32 shards"):
        deal(plan, 33)


def test_a_plan_that_ranks_tokens_is_not_dealt() -> None:
    plan = method_plans()["fdc"]
    every = plan.index.buckets[0].lanes
    budget = dataclasses.replace(
        plan,
        groups=(Group(every, HOT, life=Budget(128)),),
        score=ObservationWindow(last=8),
    )
    assert deal(budget, 1).num_shards == 1
    with pytest.raises(KvlatheError, match="shards move whole pages"):
        deal(budget, 2)
