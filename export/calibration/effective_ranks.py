"""Effective ranks of drawn texts (UNComp, section 3): what a calibration keeps of
them, and what the method decides by. entropy.py takes them of matrices.

Sizes: L layers, Hq query heads, H KV heads, S texts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvlathe.plan.heads import ModelShape

Array = npt.NDArray[np.float64]

TRUNCATIONS = ("elbow", "16", "32", "64", "all")
"""The values of k that every statistic is kept for, its last axis: the spectrum's
elbow, a count, or no truncation."""
LAST = 8
"""The newest tokens, whose attention says which others matter (section 3.3; A.3)."""
WINDOW = 384 / 4096
"""Share of a text's tokens that a compressed head keeps where windows are compared: the
paper's main setting."""
RECENT = (0.0, 0.125, 0.25, 0.375, 0.5, 0.75)
"""Shares of a window that its newest tokens may take; the others are those with most
attention (section 4.2: H/R)."""


@dataclass(frozen=True, eq=False)
class Entropies:
    """Effective ranks of S drawn texts; the last axis is TRUNCATIONS. Queries and
    keys are those after RoPE.

    ``queries`` [S, L, Hq, K], ``keys`` [S, L, H, K], ``hidden`` [S, L, K] (each layer's
    input). ``windows`` [S, L, R, K]: mean over lanes of the keys that a window keeps,
    for every share in RECENT. ``likeness`` [S, L, H, H]: cosine of what two lanes' last
    tokens attend to.
    """

    queries: Array
    keys: Array
    hidden: Array
    windows: Array
    likeness: Array

    @classmethod
    def shapes(cls, shape: ModelShape, texts: int) -> dict[str, tuple[int, ...]]:
        """The shape of every array for ``texts`` texts: numbers are a few for each head
        and text."""
        each = (texts, shape.layers)
        k = len(TRUNCATIONS)
        return {
            "queries": (*each, shape.query_heads, k),
            "keys": (*each, shape.kv_heads, k),
            "hidden": (*each, k),
            "windows": (*each, len(RECENT), k),
            "likeness": (*each, shape.kv_heads, shape.kv_heads),
        }

    @classmethod
    def empty(cls, shape: ModelShape, texts: int) -> Entropies:
        shapes = cls.shapes(shape, texts)
        return cls(**{name: np.zeros(size) for name, size in shapes.items()})

    @property
    def texts(self) -> int:
        return len(self.hidden)

    def arrays(self) -> dict[str, Array]:
        names = [field.name for field in dataclasses.fields(self)]
        return {name: getattr(self, name) for name in names}


def truncation(k: str) -> int:
    """The place of ``k`` in TRUNCATIONS."""
    return TRUNCATIONS.index(k)


# -- what the method decides by --------------------------------------------------------
def lane_eranks(entropies: Entropies, k: str) -> Array:
    """[S, L, H]: a KV head's effective rank is the mean over its query heads."""
    ranks = entropies.queries[..., truncation(k)]
    texts, layers = ranks.shape[:2]
    return ranks.reshape(texts, layers, entropies.keys.shape[2], -1).mean(-1)


def votes(eranks_of: Array) -> npt.NDArray[np.int64]:
    """[L, H]: how many texts put a head into the upper half of its layer, from
    effective ranks [S, L, H].

    Where a layer has a single head, all layers' heads are ranked together.
    """
    single = eranks_of.shape[2] == 1
    ranks = eranks_of.swapaxes(1, 2) if single else eranks_of
    place = np.argsort(np.argsort(ranks, -1, kind="stable"), -1, kind="stable")
    half = -(-ranks.shape[-1] // 2)
    upper = place >= half
    if single:
        upper = upper.swapaxes(1, 2)
    return upper.sum(0)


def drops(hidden: Sequence[float] | Array, epsilon: float) -> list[int]:
    """Layers before which the effective rank falls by more than ``epsilon`` (Eq. 11),
    from one rank a layer."""
    layers: list[int] = []
    for layer, (before, after) in enumerate(pairwise(hidden), 1):
        if before - after > epsilon:
            layers.append(layer)
    return layers


def likest_recent(entropies: Entropies, k: str) -> tuple[float, list[float]]:
    """The share of RECENT whose keys' layer trend follows the whole keys' most closely,
    and every share's Pearson correlation (0 where a trend is flat).
    """
    at = truncation(k)
    whole = entropies.keys[..., at].mean((0, 2))  # [L]
    trends = entropies.windows[..., at].mean(0).T  # [len(RECENT), L]
    correlations = [_pearson(whole, trend) for trend in trends]
    return RECENT[int(np.argmax(correlations))], correlations


def _pearson(a: Array, b: Array) -> float:
    a = a - a.mean()
    b = b - b.mean()
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    if size <= 0:
        return 0.0
    return float(a @ b) / size
