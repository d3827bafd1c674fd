"""The charts of report.html: spectra and stability."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from kvlathe.export.report.figure import (
    HALF,
    KEY,
    LAYERS,
    PAGE,
    VALUE,
    axes,
    spread,
    styled,
    svg,
)

Array = npt.NDArray[np.floating]
MOST_LINES = 12
"""Layers of a spectrum that can be told apart."""


@styled
def spectrum(name: str, title: str, values: Array, ranks: Array) -> Markup:
    """Singular values by layer, mean over its heads, as a share of the largest. A dot
    where the cache stops keeping.

    ``values`` [layers, heads, dimensions], ``ranks`` [layers, heads].
    """
    figure, ax = axes(3.3, HALF)
    shares = values / np.maximum(values[..., :1], 1e-300)
    heads = np.maximum((values[..., 0] > 0).sum(1), 1)  # a layer may have fewer
    share = shares.sum(1) / heads[:, None]
    for layer in spread(len(share), MOST_LINES):
        colour = LAYERS(layer / max(1, len(share) - 1))
        rank = ranks[layer].sum() / heads[layer]
        _draw_spectrum(ax, share[layer], rank, colour, layer)
    ax.set_yscale("log")
    ax.set_ylim(max(0.7 * float(share.min()), 1e-5), 1.4)
    ax.set_title(title)
    ax.set_xlabel("dimension")
    ax.set_ylabel("singular value / largest")
    ax.legend(fontsize=8, ncols=2, loc="lower left")
    return svg(figure, name, f"Singular values of {title} by layer")


def _draw_spectrum(
    ax: Axes, row: Array, rank: float, colour: tuple[float, ...], layer: int
) -> None:
    ax.plot(
        np.arange(1, len(row) + 1), row, color=colour, lw=1.2, label=f"layer {layer}"
    )
    last = min(len(row), max(1, round(rank)))
    ax.plot([last], row[last - 1], "o", ms=4.5, mfc=colour, mec=PAGE, mew=0.8, zorder=3)


@styled
def missed_energy(keys: Array, values: Array) -> Markup:
    """Energy missed in percent, [layers, heads] each: one dot a head, over layers. NaN
    where nothing was checked."""
    figure, ax = axes(2.4, HALF)
    for name, missed, colour, shift in (
        ("K", keys, KEY, -0.12),
        ("V", values, VALUE, 0.12),
    ):
        ax.plot(
            np.repeat(np.arange(missed.shape[0]), missed.shape[1]) + shift,
            missed.ravel(),
            "o",
            color=colour,
            ms=4,
            alpha=0.75,
            mew=0,
            label=name,
        )
    top = max(float(np.nanmax(side, initial=0)) for side in (keys, values))
    ax.set_ylim(0, 1.15 * top or 1)
    ax.set_ylabel("energy missed, %")
    ax.set_xlabel("layer")
    ax.set_xlim(-0.5, len(keys) - 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0)
    return svg(figure, "stability", "Energy that the other half's subspace misses")
