"""The charts of report.html: matplotlib in, inline SVG out, in colours that follow the page's light or dark setting.

Matplotlib knows no CSS, so charts are drawn in marker colours that are replaced by the page's variables afterwards.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvlathe.console import cell
from kvlathe.export.layout import CacheLayout
from kvlathe.export.plan import CompressionPlan

Array = npt.NDArray[np.floating[Any]]

INK, MUTED, GRID, PAGE, KEY, VALUE = "#010101", "#020202", "#030303", "#040404", "#050505", "#060606"
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PAGE: "--page", KEY: "--key", VALUE: "--value"}
RANKS = LinearSegmentedColormap.from_list("ranks", ["#e8f0ee", "#8fbfb4", "#2f7f79", "#12413f"])
LAYERS = LinearSegmentedColormap.from_list("layers", ["#2a9d8f", "#7a8f3c", "#d18a2c", "#c4543b"])
WIDTH = 9.6
"""Inches; the page scales charts to its own width."""

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


def _svg(figure: Figure, name: str, description: str) -> Markup:
    """The figure as an <svg> element; ``name`` keeps its ids apart from those of the page's other charts."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace("'DejaVu Sans'", "system-ui").replace('id="', f'id="{name}-').replace("url(#", f"url(#{name}-")
    svg = svg.replace('xlink:href="#', f'xlink:href="#{name}-')
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    label = f'<svg role="img" aria-label="{escape(description)}"'
    return Markup(svg.replace("<svg", label, 1))


def _axes(height: float, columns: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:  # noqa: ANN401
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, **options)
    return figure, list(axes[0])


def _spread(count: int, most: int) -> list[int]:
    """At most ``most`` of 0 .. count-1, evenly spread, both ends included."""
    return sorted({round(x) for x in np.linspace(0, count - 1, min(count, most))})


@styled
def bytes_bars(rows: Sequence[tuple[str, float, float]]) -> Markup:
    """One bar for each (label, bytes of K, bytes of V)."""
    figure, (ax,) = _axes(0.85 + 0.4 * len(rows))
    labels, keys, values = zip(*rows, strict=True)
    at = np.arange(len(rows))[::-1]
    ax.barh(at, keys, color=KEY, height=0.62, label="K")
    ax.barh(at, values, left=keys, color=VALUE, height=0.62, label="V")
    longest = max(k + v for _, k, v in rows)
    for y, k, v in zip(at, keys, values, strict=True):
        ax.text(k + v + 0.01 * longest, y, f"{k + v:,.0f}", va="center")
    ax.set_yticks(at, labels, color=INK)
    ax.set_xlabel("bytes for each cached token")
    ax.set_xlim(0, 1.12 * longest)
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0)
    return _svg(figure, "bytes", "Bytes for each cached token, before and after")


@styled
def spectra(spectrum_k: Array, spectrum_v: Array, plan: CompressionPlan) -> Markup:
    """Singular values by layer, mean over its heads, as a share of the largest; a dot where the cache stops keeping."""
    figure, axes = _axes(3.3, 2, sharey=True)
    heads, lowest = plan.model.kv_heads, 1.0
    for ax, title, spectrum, field in zip(
        axes, ("K (with its queries)", "V"), (spectrum_k, spectrum_v), ("rank_k", "rank_v"), strict=True
    ):
        share = (spectrum / np.maximum(spectrum[..., :1], 1e-300)).mean(axis=1)
        ranks = np.array([getattr(lane, field) for lane in plan.lanes]).reshape(-1, heads).mean(axis=1)
        for layer in _spread(len(share), 12):
            row, colour = share[layer], LAYERS(layer / max(1, len(share) - 1))
            ax.plot(np.arange(1, len(row) + 1), row, color=colour, lw=1.2, label=f"layer {layer}")
            last = min(len(row), max(1, round(ranks[layer])))
            ax.plot([last], row[last - 1], "o", ms=4.5, mfc=colour, mec=PAGE, mew=0.8, zorder=3)
        ax.set_yscale("log")
        lowest = min(lowest, share.min())
        ax.set_title(title)
        ax.set_xlabel("dimension")
    axes[0].set_ylim(max(0.7 * lowest, 1e-5), 1.4)
    axes[0].set_ylabel("singular value / largest")
    axes[1].legend(fontsize=8, ncols=2, loc="lower left")
    return _svg(figure, "spectra", "Singular values of K and V by layer")


