"""The frontier of a model's plans: bytes against perplexity and against retrieval, on a
page or as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlathe.export.report.figure import (
    HALF,
    INK,
    KEY,
    LAYERS,
    LIGHT,
    ON_PAGES,
    PAGE,
    VALUE,
    WIDTH,
    Colours,
    styled_in,
    svg,
)

MARKERS = "sD^vP*Xph<>d"
ROOM = 5.0
"""The perplexity panel ends at so many times what the bound allows; what is beyond lies
on its edge."""
TICKS = (1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625)


@dataclass(frozen=True, slots=True)
class Shown:
    """One plan. ``series``: plans that a line joins. ``left``: bytes, of the
    uncompressed cache in 16 bit."""

    series: str
    left: float
    perplexity_ratio: float
    retrieval: float


@dataclass(frozen=True, slots=True)
class Chart:
    """``perplexity`` and ``retrieval``: what a plan may cost. ``chosen``: the one to
    take. The series ``first`` is drawn strongest."""

    plans: Sequence[Shown]
    chosen: Shown
    perplexity: float
    retrieval: float
    first: str

    @property
    def series(self) -> list[str]:
        """Points in the order of the plans, the strongest first."""
        names = dict.fromkeys(plan.series for plan in self.plans)
        return sorted(names, key=lambda name: name != self.first)

    def of(self, series: str) -> list[Shown]:
        """The plans of one series."""
        return [plan for plan in self.plans if plan.series == series]

    @property
    def top(self) -> float:
        """Upper end of the perplexity panel."""
        return 1 + ROOM * max(self.perplexity - 1, 0.002)


def on_page(chart: Chart) -> tuple[Markup, Markup]:
    """Draw both panels as <svg> elements, each with its legend: a phone shows one below
    the other."""
    with styled_in(ON_PAGES):
        words = "of every plan against its bytes"
        return (
            svg(_panel(chart, _draw_perplexity), "perplexity", f"Perplexity {words}"),
            svg(_panel(chart, _draw_retrieval), "retrieval", f"Retrieval {words}"),
        )


def _panel(chart: Chart, draw: Callable[[Axes, Chart, Colours], None]) -> Figure:
    rows = -(-(len(chart.series) + 2) // 2)
    figure = Figure(figsize=(HALF, 3.4 + 0.19 * rows), layout="constrained")
    ax = figure.subplots()
    draw(ax, chart, ON_PAGES)
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8)
    return figure


def picture(chart: Chart, title: str, path: Path) -> None:
    """Write the chart as a PNG in light colours."""
    with styled_in(LIGHT):
        figure = _figure(chart, LIGHT)
        figure.suptitle(
            title,
            x=0.01,
            ha="left",
            color=LIGHT[INK],
        )
        figure.savefig(
            path,
            format="png",
            dpi=160,
            facecolor=LIGHT[PAGE],
        )


def _figure(chart: Chart, colours: Colours) -> Figure:
    figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_perplexity(left, chart, colours)
    _draw_retrieval(right, chart, colours)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=4,
        fontsize=8,
    )
    return figure


def _draw_perplexity(ax: Axes, chart: Chart, colours: Colours) -> None:
    top = chart.top
    count = len(chart.series)
    for i, name in enumerate(chart.series):
        mine = chart.of(name)
        heights = [min(plan.perplexity_ratio, top) for plan in mine]
        _draw_series(ax, i, count, mine, heights, colours)
    chosen = chart.chosen
    _ring(ax, chosen, chosen.perplexity_ratio, colours)
    _bound(ax, chart.perplexity, colours)
    least = min(1, *[plan.perplexity_ratio for plan in chart.plans])
    room = 0.05 * (top - 1)
    lower = least - room
    ax.set_ylim(lower, top + room)
    ax.set_title(f"perplexity ratio (above {chart.top:.3g}: on the edge)")
    _bytes_axis(ax, chart)


def _draw_retrieval(ax: Axes, chart: Chart, colours: Colours) -> None:
    count = len(chart.series)
    for i, name in enumerate(chart.series):
        mine = chart.of(name)
        _draw_series(ax, i, count, mine, [plan.retrieval for plan in mine], colours)
    chosen = chart.chosen
    _ring(ax, chosen, chosen.retrieval, colours)
    _bound(ax, chart.retrieval, colours)
    ax.set_ylim(-0.04, 1.04)
    ax.set_title("retrieval: share of right answers")
    _bytes_axis(ax, chart)


def _bound(ax: Axes, height: float, colours: Colours) -> None:
    """Draw the bound of a plan's loss at ``height``."""
    ax.axhline(
        height,
        color=colours[VALUE],
        lw=1.2,
        ls="--",
        label="bound",
    )


def _draw_series(
    ax: Axes,
    place: int,
    count: int,
    plans: Sequence[Shown],
    heights: Sequence[float],
    colours: Colours,
) -> None:
    """One series as a line with markers. The first is drawn strongest."""
    pairs = sorted(zip([plan.left for plan in plans], heights, strict=True))
    is_first = place == 0
    other = max(0, place - 1)
    marker = MARKERS[other % len(MARKERS)]
    colour = LAYERS(other / max(1, count - 2))
    ax.plot(
        [left for left, _ in pairs],
        [height for _, height in pairs],
        "-",
        marker="o" if is_first else marker,
        color=colours[KEY] if is_first else colour,
        ms=6,
        lw=1.8 if is_first else 0.9,
        label=plans[0].series,
        zorder=3 if is_first else 2,
        clip_on=False,
    )


def _ring(ax: Axes, plan: Shown, height: float, colours: Colours) -> None:
    """Draw a ring around the plan to take."""
    ax.plot(
        [plan.left],
        [height],
        "o",
        ms=14,
        mfc="none",
        mec=colours[INK],
        mew=1.4,
        ls="none",
        label="the plan to take",
        zorder=4,
    )


def _bytes_axis(ax: Axes, chart: Chart) -> None:
    """Halves of the uncompressed bytes."""
    first = 0.8 * min([plan.left for plan in chart.plans])
    ax.set_xscale("log", base=2)
    ax.set_xlim(first, 1.25)
    ticks = [tick for tick in TICKS if tick >= first]
    labels = [f"{tick:.3g}" for tick in ticks]
    ax.set_xticks(ticks, labels)
    ax.set_xticks([], minor=True)
    ax.set_xlabel("bytes left of the uncompressed 16-bit cache")
