"""A layer's block holds what our pages hold of the layer, and nothing twice."""

from __future__ import annotations

import pytest

from kvlathe.plan.layer_block import LayerBlock, bare
from kvlathe.plan.layer_table import layer_table
from kvlathe.plan.layout import CacheLayout
from tests.support.block_cases import plan_of


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("page", [16, 64, 128])
def test_blocks_of_all_layers_are_the_pages_of_a_plan(page: int, sealed: bool) -> None:
    plan = plan_of(page, sealed)
    layout = CacheLayout(plan)
    blocks = [LayerBlock(layout, layer) for layer in range(plan.model.layers)]
    strides = layout.page_stride
    held = [bucket.stays for bucket in plan.index.buckets]
    assert plan.index.seals == sealed
    of_blocks = sum(
        size for size, blocked in zip(strides, held, strict=True) if blocked
    )
    of_hot = sum(
        size for size, blocked in zip(strides, held, strict=True) if not blocked
    )
    assert sum(block.hot_bytes for block in blocks) == of_hot
    assert sum(block.token_bytes for block in blocks) * page == of_blocks


@pytest.mark.parametrize("page", [16, 48, 64])
def test_lanes_of_a_block_lie_apart_and_inside(page: int) -> None:
    plan = plan_of(page)
    layout = CacheLayout(plan)
    for layer in range(plan.model.layers):
        block = LayerBlock(layout, layer)
        for blocked, end in (
            (True, page * block.token_bytes),
            (False, block.hot_bytes),
        ):
            taken: list[tuple[int, int]] = []
            for bucket in plan.index.buckets:
                if bucket.stays != blocked:
                    continue
                tier = bucket.tier
                for row in block.rows(bucket.number).tolist():
                    _, _, rank_k, rank_v, k, k_meta, v, v_meta, *_ = row
                    taken.append((k, tier.k.data_bytes(rank_k, page)))
                    taken.append((k_meta, tier.k.meta_bytes(rank_k, page)))
                    taken.append((v, tier.v.data_bytes(rank_v, page)))
                    taken.append((v_meta, tier.v.meta_bytes(rank_v, page)))
            at = 0
            for start, size in sorted(taken):
                assert start >= at
                at = start + size
            assert at <= end
        assert page * block.token_bytes % 128 == 0


def test_only_places_differ_from_our_own_table() -> None:
    plan = plan_of(64)
    layout = CacheLayout(plan)
    block = LayerBlock(layout, 1)
    ours, theirs = (
        layer_table(layout, 1),
        block.table(64 * block.token_bytes, block.hot_bytes),
    )
    assert ours.shape == theirs.shape and (ours != theirs).any()
    assert (LayerBlock(layout, 1).table(1 << 20, 1 << 20) != theirs).any()


def test_a_bare_plan_takes_whole_heads_after_rope() -> None:
    plan = bare(plan_of(64), range(8))
    assert {lane.rope for lane in plan.lanes} == {"none"}
    assert {lane.input_dim for lane in plan.lanes} == {32}
    assert all(lane.projected for lane in plan.lanes)
