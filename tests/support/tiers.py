"""Other number formats for the groups of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvlathe.plan.formats import Tier
from kvlathe.plan.plan import CompressionPlan


def with_tiers(plan: CompressionPlan, tiers: Sequence[Tier]) -> CompressionPlan:
    """The plan with ``tiers`` in place of its own, the hot one first (in the order of
    ``plan.index.tiers``). Those that it has beyond these stay."""
    new = dict(zip(plan.index.tiers, tiers, strict=False))
    groups = [
        dataclasses.replace(
            group,
            hot=new.get(group.hot, group.hot),
            cold=tuple(new.get(tier, tier) for tier in group.cold),
        )
        for group in plan.groups
    ]
    return dataclasses.replace(plan, groups=tuple(groups))
