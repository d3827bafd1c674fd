"""The frontier as one self-contained page and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from kvlathe.base.console import cell, human_bytes
from kvlathe.base.pages import STYLE
from kvlathe.export.report.frontier import Chart, Shown, on_page, picture
from kvlathe.frontier.points import RETRIEVAL_MARGIN, Bound, Point

TEMPLATE = Path(__file__).with_name("frontier.html.j2")


def write(
    result: Mapping[str, object], points: Sequence[Point], bound: Bound, chosen: Point
) -> None:
    """The page and the picture of a ``result``, where it says that they are."""
    measured = [point for point in points if point.measured]
    chart = chart_of(measured, bound, chosen)
    template = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=False
    ).from_string(TEMPLATE.read_text("utf-8"))
    text = template.render(
        result=result,
        measured=sorted(measured, key=lambda point: -(point.left or 0.0)),
        refused=[point for point in points if not point.measured],
        chosen=chosen,
        bound=bound,
        margin=RETRIEVAL_MARGIN,
        charts=on_page(chart),
        style=Markup(STYLE),
        cell=cell,
        human=human_bytes,
    )
    Path(str(result["page"])).write_text(text, "utf-8")
    tokens = f"{chosen.tokens:,} tokens" if chosen.tokens else ""
    title = f"{result['model']}, {tokens}: what each plan keeps, and what it costs"
    picture(chart, title, Path(str(result["plot"])))


def chart_of(points: Sequence[Point], bound: Bound, chosen: Point) -> Chart:
    """The chart of the points that were measured."""
    shown = {point.name: _shown(point) for point in points}
    counts: dict[str, int] = {}
    for plan in shown.values():
        counts[plan.series] = counts.get(plan.series, 0) + 1
    longest = max(counts, key=lambda name: counts[name])
    return Chart(
        list(shown.values()),
        shown[chosen.name],
        bound.perplexity,
        (bound.uncompressed.retrieval or 0.0) - RETRIEVAL_MARGIN,
        longest,
    )


def _shown(point: Point) -> Shown:
    """Plans of one compression at several ratios are one series."""
    assert point.left is not None
    ratio, retrieval = point.perplexity_ratio, point.retrieval
    return Shown(point.compression, point.left, ratio or 0.0, retrieval or 0.0)
