"""Normalized latency, first tokens and time between tokens against the request rate, as
a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvlathe.base.errors import KvlatheError
from kvlathe.base.extras import pip_install
from kvlathe.bench.measure import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = (
    ("latency", "normalized latency, s/token"),
    ("first_token_p99", "first token, p99, s"),
    ("between_tokens_p99", "between tokens, p99, s"),
)


def draw(
    curves: Mapping[str, Sequence[Point]],
    largest: Mapping[str, float],
    limit: float,
    title: str,
    to: Path,
) -> None:
    """One panel a measure, one line a server; the latency limit and each server's
    largest rate are marked.

    Runs that were left because they were lost are shown as crosses at the latency they
    had surely passed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise KvlatheError(
            "no plot was drawn",
            "matplotlib is not installed",
            f"run {pip_install('bench')}",
        ) from error
    figure = Figure(figsize=(12, 4), layout="constrained")
    axes = figure.subplots(1, len(PANELS))
    for (measure, label), axis in zip(PANELS, axes, strict=True):
        for i, (name, points) in enumerate(curves.items()):
            rate = largest[name]
            label = f"{name}: {rate:.3g}/s"
            _draw_line(axis, measure, points, Line(f"C{i}", label, rate))
        axis.set(xlabel="requests/s", ylabel=label, ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].axhline(limit, color="black", linewidth=0.8, linestyle="--", label="limit")
    axes[0].set_ylim(0, 2 * limit)
    axes[0].legend()
    figure.suptitle(title)
    figure.savefig(to, dpi=120)


@dataclass(frozen=True, slots=True)
class Line:
    """Drawing of a server: its colour, its name in the legend, and its largest rate in
    requests a second."""

    colour: str
    label: str
    largest: float


def _draw_line(axis: Axes, measure: str, points: Sequence[Point], line: Line) -> None:
    finished, lost = [], []
    for point in points:
        value = getattr(point, measure)
        if value is None:
            continue
        known = measure != "latency" or _finished(points, point.rate)
        (finished if known else lost).append((point.rate, value))
    axis.plot(*_columns(finished), "o-", color=line.colour, label=line.label)
    if measure == "latency":
        axis.plot(*_columns(lost), "x", color=line.colour)
        axis.axvline(line.largest, color=line.colour, linewidth=0.8, linestyle=":")


def _finished(points: Sequence[Point], rate: float) -> bool:
    return any(
        point.rate == rate and point.tokens_per_second is not None for point in points
    )


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [first for first, _ in pairs], [second for _, second in pairs]
