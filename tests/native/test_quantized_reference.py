"""The CPU reference on quantized pages: CacheLayout's offsets, packing and groups,
against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest

from kvlathe.plan.formats import Axis, Bits, Tier, groups_along_rank
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.lives import SEAL
from kvlathe.plan.plan import CompressionPlan
from tests.native.library import ABI_VERSION, F32, AttendDecodeArgs, Library, Part

PAGE, RANK_K, RANK_V, GROUP = 64, 80, 48, 3
AXES = {"rank": 0, "token": 1}


def layout_of(tier: Tier) -> CacheLayout:
    """One lane: a 32-bit hot bucket and the quantized bucket under test (bucket
    1)."""
    lane = Lane(0, 0, 128, RANK_K, RANK_V, projected=True)
    shape = ModelShape(1, GROUP, 1, 128, 128 * GROUP, 100, 4096)
    return CacheLayout(
        CompressionPlan(
            shape,
            (lane,),
            (Group((0,), Tier(32, 32), (tier,), SEAL),),
            PAGE,
        )
    )


def values_of(
    page: np.ndarray, at: int, meta_at: int, rank: int, bits: int, axis: str, group: int
) -> np.ndarray:
    """[PAGE, rank] float64: the numbers that a page's bytes stand for."""
    shape = (PAGE, rank) if axis == "rank" else (rank, PAGE)
    packed = page[at : at + PAGE * rank * bits // 8]
    codes = np.stack(
        [packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], -1
    ).reshape(shape)
    sizes = (
        groups_along_rank(rank, group) if axis == "rank" else (group,) * (PAGE // group)
    )
    meta = (
        page[meta_at : meta_at + shape[0] * len(sizes) * 4]
        .view(np.float16)
        .reshape(shape[0], len(sizes), 2)
    )
    wide = np.repeat(meta.astype(np.float64), sizes, axis=1)
    values = wide[..., 0] * codes + wide[..., 1]
    return values if axis == "rank" else values.T


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize(
    "axes", [("rank", "token"), ("token", "rank"), ("rank", "rank")]
)
def test_the_reference_reads_quantized_pages_as_numpy_does(
    library: Library, bits: Bits, axes: tuple[Axis, Axis]
) -> None:
    tier = Tier(bits, bits, axes[0], axes[1], 64 if axes[0] == "rank" else 32, 32)
    layout, random = layout_of(tier), np.random.default_rng(bits)
    row, stride, lengths, pages = (
        layout.lane_table(1),
        layout.page_stride[1],
        [100, 0, 64],
        3,
    )
    pool = random.integers(0, 256, pages * stride + 64, np.uint8)
    pool = pool[-pool.ctypes.data % 64 :][: pages * stride].reshape(pages, stride)
    _, _, _, _, k, k_meta, v, v_meta, groups_k, groups_v = (int(x) for x in row[0])
    for page in pool:
        for at, count in ((k_meta, groups_k), (v_meta, groups_v)):
            page[at : at + 4 * count] = (
                random.uniform(-0.05, 0.05, 2 * count).astype(np.float16).view(np.uint8)
            )
    table, size = (
        np.array([[2, 0], [9, 9], [1, 9]], np.int32),
        np.array(lengths, np.int32),
    )
    q = random.standard_normal((3, GROUP * RANK_K)).astype(np.float32)
    o = np.full((3, GROUP * RANK_V), np.nan, np.float32)
    part = Part(
        bits,
        bits,
        AXES[tier.axis_k],
        AXES[tier.axis_v],
        tier.group_k,
        tier.group_v,
        1,
        2,
    )
    part.lanes, part.page_stride, part.page_table = (
        row.ctypes.data,
        stride,
        table.ctypes.data,
    )
    part.lengths, part.lengths_stride = size.ctypes.data, 1
    args = AttendDecodeArgs(
        ABI_VERSION, F32, 3, GROUP, PAGE, 1, 0.1, 0, (Part * 1)(part)
    )
    args.pool, args.pool_bytes, args.q, args.o = (
        pool.ctypes.data,
        pool.size,
        q.ctypes.data,
        o.ctypes.data,
    )
    args.q_stride, args.o_stride = q.shape[1], o.shape[1]
    library.attend_decode(args)
    for b, n in enumerate(lengths):
        if n == 0:
            assert not o[b].any()
            continue
        ids = table[b, : -(-n // PAGE)]
        keys = np.concatenate(
            [
                values_of(pool[i], k, k_meta, RANK_K, bits, axes[0], tier.group_k)
                for i in ids
            ]
        )[:n]
        values = np.concatenate(
            [
                values_of(pool[i], v, v_meta, RANK_V, bits, axes[1], tier.group_v)
                for i in ids
            ]
        )[:n]
        scores = q[b].reshape(GROUP, RANK_K) @ keys.T * 0.1
        weights = np.exp(scores - scores.max(1, keepdims=True))
        expected = (weights / weights.sum(1, keepdims=True)) @ values
        np.testing.assert_allclose(
            o[b].reshape(GROUP, RANK_V), expected, atol=2e-6, rtol=1e-5
        )
