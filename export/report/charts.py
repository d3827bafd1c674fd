"""The charts of report.html: bytes, spectra, stability, pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan

Array = npt.NDArray[np.floating]
MOST_LINES = 12
"""Layers of a spectrum that can be told apart."""
MOST_ROWS = 24
"""Layers of a page that have room."""


@styled
def bytes_bars(rows: Sequence[tuple[str, float, float]]) -> Markup:
    """One bar for each (label, bytes of K, bytes of V)."""
    figure, ax = axes(0.85 + 0.4 * len(rows))
    labels, keys, values = zip(*rows, strict=True)
    at = np.arange(len(rows))[::-1]
    ax.barh(at, keys, color=KEY, height=0.62, label="K")
    ax.barh(at, values, left=keys, color=VALUE, height=0.62, label="V")
    longest = max(k + v for _, k, v in rows)
    for y, k, v in zip(at, keys, values, strict=True):
        ax.text(k + v + 0.01 * longest, y, f"{k + v:,.0f}", va="center")
    ax.set_yticks(at, labels)
    ax.set_xlabel("bytes for each cached token")
    ax.set_xlim(0, 1.12 * longest)
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0)
    return svg(figure, "bytes", "Bytes for each cached token, before and after")


@styled
def spectrum(name: str, title: str, values: Array, ranks: Array) -> Markup:
    """Singular values by layer, mean over its heads, as a share of the largest. A dot
    where the cache stops keeping.

    ``values`` [layers, heads, dimensions], ``ranks`` [layers, heads].
    """
    figure, ax = axes(3.3, HALF)
    share = (values / np.maximum(values[..., :1], 1e-300)).mean(axis=1)
    for layer in spread(len(share), MOST_LINES):
        colour = LAYERS(layer / max(1, len(share) - 1))
        _draw_spectrum(ax, share[layer], ranks[layer].mean(), colour, layer)
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
    """Energy missed in percent, [layers, heads] each: one dot a head, over layers."""
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
    top = max(float(keys.max()), float(values.max()))
    ax.set_ylim(0, 1.15 * top or 1)
    ax.set_ylabel("energy missed, %")
    ax.set_xlabel("layer")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0)
    return svg(figure, "stability", "Energy that the other half's subspace misses")


@styled
def page_map(plan: CompressionPlan, bucket: int) -> Markup:
    """One page of a bucket to scale: a row a layer, in address order. Of a deep model,
    some layers."""
    layout = CacheLayout(plan)
    table = layout.lane_table(bucket)
    layers = sorted({int(row[0]) for row in table})
    layers = [layers[i] for i in spread(len(layers), MOST_ROWS)]
    figure, ax = axes(min(7.5, 0.75 + 0.24 * len(layers)))
    for y, layer in enumerate(layers):
        _draw_layer(ax, y, [row for row in table if row[0] == layer])
    ax.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    ax.invert_yaxis()
    ax.set_ylabel("layer")
    page = f"a page: {layout.page_stride[bucket]:,} bytes, {plan.page_tokens} tokens"
    ax.set_xlabel(f"bytes from the layer's first lane ({page})")
    ax.grid(axis="y", visible=False)
    words = f"One page of bucket {bucket}: K and V of every lane in address order"
    return svg(figure, f"page{bucket}", words)


def _draw_layer(ax: Axes, y: int, rows: Iterable[npt.NDArray[np.int32]]) -> None:
    """K and V of a layer's lanes (rows of the lane table), from the first lane on."""
    rows = list(rows)
    start = int(rows[0][4])
    for row in rows:
        k, k_meta, v, v_meta = (int(x) - start for x in row[4:8])
        for left, end, colour in ((k, k_meta, KEY), (v, v_meta, VALUE)):
            ax.barh(
                y,
                end - left,
                left=left,
                color=colour,
                height=0.72,
                edgecolor=PAGE,
                linewidth=0.8,
            )
