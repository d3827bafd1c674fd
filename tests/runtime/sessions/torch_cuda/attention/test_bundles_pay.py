"""Rows of a sequence are attended together where that was measured to be faster."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.plan.formats import Bits, Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.lives import SEAL, Window
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import MAX_BUNDLE
from kvlathe.runtime.sessions.gpu.step_buffer import NO_SHORT_ROWS, ShortRows
from kvlathe.runtime.sessions.torch_cuda.attention.bundles import (
    COSTS,
    OTHER_COST,
    Bundling,
    cost_of,
)
from tests.support.checkpoints import whole_plan

MEASURED = json.loads(Path(__file__).with_name("bundle_times.json").read_text("utf-8"))
MODEL = Path(__file__).resolve().parents[5] / "models" / "lathe-5m"
SMS = 132
"""Multiprocessors of the GPU that the times are of."""
HEADS = 8


def plan_of(*tiers: Tier, heads: int = HEADS, group: int = 4) -> CompressionPlan:
    """All lanes in 16 bits at first, then sealed into each of ``tiers`` in turn."""
    plan = whole_plan(Checkpoint(MODEL).spec)
    lane = plan.lanes[0]
    lanes = tuple(
        dataclasses.replace(lane, layer=0, head=head) for head in range(heads)
    )
    model = dataclasses.replace(
        plan.model, layers=1, kv_heads=heads, query_heads=heads * group
    )
    every, hot = tuple(range(heads)), Tier(16, 16)
    groups = [
        Group(every[i :: len(tiers)], hot, (tier,), SEAL)
        for i, tier in enumerate(tiers)
    ]
    return dataclasses.replace(
        plan, model=model, lanes=lanes, groups=tuple(groups) or (Group(every, hot),)
    )


def windowed(plan: CompressionPlan, exact: int) -> CompressionPlan:
    """Every row sees its own page and the 1,024 tokens before that."""
    *others, last = plan.groups
    last = dataclasses.replace(last, life=Window(0, 1024, exact))
    return dataclasses.replace(plan, groups=(*others, last))


def layered(plan: CompressionPlan, layers: int) -> CompressionPlan:
    """The plan of one layer so many times, each layer in groups of its own."""
    heads = len(plan.lanes)
    groups = [
        dataclasses.replace(
            group, lanes=tuple(lane + layer * heads for lane in group.lanes)
        )
        for layer in range(layers)
        for group in plan.groups
    ]
    lanes = tuple(
        dataclasses.replace(lane, layer=layer)
        for layer in range(layers)
        for lane in plan.lanes
    )
    model = dataclasses.replace(plan.model, layers=layers)
    return dataclasses.replace(plan, model=model, lanes=lanes, groups=tuple(groups))


def short_rows(plan: CompressionPlan, rows: list[int], tokens: list[int]) -> ShortRows:
    """Sequences that bring ``rows`` and have ``tokens`` in the last bucket."""
    cached = np.zeros((len(rows), len(plan.index.buckets)), np.int32)
    cached[:, -1] = tokens
    return ShortRows(np.array(rows, np.int32), cached)


def even(plan: CompressionPlan, sequences: int, rows: int, tokens: int) -> ShortRows:
    return short_rows(plan, [rows] * sequences, [tokens] * sequences)


@pytest.mark.parametrize("bits", COSTS)
def test_chosen_bundles_take_hardly_longer_than_the_faster_way(bits: Bits) -> None:
    longer: list[float] = []
    for case in MEASURED["times"]:
        if case["bits"] != bits:
            continue
        tiers = [] if bits == 16 else [Tier(bits, bits)]
        plan = plan_of(*tiers, group=case["group"])
        short = even(plan, case["sequences"], case["rows"], case["tokens"])
        chosen = Bundling(plan).pays(short, SMS)
        if case["rows"] == 1:
            assert not chosen
        times = (case["alone_us"], case["bundle_us"])
        longer.append(times[chosen] / min(times))
    assert len(longer) >= 20
    assert max(longer) <= 1.1
    assert sum(longer) / len(longer) <= 1.005


@pytest.mark.parametrize("bits", COSTS)
def test_more_tokens_or_rows_of_one_pass_never_end_a_bundle(bits: Bits) -> None:
    """Each of them saves more reads."""
    plan = plan_of(*([] if bits == 16 else [Tier(bits, bits)]), group=1)
    sizes = [1 << power for power in range(22)]
    found = np.array(
        [
            [Bundling(plan).pays(even(plan, 4, rows, tokens), SMS) for tokens in sizes]
            for rows in range(1, 9)
        ]
    )
    assert found.any() and not found.all()
    assert (np.diff(found.astype(int), axis=0) >= 0).all()
    assert (np.diff(found.astype(int), axis=1) >= 0).all()


def test_costs_are_those_of_the_kernel_that_takes_the_plan() -> None:
    assert cost_of(plan_of()) is COSTS[16]
    assert cost_of(plan_of(Tier(4, 4))) is COSTS[4]
    assert cost_of(plan_of(Tier(3, 3))) is OTHER_COST
    assert cost_of(plan_of(Tier(8, 4))) is OTHER_COST
    assert cost_of(plan_of(Tier(8, 8), Tier(4, 4))) is OTHER_COST
    assert cost_of(plan_of(Tier(4, 4), Tier(4, 4, group_v=32))) is OTHER_COST
    assert cost_of(plan_of(Tier(4, 4, axis_k="token"))) is OTHER_COST
    assert cost_of(plan_of(Tier(4, 4, coding_k="normal"))) is OTHER_COST
    assert cost_of(plan_of(Tier(4, 4, group_v=16))) is OTHER_COST
    assert cost_of(plan_of(Tier(4, 4, group_v=48))) is OTHER_COST
    assert cost_of(plan_of(Tier(16, 4))) is OTHER_COST
    assert cost_of(plan_of(*[Tier(16, 16)] * 3)) is OTHER_COST
    assert cost_of(windowed(plan_of(Tier(4, 4)), exact=1020)) is OTHER_COST
    assert cost_of(windowed(plan_of(Tier(4, 4)), exact=0)) is COSTS[4]
    bounded = plan_of(Tier(4, 4))
    bounded = dataclasses.replace(
        bounded, model=dataclasses.replace(bounded.model, softcap=30.0)
    )
    assert cost_of(bounded) is OTHER_COST


def test_rows_are_weighed_with_the_tokens_of_their_own_sequence() -> None:
    """A long sequence that guesses nothing is no reason for bundles of short ones."""
    plan = plan_of(Tier(4, 4))
    others = [1024] * 15
    long = short_rows(plan, [1] + [5] * 15, [1 << 18, *others])
    assert not Bundling(plan).pays(long, SMS)
    guessing = short_rows(plan, [5] * 16, [1 << 18, *others])
    assert Bundling(plan).pays(guessing, SMS)


def test_layers_are_as_one_of_them() -> None:
    one = plan_of(Tier(4, 4))
    three = layered(one, 3)
    assert cost_of(three) is COSTS[4]
    for sequences in (1, 16, 128):
        for tokens in (256, 1024, 4096, 16384, 65536):
            for rows in (1, 2, 3, 4, 8):
                short = even(one, sequences, rows, tokens)
                hot, cold = short.cached.T
                columns = [hot if b.is_hot else cold for b in three.index.buckets]
                every = ShortRows(short.rows, np.stack(columns, 1))
                assert Bundling(three).pays(every, SMS) == Bundling(one).pays(
                    short, SMS
                )


def test_tokens_that_a_window_hides_save_no_reads() -> None:
    plan = plan_of()
    seen = windowed(plan, exact=0)
    for sequences in (1, 4, 16, 64):
        for rows in (2, 4, 8):
            near = even(plan, sequences, rows, 1024 + plan.page_tokens)
            far = even(plan, sequences, rows, 1 << 17)
            assert Bundling(seen).pays(far, SMS) == Bundling(plan).pays(near, SMS)


def test_sequences_of_more_passes_pay_for_more_pairs() -> None:
    """Many short sequences run: what a pair costs is paid in each pass."""
    plan = plan_of(Tier(4, 4))
    cost, sequences, tokens = COSTS[4], 128, 4096
    pages = sequences * tokens / 64 * HEADS / SMS
    pairs = cost.pair * (sequences * HEADS / SMS - 1)
    for rows, passes in ((3, 1), (6, 2), (8, 2)):
        saved = (rows - passes) * pages - passes * (cost.page * pages + pairs)
        chosen = Bundling(plan).pays(even(plan, sequences, rows, tokens), SMS)
        assert chosen == (saved >= cost.fixed)


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("rows", range(1, 40))
def test_passes_are_those_of_the_bundles(rows: int, bits: int) -> None:
    cost = COSTS[bits]
    for group in range(1, 9):
        left, passes = rows, 0
        while left:
            some = min(left, MAX_BUNDLE)
            passes += -(-some * group // cost.columns)
            left -= some
        assert cost.passes(np.array([rows]), group) == passes


def test_a_rank_counts_its_own_heads() -> None:
    """Its plan is the whole plan, with the lanes of others removed."""
    whole = plan_of(Tier(4, 4), heads=2)
    lanes = tuple(
        dataclasses.replace(lane, rank_k=0, rank_v=0, fill_from=0)
        if lane.head
        else lane
        for lane in whole.lanes
    )
    groups = tuple(dataclasses.replace(group, lanes=(0,)) for group in whole.groups)
    rank = dataclasses.replace(whole, lanes=lanes, groups=groups)
    single = plan_of(Tier(4, 4), heads=1)
    for sequences in (16, 64, 256, 512):
        for tokens in (256, 1024, 4096, 16384):
            for rows in (2, 3, 4, 8):
                chosen = [
                    Bundling(plan).pays(even(plan, sequences, rows, tokens), SMS)
                    for plan in (rank, single)
                ]
                assert chosen[0] == chosen[1]


def test_a_step_without_short_rows_has_no_bundles() -> None:
    plan = plan_of()
    assert not Bundling(plan).pays(NO_SHORT_ROWS, SMS)
