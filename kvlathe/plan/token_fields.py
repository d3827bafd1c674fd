"""Token fields: the bytes of a page that belong to one token alone, and that go with a
token when it moves to another page of its bucket."""

from __future__ import annotations

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.codec import matrices
from kvlathe.plan.layout import CacheLayout

Field = tuple[int, int]
"""Offset from a page's start, and bytes a token."""


def score_fields(layout: CacheLayout, bucket: int, lane: int) -> list[Field]:
    """Attention (float32) and then, where the plan keeps it, position (int32) of a
    lane's tokens; none where the bucket's tokens are not ranked."""
    index = layout.plan.index
    if not index.buckets[bucket].scored:
        return []
    lanes = index.buckets[bucket].lanes
    size = 4 * layout.plan.page_tokens
    attention = layout.scores_at(bucket) + size * lanes.index(lane)
    fields = [(attention, 4)]
    if index.keeps_positions:
        fields.append((attention + size * len(lanes), 4))
    return fields


def token_fields(layout: CacheLayout, bucket: int) -> dict[int, list[Field]]:
    """The fields of each lane of a bucket: its K and V, then its scores.

    Raises KvlatheError if the bucket's quantization groups run along tokens.
    """
    found: dict[int, list[Field]] = {}
    for lane, pair in matrices(layout, bucket).items():
        fields: list[Field] = []
        for matrix in pair:
            if not matrix.token_major:
                raise KvlatheError(
                    f"bucket {bucket} cannot drop tokens",
                    "its quantization groups run along the tokens",
                    "group along the rank in plans that drop tokens",
                )
            fields += matrix.fields
        found[lane] = fields + score_fields(layout, bucket, lane)
    return found
