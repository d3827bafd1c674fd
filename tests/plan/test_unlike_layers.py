"""Laws of plans whose layers have heads of unlike shapes, or read one another's cache."""

from __future__ import annotations

import dataclasses

import pytest

from kvlathe.base.errors import KvlatheError
from kvlathe.export.methods.lowrank import full_lanes
from kvlathe.plan.deal import deal
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import HeadShape, ModelShape
from kvlathe.plan.kernel_forms import node_refusal, plan_refusal
from kvlathe.plan.layout import CacheLayout
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


def test_no_gpu_runs_unlike_layers() -> None:
    plan = plan_of(SHAPE)
    for refusal in (plan_refusal(plan), node_refusal(plan)):
        assert refusal is not None and "unlike shapes" in refusal[0]
    with pytest.raises(KvlatheError, match="unlike shapes"):
        deal(plan, 2)
