"""Heat maps of report.html: ranks, bits and tokens that a plan keeps of every head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import Normalize

from kvlathe.export.report.figure import AMOUNTS, HALF, PAGE, axes, styled, svg
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan

Array = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Kept:
    """Arrays [layers, KV heads] for a sequence of ``tokens`` tokens; zeros where a layer
    has fewer heads than others.

    ``ranks_*`` in dimensions, ``bits_*`` of a cached number (the mean over the head's
    tokens, metadata aside), ``share`` of the tokens. ``whole_bits``: mean bits of a
    cached number with scales, scores and padding. ``dims``: of a key.
    """

    tokens: int
    ranks_k: Array
    ranks_v: Array
    bits_k: Array
    bits_v: Array
    share: Array
    whole_bits: float
    dims: Array

    def real(self, values: Array) -> Array:
        """``values`` [layers, KV heads], NaN where there is no head."""
        return np.where(self.dims > 0, values, np.nan)

    @property
    def mean_bits(self) -> float:
        """Mean bits of a cached number, over all that is cached."""
        numbers = self.share * (self.ranks_k + self.ranks_v)
        bits_k = self.ranks_k * self.bits_k
        bits_v = self.ranks_v * self.bits_v
        return float((self.share * (bits_k + bits_v)).sum() / max(1.0, numbers.sum()))

    @property
    def mean_share(self) -> float:
        """Mean share of the tokens, over all heads that are not removed."""
        return float(self.share[self.ranks_k > 0].mean())


def kept(plan: CompressionPlan, longest: int | None = None) -> Kept:
    """Compute the arrays for a sequence of ``longest`` tokens, where its length changes
    them; for the longest that the model takes, where ``longest`` is None."""
    layout = CacheLayout(plan)
    tokens = layout.long(longest)
    pages = np.array(layout.all_written(tokens)) / plan.page_tokens
    held_bytes = float(pages @ np.array(layout.page_stride))
    numbers = 0.0
    held = np.zeros(len(plan.lanes))
    bits_k = np.zeros(len(plan.lanes))
    bits_v = np.zeros(len(plan.lanes))
    held_tokens = layout.all_held(tokens)
    for bucket, count in zip(plan.index.buckets, held_tokens, strict=True):
        tier = bucket.tier
        lanes = list(bucket.lanes)
        held[lanes] += count
        bits_k[lanes] += count * tier.k.bits
        bits_v[lanes] += count * tier.v.bits
        numbers += count * sum(plan.lanes[i].numbers for i in lanes)
    at_least_one = np.maximum(held, 1)
    ranks_k = np.array([lane.rank_k for lane in plan.lanes], float)
    ranks_v = np.array([lane.rank_v for lane in plan.lanes], float)
    at = tuple(np.array(plan.model.places).T)
    dims = np.array([plan.model.heads(layer).head_dim for layer in at[0]], float)

    def placed(of_lanes: Array) -> Array:
        every = np.zeros((plan.model.layers, plan.model.kv_heads))
        every[at] = of_lanes
        return every

    return Kept(
        tokens=tokens,
        ranks_k=placed(ranks_k),
        ranks_v=placed(ranks_v),
        bits_k=placed(bits_k / at_least_one),
        bits_v=placed(bits_v / at_least_one),
        share=placed(held / tokens),
        whole_bits=8 * held_bytes / max(1.0, numbers),
        dims=placed(dims),
    )


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

    @property
    def differs(self) -> bool:
        """Whether a head has another number than the others; else a sentence says all."""
        apart = np.nanmax(self.values) - np.nanmin(self.values)
        return bool(apart > 10.0**-self.decimals / 2)


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
        if np.isnan(value):
            continue
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
