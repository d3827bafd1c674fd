"""Native sealing writes the bytes that runtime/host_pages.py writes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlathe.export.layout import CacheLayout
from kvlathe.export.plan import Bucket, CompressionPlan, Lane, Tier
from kvlathe.runtime.host_pages import HostPages
from kvlathe.runtime.native import Native, Sealer
from tests.attend_cases import plan_of

GROUPS = st.sampled_from([16, 32, 48, 64])
AXES = st.sampled_from(["rank", "token"])
TIERS = st.builds(
    Tier, *(st.sampled_from([2, 4, 8, 16]),) * 2, axis_k=AXES, axis_v=AXES, group_k=GROUPS, group_v=GROUPS
)


def sealing_plan(tier: Tier, hot: int, page: int) -> CompressionPlan:
    lanes = [Lane(0, 0, 64, 48, 80, projected=True), Lane(0, 1, 64, 112, 16, projected=True)]
    return plan_of(lanes, [Tier(hot, hot), tier], [Bucket(0, (0, 1)), Bucket(1, (0, 1), source=0)], 64, 2, page)


@settings(max_examples=60, deadline=None)
@given(tier=TIERS, hot=st.sampled_from([16, 32]), page=st.sampled_from([16, 64, 80]), seed=st.integers(0, 99))
def test_native_seals_the_same_bytes(native: Native, tier: Tier, hot: int, page: int, seed: int) -> None:
    plan, random = sealing_plan(tier, hot, page), np.random.default_rng(seed)
    pages = HostPages(CacheLayout(plan), 1 << 20)
    for pair in pages.parts[0].values():
        for part in pair:
            values = random.normal(1, 2, (page, part.rank)).astype(np.float32)
            values[:, ::5] = 3  # constant groups among them, along the tokens
            part.write(pages.rows[0][1], values)
    target = len(pages.rows[1]) - 1
    pages.seal(0, 1, (target,), 0)
    expected = pages.rows[1][target].copy()
    pages.rows[1][target] = 0
    Sealer(native, plan).seal(0, pages.rows[0][1], 1, pages.rows[1][target])
    np.testing.assert_array_equal(pages.rows[1][target], expected)
