"""Rows of a sequence are attended together where that was measured to be faster."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.plan.formats import Bits, Tier
from kvlathe.plan.plan import Bucket, CompressionPlan
from kvlathe.runtime.native.cuda import MAX_BUNDLE
from kvlathe.runtime.sessions.gpu.step_buffer import NO_SHORT_ROWS, ShortRows
from kvlathe.runtime.sessions.torch_cuda.bundles import COSTS, OTHER_COST, cost_of, pays
from tests.support.checkpoints import whole_plan

MEASURED = json.loads(Path(__file__).with_name("bundle_times.json").read_text("utf-8"))
MODEL = Path(__file__).resolve().parents[3] / "models" / "lathe-5m"
SMS = 132
"""Of the GPU that the times are of."""
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
    every = tuple(range(heads))
    buckets = [Bucket(0, every)]
    buckets += [
        Bucket(1 + i, every[i :: len(tiers)], source=0) for i in range(len(tiers))
    ]
    return dataclasses.replace(
        plan,
        model=model,
        lanes=lanes,
        tiers=(Tier(16, 16), *tiers),
        buckets=tuple(buckets),
    )


def short_rows(plan: CompressionPlan, rows: list[int], tokens: list[int]) -> ShortRows:
    """Sequences that bring ``rows`` and have ``tokens`` in the last bucket."""
    cached = np.zeros((len(rows), len(plan.buckets)), np.int32)
    cached[:, -1] = tokens
    return ShortRows(np.array(rows, np.int32), cached)


def even(plan: CompressionPlan, sequences: int, rows: int, tokens: int) -> ShortRows:
    return short_rows(plan, [rows] * sequences, [tokens] * sequences)


@pytest.mark.parametrize("bits", COSTS)
def test_what_is_chosen_takes_hardly_longer_than_what_is_faster(bits: Bits) -> None:
    longer: list[float] = []
    for case in MEASURED["times"]:
        if case["bits"] != bits:
            continue
        tiers = [] if bits == 16 else [Tier(bits, bits)]
        plan = plan_of(*tiers, group=case["group"])
        short = even(plan, case["sequences"], case["rows"], case["tokens"])
        chosen = pays(cost_of(plan), plan, short, SMS)
        if case["rows"] == 1:
            assert not chosen
        times = (case["alone_us"], case["bundle_us"])
        longer.append(times[chosen] / min(times))
    assert len(longer) >= 20
    assert max(longer) <= 1.12
    assert sum(longer) / len(longer) <= 1.01


@pytest.mark.parametrize("bits", COSTS)
def test_more_tokens_or_rows_of_one_pass_never_end_a_bundle(bits: Bits) -> None:
    """Each of them saves more reads."""
    plan = plan_of(*([] if bits == 16 else [Tier(bits, bits)]), group=1)
    sizes = [1 << power for power in range(22)]
    found = np.array(
        [
            [
                pays(cost_of(plan), plan, even(plan, 4, rows, tokens), SMS)
                for tokens in sizes
            ]
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
    assert cost_of(plan_of(Tier(4, 4, levels_k="normal"))) is OTHER_COST
    assert cost_of(plan_of(Tier(4, 4, group_v=16))) is OTHER_COST
    assert cost_of(plan_of(Tier(16, 4))) is OTHER_COST
    bounded = plan_of(Tier(4, 4))
    bounded = dataclasses.replace(
        bounded, model=dataclasses.replace(bounded.model, softcap=30.0)
    )
    assert cost_of(bounded) is OTHER_COST


def test_rows_are_weighed_with_the_tokens_of_their_own_sequence() -> None:
    """A long sequence that guesses nothing is no reason for bundles of short ones."""
    plan = plan_of(Tier(4, 4))
    cost = cost_of(plan)
    others = [1024] * 15
    long = short_rows(plan, [1] + [5] * 15, [1 << 18, *others])
    assert not pays(cost, plan, long, SMS)
    guessing = short_rows(plan, [5] * 16, [1 << 18, *others])
    assert pays(cost, plan, guessing, SMS)


@pytest.mark.parametrize("rows", range(1, 40))
def test_passes_are_those_of_the_bundles(rows: int) -> None:
    cost = COSTS[4]
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
    buckets = tuple(dataclasses.replace(bucket, lanes=(0,)) for bucket in whole.buckets)
    rank = dataclasses.replace(whole, lanes=lanes, buckets=buckets)
    single = plan_of(Tier(4, 4), heads=1)
    for sequences in (16, 64, 256, 512):
        for tokens in (256, 1024, 4096, 16384):
            for rows in (2, 3, 4, 8):
                chosen = [
                    pays(cost_of(plan), plan, even(plan, sequences, rows, tokens), SMS)
                    for plan in (rank, single)
                ]
                assert chosen[0] == chosen[1]


def test_a_step_without_short_rows_has_no_bundles() -> None:
    plan = plan_of()
    assert not pays(cost_of(plan), plan, NO_SHORT_ROWS, SMS)