@styled
def rank_maps(plan: CompressionPlan) -> Markup:
    """Kept dimensions of each layer and head, K and V side by side, numbers in the cells where they fit."""
    layers, heads = plan.model.layers, plan.model.kv_heads
    figure, axes = _axes(min(9.0, 1.1 + 0.3 * layers), 2)
    for ax, title, field in zip(axes, ("K", "V"), ("rank_k", "rank_v"), strict=True):
        ranks = np.array([getattr(lane, field) for lane in plan.lanes]).reshape(layers, heads)
        norm = Normalize(0, plan.model.head_dim)
        ax.pcolormesh(ranks, cmap=RANKS, norm=norm, edgecolors=PAGE, linewidth=1.5)
        if ranks.size <= 320:
            for (layer, head), rank in np.ndenumerate(ranks):
                ink = "#ffffff" if norm(rank) > 0.55 else "#12302e"
                ax.text(head + 0.5, layer + 0.5, str(rank), ha="center", va="center", color=ink, fontsize=8)
        ax.set_title(f"{title}: {ranks.sum():,} of {ranks.size * plan.model.head_dim:,} dimensions")
        ax.invert_yaxis()
        _name_cells(ax, layers, heads)
    axes[0].set_ylabel("layer")
    return _svg(figure, "ranks", "Kept ranks by layer and head")


def _name_cells(ax: Axes, layers: int, heads: int) -> None:
    step = max(1, layers // 20)
    ax.set_xticks(np.arange(heads) + 0.5, [str(i) for i in range(heads)])
    ax.set_yticks(np.arange(0, layers, step) + 0.5, [str(i) for i in range(0, layers, step)])
    ax.set_xlabel("KV head")
    ax.grid(visible=False)
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)


LOST = 0.25
"""Of the uncompressed score: an accuracy chart ends there, where no plan is of use any more and all are far apart."""


@styled
def accuracy_curve(curve: Mapping[str, Any], whole: float, chosen: float | None, common: float | None = None) -> Markup:
    """Score against bytes: one line for each request that was measured (point["of"]), the score that had to be kept.

    Bytes are a token's: ``whole`` of the cache that point["removed"] is a fraction of, ``chosen`` of this engine,
    ``common`` of the uncompressed cache in 16 bit where that is another.
    """
    groups = sorted(
        {str(p.get("of", "measured")) for p in curve["points"]}, key=lambda name: (name != curve.get("of"), name)
    )
    figure, (ax,) = _axes(3.4 if len(groups) == 1 else 4.2)
    for i, name in enumerate(groups):
        own = [p for p in curve["points"] if str(p.get("of", "measured")) == name]
        kept, scores = np.array(sorted((whole * (1 - float(p["removed"])), float(p["score"])) for p in own)).T
        colour = KEY if i == 0 else LAYERS((i - 1) / max(1, len(groups) - 2))
        width, marker, above = (1.8, "o", 3) if i == 0 else (0.9, "sD^vP*X"[(i - 1) % 7], 2)
        ax.plot(kept, scores, "-", marker=marker, color=colour, ms=5, lw=width, label=name, zorder=above)
    ax.axhline(curve["baseline"], color=MUTED, lw=0.9, label="uncompressed")
    if curve.get("target") is not None:
        ax.axhline(curve["target"], color=VALUE, lw=1.2, ls="--", label="required")
    if chosen is not None:
        ax.axvline(chosen, color=MUTED, lw=0.9, ls=":", label="this engine")
    least = min(curve["baseline"], *(p["score"] for p in curve["points"]))
    lowest, top = max(least, lost_below(curve)), max(curve["baseline"], *(p["score"] for p in curve["points"]))
    ax.set_ylim(lowest - 0.04 * (top - lowest), top + 0.06 * (top - lowest) or None)
    _bytes_axis(ax, [whole] if common is None else [whole, common])
    ax.set_ylabel(str(curve["metric"]))
    if len(groups) == 1:
        ax.legend(loc="best")
    else:
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    return _svg(figure, "curve", f"{curve['metric']} against bytes of a token")


