"""Checks of the numbers that an engine is loaded with."""

from __future__ import annotations

import dataclasses

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan, ShardPlan
from kvlathe.runtime.text.sampling_params import is_number


def check_counts(**counts: int | None) -> None:
    """Raises KvlatheError for a number that is not whole, or below 1."""
    for name, value in counts.items():
        if value is not None and (not is_number(value, whole=True) or value < 1):
            raise KvlatheError(
                f"{name} is {value!r:.60}",
                "it must be a whole number, 1 or more",
                "change it",
            )


def memory_share(value: float) -> float:
    if is_number(value) and 0 < value <= 1:
        return float(value)
    raise KvlatheError(
        f"gpu_memory_utilization is {value!r:.60}",
        "it is the share of a GPU's memory that may be used",
        "give a number above 0, 1 at most",
    )


def lowered(limits: Limits, max_batch_size: int | None) -> Limits:
    """``limits`` with a smaller batch. Raises KvlatheError for a larger one."""
    if max_batch_size is None:
        return limits
    whole = is_number(max_batch_size, whole=True)
    if not whole or not 1 <= max_batch_size <= limits.max_batch_size:
        raise KvlatheError(
            f"the engine cannot run {max_batch_size} sequences at once",
            f"it was built for 1 to {limits.max_batch_size}",
            "give a number in between, or build the engine with a larger one",
        )
    return dataclasses.replace(limits, max_batch_size=max_batch_size)


def refuse_shards(plan: CompressionPlan) -> None:
    """Raises KvlatheError where ``plan`` is one shard's, for what takes whole pages out
    of an engine."""
    if isinstance(plan, ShardPlan):
        raise KvlatheError(
            f"pages of {plan.num_shards} shards stay in their engine",
            "each shard has its part of every page",
            "run the engine on one GPU",
        )
