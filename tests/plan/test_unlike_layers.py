"""Laws of plans whose layers have heads of unlike shapes, or read one another's cache."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.export.methods.lowrank import full_lanes
from kvlathe.plan.deal import deal
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import HeadShape, Lane, ModelShape
from kvlathe.plan.kernel_forms import UNPROVEN, node_refusal, plan_refusal
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import KEEP, SEAL
from kvlathe.plan.plan import CompressionPlan

NARROW, WIDE = HeadShape(4, 32), HeadShape(2, 64)
SHAPE = ModelShape(
    *(4, 8, 4, 64, 96, 97, 512),
    own_heads=(NARROW, WIDE, NARROW, NARROW),
    sources=(0, 1, 2, 2),
)


def plan_of(shape: ModelShape) -> CompressionPlan:
    lanes = full_lanes(SHAPE, True)
    groups = (Group(tuple(range(len(lanes))), Tier(16, 16)),)
    return CompressionPlan(shape, lanes, groups)


def test_each_layer_has_the_lanes_that_it_caches() -> None:
    plan = plan_of(SHAPE)
    widths = [[lane.rank_k for lane in plan.index.active(i)] for i in range(4)]
    assert widths == [[32] * 4, [64] * 2, [32] * 4, []]
    numbers = [plan.index.number(lane.layer, lane.head) for lane in plan.lanes]
    assert numbers == list(range(10))
    assert [SHAPE.group(layer) for layer in range(4)] == [2, 4, 2, 2]
    assert SHAPE.readers(2) == 2 and SHAPE.readers(0) == 1


def test_a_cache_that_several_layers_read_is_counted_once() -> None:
    plan = plan_of(SHAPE)
    assert SHAPE.numbers == 2 * (4 * 32 + 2 * 64 + 4 * 32)
    assert plan.index.kept_dims == 1
    assert CacheLayout(plan).bytes_per_token() == 2 * SHAPE.numbers
    assert CompressionPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"own_heads": (NARROW, WIDE)}, "2 layers have heads"),
        ({"sources": (0, 1, 3, 3)}, "layer 2 reads the cache of layer 3"),
        ({"sources": (0, 1, 2, -1)}, "layer 3 reads the cache of layer -1"),
        ({"sources": (0, 0, 1, 1)}, "layer 2 reads the cache of layer 1"),
        ({"own_heads": (NARROW, HeadShape(2, 128), NARROW, NARROW)}, "head_dim=128"),
        ({"own_heads": (NARROW, HeadShape(3, 64), NARROW, NARROW)}, "share 3 KV heads"),
        ({"own_heads": (), "sources": ()}, "one for each layer and KV head"),
    ],
)
def test_shapes_that_no_model_has_are_refused(
    changes: dict[str, tuple[object, ...]], said: str
) -> None:
    with pytest.raises(KvlatheError, match=said):
        plan_of(dataclasses.replace(SHAPE, **changes))


def once(*layers: int) -> tuple[Lane, ...]:
    """Whole lanes, of which those of some layers hold their V in their K."""
    lanes = full_lanes(SHAPE, True)
    width = WIDE.head_dim + 16
    made = {"input_dim": width, "rank_k": width, "rope": "none"}
    return tuple(
        dataclasses.replace(lane, **made, values_in_keys=True)
        if lane.layer in layers
        else lane
        for lane in lanes
    )


@pytest.mark.parametrize(
    ("turned", "lanes", "tier", "said"),
    [
        (0, once(1), Tier(16, 16), "2 of 2 lanes have their V in their K"),
        (16, once(1)[:5] + full_lanes(SHAPE, True)[5:], Tier(16, 16), "1 of 2 lanes"),
        (16, once(1), Tier(8, 8, "rank", "token", 16, 16), "both then have one form"),
        (16, once(1), Tier(8, 8, "rank", "rank", 16, 16), ""),
    ],
)
def test_values_are_in_keys_of_layers_that_make_one_of_the_other(
    turned: int, lanes: tuple[Lane, ...], tier: Tier, said: str
) -> None:
    wide = dataclasses.replace(WIDE, turned=turned)
    shape = dataclasses.replace(SHAPE, own_heads=(NARROW, wide, NARROW, NARROW))
    cold = (tier,) if tier.is_coded else ()
    life = SEAL if cold else KEEP
    groups = (Group(tuple(range(len(lanes))), Tier(16, 16), cold, life),)
    refused = pytest.raises(KvlatheError, match=said) if said else nullcontext()
    with refused:
        plan = CompressionPlan(shape, lanes, groups)
        assert plan.index.some_in_keys and not plan.index.values_in_keys
        assert plan.index.kept_dims == 1 - 2 * (64 - 16) / SHAPE.numbers


def test_of_gpus_the_cuda_backend_alone_runs_unlike_layers_and_on_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_of(SHAPE)
    monkeypatch.delenv(UNPROVEN, raising=False)
    assert plan_refusal(plan) is None
    refusal = node_refusal(plan)
    assert refusal is not None and "unlike shapes" in refusal[0]
    with pytest.raises(KvlatheError, match="unlike shapes"):
        deal(plan, 2)
