"""The accuracy chart of report.html: scores against bytes, of all plans measured by a
search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes

from kvlathe.base.console import cell
from kvlathe.export.report.figure import (
    HALF,
    KEY,
    LAYERS,
    MUTED,
    VALUE,
    axes,
    styled,
    svg,
)

LOST = 0.25
"""Share of the uncompressed score at which the chart ends: no plan below it is of use,
and all are far apart."""
MARKERS = "sD^vP*X"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a token: ``whole`` of the cache that point["removed"] is a fraction of,
    ``chosen`` of this engine, ``common`` of the uncompressed cache in 16 bit where that
    is another."""

    whole: float
    chosen: float | None = None
    common: float | None = None


@styled
def accuracy_curve(curve: Mapping[str, Any], sizes: Sizes) -> Markup:
    """Score against bytes: one line for each request that was measured (point["of"]),
    the score that had to be kept."""
    names = group_names(curve)
    figure, ax = axes(3.4 + 0.19 * (len(names) + 4) / 2, HALF)
    for i, name in enumerate(names):
        _draw_group(ax, curve, sizes.whole, name, i, len(names))
    ax.axhline(curve["baseline"], color=MUTED, lw=0.9, label="uncompressed")
    if curve.get("target") is not None:
        ax.axhline(curve["target"], color=VALUE, lw=1.2, ls="--", label="required")
    if sizes.chosen is not None:
        ax.axvline(sizes.chosen, color=MUTED, lw=0.9, ls=":", label="this engine")
    _score_axis(ax, curve)
    _bytes_axis(ax, sizes)
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8)
    return svg(figure, "curve", f"{curve['metric']} against bytes of a token")


def group_names(curve: Mapping[str, Any]) -> list[str]:
    """The requests that were measured, the chosen one first."""
    names = {_group(point) for point in curve["points"]}
    others = names - {curve.get("of")}
    return sorted(names - others) + sorted(others)


def _group(point: Mapping[str, Any]) -> str:
    return str(point.get("of", "measured"))


def _draw_group(
    ax: Axes, curve: Mapping[str, Any], whole: float, name: str, place: int, count: int
) -> None:
    """One request's line. The first is drawn strongest."""
    points = []
    for point in curve["points"]:
        if _group(point) == name:
            points.append(
                (whole * (1 - float(point["removed"])), float(point["score"]))
            )
    bytes_left, scores = np.array(sorted(points)).T
    first = place == 0
    other = place - 1
    ax.plot(
        bytes_left,
        scores,
        "-",
        marker="o" if first else MARKERS[other % len(MARKERS)],
        color=KEY if first else LAYERS(other / max(1, count - 2)),
        ms=5,
        lw=1.8 if first else 0.9,
        label=name,
        zorder=3 if first else 2,
    )


def lost_below(curve: Mapping[str, Any]) -> float:
    """The score below which the chart shows no point."""
    most = (1 - LOST) * curve["baseline"]
    target = curve.get("target")
    if target is None:
        return most
    return min(most, target)


def _score_axis(ax: Axes, curve: Mapping[str, Any]) -> None:
    scores = [point["score"] for point in curve["points"]]
    scores.append(curve["baseline"])
    top = max(scores)
    bottom = max(min(scores), lost_below(curve))
    room = top - bottom
    lower = bottom - 0.04 * room
    ax.set_ylim(lower, (top + 0.06 * room) or None)
    ax.set_ylabel(str(curve["metric"]))


def _bytes_axis(ax: Axes, sizes: Sizes) -> None:
    """Halves and doubles of the uncompressed bytes; each step to the left is as good as
    the last."""
    most = max(sizes.whole, sizes.common or 0.0)
    ax.set_xscale("log", base=2)
    ax.set_xlim(right=1.06 * most)
    ticks = _halves(most, ax.get_xlim())
    ax.set_xticks(ticks, [cell(tick) for tick in ticks])
    ax.set_xticks([], minor=True)
    common = "" if sizes.common is None else f", {cell(sizes.common)} in 16 bit"
    whole = cell(sizes.whole)
    ax.set_xlabel(f"KV bytes of a token (uncompressed: {whole}{common})")


def _halves(most: float, limits: Sequence[float]) -> list[float]:
    low, high = limits
    halves = [most / 2**n for n in range(12)]
    return [half for half in halves if low <= half <= high]
