"""Pages of the cache to scale: what lies where in a layer's part of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlathe.export.report.figure import spread
from kvlathe.plan.layout import CacheLayout, LaneOffsets

MOST_ROWS = 12
"""Different layers of a page that have room."""
Parts = tuple[tuple[str, int], ...]
"""(kind, bytes) in address order: k, scales, v, scales of one lane, then of the next."""


@dataclass(frozen=True, slots=True)
class PageRow:
    """Layers whose parts of a page are alike."""

    layers: str
    parts: Parts

    @property
    def size(self) -> int:
        return sum(size for _, size in self.parts)


@dataclass(frozen=True, slots=True)
class PagePicture:
    """The pages of some buckets that look alike: those of equal formats with equal
    layers. ``left_out``: rows that had no room."""

    buckets: tuple[int, ...]
    format: str
    stride: int
    rows: tuple[PageRow, ...]
    left_out: int

    @property
    def widest(self) -> int:
        return max(row.size for row in self.rows)


def page_pictures(layout: CacheLayout) -> list[PagePicture]:
    """One picture for all buckets whose pages look alike, in the order of the first."""
    alike: dict[tuple[object, ...], list[int]] = {}
    drawn: list[tuple[str, int, list[PageRow]]] = []
    for number, form, *_, stride, _ in layout.described():
        rows = _rows(layout, number)
        drawn.append((form, stride, rows))
        look = (form, tuple(row.parts for row in rows))
        alike.setdefault(look, []).append(number)
    return [_picture(numbers, *drawn[numbers[0]]) for numbers in alike.values()]


def _picture(
    numbers: Sequence[int], form: str, stride: int, rows: Sequence[PageRow]
) -> PagePicture:
    shown = tuple(rows[i] for i in spread(len(rows), MOST_ROWS))
    return PagePicture(tuple(numbers), form, stride, shown, len(rows) - len(shown))


def _rows(layout: CacheLayout, bucket: int) -> list[PageRow]:
    """A row for all layers of a bucket that are alike, the first layer's first."""
    of_layer: dict[int, list[tuple[str, int]]] = {}
    for lane, size in layout.lane_bytes(bucket).items():
        parts = of_layer.setdefault(layout.plan.lanes[lane].layer, [])
        parts += _parts(layout.lane_offsets(bucket, lane), size)
    alike: dict[Parts, list[int]] = {}
    for layer, parts in sorted(of_layer.items()):
        alike.setdefault(tuple(parts), []).append(layer)
    return [PageRow(runs(layers), parts) for parts, layers in alike.items()]


def _parts(at: LaneOffsets, size: int) -> list[tuple[str, int]]:
    """The contents of a lane of ``size`` bytes, in address order."""
    behind_k = size if at.v == at.k else at.v - at.k
    named = (
        ("k", at.k_bytes),
        ("scales", behind_k - at.k_bytes),
        ("v", at.v_bytes),
        ("scales", size - behind_k - at.v_bytes),
    )
    return [(kind, width) for kind, width in named if width]


def runs(numbers: Sequence[int]) -> str:
    """``0 to 3, 5`` for 0 1 2 3 5."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(
        f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
        for run in found
    )
