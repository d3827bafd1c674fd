"""Heat maps of report.html: what every layer and head keeps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import Normalize

from kvlathe.export.report.figure import AMOUNTS, HALF, PAGE, axes, styled, svg

Array = npt.NDArray[np.floating]
MOST_NUMBERS = 320
"""Cells of a map that still has room for numbers."""
LIGHT, DARK = "#ffffff", "#12302e"
"""Numbers on dark cells and on light ones."""


@dataclass(frozen=True, slots=True)
class Map:
    """``values`` [layers, heads], coloured from 0 to ``top``."""

    name: str
    title: str
    values: Array
    top: float
    decimals: int = 0


@styled
def heat_map(shown: Map) -> Markup:
    """Layers down, heads across, numbers in the cells where they fit."""
    layers, heads = shown.values.shape
    figure, ax = axes(min(9.0, 1.1 + 0.3 * layers), HALF)
    norm = Normalize(0, shown.top)
    ax.pcolormesh(shown.values, cmap=AMOUNTS, norm=norm, edgecolors=PAGE, linewidth=1.5)
    if shown.values.size <= MOST_NUMBERS:
        _write_numbers(ax, shown)
    ax.set_title(shown.title)
    ax.set_ylabel("layer")
    ax.invert_yaxis()
    _name_cells(ax, layers, heads)
    return svg(figure, shown.name, f"{shown.title}, by layer and head")


def _write_numbers(ax: Axes, shown: Map) -> None:
    for (layer, head), value in np.ndenumerate(shown.values):
        ax.text(
            head + 0.5,
            layer + 0.5,
            f"{value:.{shown.decimals}f}",
            ha="center",
            va="center",
            color=LIGHT if float(value) > 0.55 * shown.top else DARK,
            fontsize=8,
        )


def _name_cells(ax: Axes, layers: int, heads: int) -> None:
    rows = range(0, layers, max(1, layers // 20))
    ax.set_xticks(np.arange(heads) + 0.5, [str(head) for head in range(heads)])
    ax.set_yticks(np.array(rows) + 0.5, [str(layer) for layer in rows])
    ax.set_xlabel("KV head")
    ax.grid(visible=False)
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
