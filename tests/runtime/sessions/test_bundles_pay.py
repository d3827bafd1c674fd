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


@pytest.mark.parametrize("bits", COSTS)
def test_what_is_chosen_takes_hardly_longer_than_what_is_faster(bits: Bits) -> None:
    longer: list[float] = []
    for case in MEASURED["times"]:
        if case["bits"] != bits:
            continue
        tiers = [] if bits == 16 else [Tier(bits, bits)]
        plan = plan_of(*tiers, group=case["group"])
        cached = [0] * len(plan.buckets)
        cached[-1] = case["sequences"] * case["tokens"]
        short = ShortRows(case["sequences"], case["rows"], tuple(cached))
        chosen = pays(cost_of(plan), plan, short, SMS)
        if case["rows"] == 1:
            assert not chosen
        times = (case["alone_us"], case["bundle_us"])
        longer.append(times[chosen] / min(times))
    assert len(longer) >= 20
    assert max(longer[1:]) <= 1.1
    assert sum(longer) / len(longer) <= 1.01


@pytest.mark.parametrize("bits", COSTS)
def test_more_tokens_or_rows_of_one_pass_never_end_a_bundle(bits: Bits) -> None:
    """Each of them saves more reads."""
    plan = plan_of(*([] if bits == 16 else [Tier(bits, bits)]), group=1)
    hot = (0,) * (len(plan.buckets) - 1)
    sizes = [1 << power for power in range(22)]
    found = np.array(
        [
            [
                pays(cost_of(plan), plan, ShortRows(4, rows, (*hot, tokens)), SMS)
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


def test_a_step_without_short_rows_has_no_bundles() -> None:
    plan = plan_of()
    assert not pays(cost_of(plan), plan, NO_SHORT_ROWS, SMS)
