"""Style of charts: matplotlib in, inline SVG out, in colours that follow the page's
light or dark setting.

Matplotlib knows no CSS. So charts are drawn in marker colours, which the page's
variables then replace.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

INK = "#010101"
MUTED = "#020202"
GRID = "#030303"
PAGE = "#040404"
KEY = "#050505"
VALUE = "#060606"
VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    PAGE: "--page",
    KEY: "--key",
    VALUE: "--value",
}
LIGHT = {
    INK: "#1b2423",
    MUTED: "#5d6b69",
    GRID: "#e3e8e6",
    PAGE: "#ffffff",
    KEY: "#1f7a74",
    VALUE: "#d0873a",
}
"""The page's light colours, for pictures that no page shows."""
AMOUNTS = LinearSegmentedColormap.from_list(
    "amounts", ["#e8f0ee", "#8fbfb4", "#2f7f79", "#12413f"]
)
LAYERS = LinearSegmentedColormap.from_list(
    "layers", ["#2a9d8f", "#7a8f3c", "#d18a2c", "#c4543b"]
)
WIDTH, HALF = 9.6, 4.6
"""Inches of a chart as wide as the page, and of one beside another. The page scales
charts to its own width."""

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.labelcolor": INK,
}

styled = mpl.rc_context(STYLE)
"""Decorates every chart."""


def axes(height: float, width: float = WIDTH) -> tuple[Figure, Axes]:
    """An empty chart of so many inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


Colours = Mapping[str, str]
"""Marker colour -> the colour that is drawn: LIGHT in pictures, itself on pages."""
ON_PAGES: Colours = dict(zip(VARIABLES, VARIABLES, strict=True))


def styled_in(colours: Colours) -> AbstractContextManager[None]:
    """Context in which charts are drawn with STYLE in these colours."""
    style = {name: colours.get(str(value), value) for name, value in STYLE.items()}
    return mpl.rc_context(style)


def svg(figure: Figure, name: str, description: str) -> Markup:
    """The figure as an <svg> element. ``name`` keeps its ids apart from those of the
    page's other charts."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None},
        )
    drawn = buffer.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    drawn = _without_size(drawn)
    drawn = _with_own_ids(drawn, name)
    drawn = drawn.replace("'DejaVu Sans'", "system-ui")
    for colour, variable in VARIABLES.items():
        drawn = drawn.replace(colour, f"var({variable})")
    label = f'<svg role="img" aria-label="{escape(description)}"'
    return Markup(drawn.replace("<svg", label, 1))


def _without_size(drawn: str) -> str:
    """Drop width and height: the page decides."""
    for side in ("width", "height"):
        drawn = re.sub(rf'(<svg[^>]*?) {side}="[^"]*"', r"\1", drawn, count=1)
    return drawn


def _with_own_ids(drawn: str, name: str) -> str:
    """Put ``name`` before every id and every use of one."""
    drawn = drawn.replace('id="', f'id="{name}-')
    drawn = drawn.replace("url(#", f"url(#{name}-")
    return drawn.replace('xlink:href="#', f'xlink:href="#{name}-')


def spread(count: int, most: int) -> list[int]:
    """Choose at most ``most`` of 0 .. count-1, evenly spread, both ends included."""
    places = np.linspace(0, count - 1, min(count, most))
    return sorted({round(place) for place in places})
