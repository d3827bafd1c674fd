"""ShardPlan: what one shard of tensor parallelism keeps of a plan."""

from __future__ import annotations

from dataclasses import dataclass

from kvlathe.plan.plan import CompressionPlan


@dataclass(frozen=True)
class ShardPlan(CompressionPlan):
    """The whole plan, in which the lanes of other shards are removed.

    So lanes, groups and buckets have the numbers that they have everywhere.
    ``model.query_heads`` counts as many query heads for each KV head as this shard has
    for any: others are filled up with heads of zeros. ``strides``: bytes of a page of
    each bucket, at least. They are those of the shard with most, so that one page table
    is right for all shards.
    """

    shard: int = 0
    num_shards: int = 1
    strides: tuple[int, ...] = ()

    @property
    def is_part(self) -> bool:
        return True
