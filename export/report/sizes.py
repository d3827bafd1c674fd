"""Bytes of a token by the length of its sequence, and by what they are spent on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlathe.plan.index import Bucket
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.memory import lengths_up_to

KINDS: tuple[str, ...] = ("k", "v", "scales", "scores", "waiting")
NAMES = {
    "k": "K",
    "v": "V",
    "scales": "scales of quantized numbers",
    "scores": "scores that rank tokens",
    "waiting": "the newest tokens, not sealed yet",
}
"""Kind of bytes -> its name in a legend."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One length: bytes of a token, by kind. ``tokens`` is None for a sequence without
    end, and for the uncompressed cache, whose tokens all cost the same."""

    label: str
    tokens: int | None
    bytes_of: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.bytes_of.values())


def bars(
    layout: CacheLayout, longest: int, uncompressed: Sequence[tuple[str, float]]
) -> list[Bar]:
    """The uncompressed cache, (label, bytes of a token) each, then this engine at every
    length up to ``longest``. A plan whose tokens cost the same at every length gets one
    more bar: full pages alone."""
    found: list[Bar] = []
    for label, size in uncompressed:
        halves = {"k": size / 2, "v": size / 2}
        found.append(Bar(label, None, dict.fromkeys(KINDS, 0.0) | halves))
    for tokens in lengths_up_to(longest):
        found.append(
            Bar(f"this engine, {tokens:,} tokens", tokens, _mean(layout, tokens))
        )
    if not layout.bounded:
        limit = _of(layout, layout.long(), sealed=True)
        found.append(Bar("this engine, full pages alone", None, limit))
    return found


def _mean(layout: CacheLayout, tokens: int) -> dict[str, float]:
    """Bytes of a token in a sequence of about ``tokens``: the mean over where in its last
    page the sequence stands, as in ``kvlathe.plan.memory.bytes_left``."""
    lengths = range(max(1, tokens - layout.plan.page_tokens), max(2, tokens))
    found = [_of(layout, length) for length in lengths]
    added = dict.fromkeys(KINDS, 0.0)
    for one in found:
        for kind, size in one.items():
            added[kind] += size / len(found)
    return added


def _of(layout: CacheLayout, tokens: int, sealed: bool = False) -> dict[str, float]:
    """Bytes of a token in a sequence of exactly ``tokens``. With ``sealed``, without
    pages that wait to be sealed."""
    found = dict.fromkeys(KINDS, 0.0)
    held = layout.all_written(tokens)
    for bucket in layout.plan.index.buckets:
        if sealed and not bucket.stays:
            continue
        pages = -(-held[bucket.number] // layout.plan.page_tokens)
        for kind, size in of_page(layout, bucket).items():
            found[kind if bucket.stays else "waiting"] += pages * size / tokens
    return found


def of_page(layout: CacheLayout, bucket: Bucket) -> dict[str, int]:
    """Bytes of a page of ``bucket`` by kind, padding with what it pads."""
    found = dict.fromkeys(KINDS, 0)
    sizes = layout.lane_bytes(bucket.number)
    for lane, size in sizes.items():
        at = layout.lane_offsets(bucket.number, lane)
        found["k"] += at.k_bytes
        found["v"] += at.v_bytes
        found["scales"] += size - at.k_bytes - at.v_bytes
    stride = layout.page_stride[bucket.number]
    found["scores"] = stride - sum(sizes.values())
    return found