def lost_below(curve: Mapping[str, Any]) -> float:
    """The score below which accuracy_curve shows no point."""
    return min((1 - LOST) * curve["baseline"], curve["target"] if curve.get("target") is not None else np.inf)


def _bytes_axis(ax: Axes, uncompressed: Sequence[float]) -> None:
    """Halves and doubles of the uncompressed bytes; each step to the left is as good as the last."""
    ax.set_xscale("log", base=2)
    ax.set_xlim(right=1.06 * max(uncompressed))
    low, high = ax.get_xlim()
    halves = [max(uncompressed) / 2**n for n in range(12)]
    ax.set_xticks(ticks := [x for x in halves if low <= x <= high], [cell(x) for x in ticks])
    ax.set_xticks([], minor=True)
    common = f", {cell(uncompressed[1])} in 16 bit" if len(uncompressed) > 1 else ""
    ax.set_xlabel(f"KV bytes of a token, log scale (uncompressed: {cell(uncompressed[0])}{common})")


@styled
def stability_by_layer(rows: Iterable[tuple[str, Array, Array, Array]]) -> Markup:
    """For each (name, delta / epsilon, angle in radians, energy missed), all [L, H]: one dot a head, over layers."""
    figure, axes = _axes(2.6, 3)
    for (name, ratio, angle, missed), colour, shift in zip(rows, (KEY, VALUE), (-0.12, 0.12), strict=True):
        layer = np.repeat(np.arange(ratio.shape[0]), ratio.shape[1]) + shift
        for ax, data in zip(axes, (100 * ratio, np.degrees(angle), 100 * missed), strict=True):
            ax.plot(layer, data.ravel(), "o", color=colour, ms=4, alpha=0.75, mew=0, label=name)
    for ax, title, unit in zip(
        axes,
        ("Rotation: delta / epsilon", "Kept subspace: largest angle", "Energy missed"),
        ("%", "degrees", "%"),
        strict=True,
    ):
        ax.set_title(title)
        ax.set_ylabel(unit)
        ax.set_xlabel("layer")
        ax.set_ylim(bottom=0)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[-1].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0)
    return _svg(figure, "stability", "Stability of the rotations between two calibration sets")


@styled
def page_map(plan: CompressionPlan, bucket: int) -> Markup:
    """One page of a bucket to scale: a row a layer, in address order. Of a deep model, some layers."""
    layout = CacheLayout(plan)
    table = layout.lane_table(bucket)
    layers = sorted({int(row[0]) for row in table})
    layers = [layers[i] for i in _spread(len(layers), 24)]
    figure, (ax,) = _axes(min(7.5, 0.75 + 0.24 * len(layers)))
    for y, layer in enumerate(layers):
        rows = [row for row in table if row[0] == layer]
        start = int(rows[0][4])
        for row in rows:
            k, k_meta, v, v_meta = (int(x) - start for x in row[4:8])
            ax.barh(y, k_meta - k, left=k, color=KEY, height=0.72, edgecolor=PAGE, linewidth=0.8)
            ax.barh(y, v_meta - v, left=v, color=VALUE, height=0.72, edgecolor=PAGE, linewidth=0.8)
    ax.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    ax.invert_yaxis()
    ax.set_ylabel("layer")
    ax.set_xlabel(
        f"bytes from the layer's first lane (a page: {layout.page_stride[bucket]:,} bytes, {plan.page_tokens} tokens)"
    )
    ax.grid(axis="y", visible=False)
    return _svg(figure, f"page{bucket}", f"One page of bucket {bucket}: K and V of every lane in address order")
