"""Truncated matrix entropy (UNComp, section 3): how many directions the tokens of a
text really use.

Of a matrix X [n, d], one row a token: rows are centred and each brought to length 1,
Sigma is their mean outer product (Eq. 1, trace 1), H_k = - sum of sigma log sigma over
its k largest eigenvalues (Eq. 9), erank_k = exp(H_k) (Eq. 10). float64 throughout.
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


# -- one matrix ------------------------------------------------------------------------
def spectrum(x: npt.ArrayLike) -> Array:
    """Eigenvalues of Sigma, falling, of each matrix in ``x`` [..., n, d]: [..., min(n,
    d)], summing to 1.

    Rows at the mean have no direction and do not count; a matrix of nothing else has
    the spectrum 0. NaN gives NaN.
    """
    x = np.asarray(x, np.float64)
    n, d = x.shape[-2:]
    if not np.isfinite(x).all():
        return np.full((*x.shape[:-2], min(n, d)), np.nan)
    rows = x - x.mean(-2, keepdims=True)
    size = np.linalg.norm(rows, axis=-1, keepdims=True)
    largest = np.abs(x).max(initial=0.0)
    away = size > 1e-12 * largest
    rows = np.divide(rows, size, out=np.zeros_like(rows), where=away)
    columns = rows.swapaxes(-1, -2)
    # Both products have the same eigenvalues but for zeros: take the smaller one.
    gram = rows @ columns if n < d else columns @ rows
    counted = np.maximum(away.sum((-2, -1)), 1)
    falling = np.linalg.eigvalsh(gram)[..., ::-1]
    return np.clip(falling / counted[..., None], 0.0, None)


def elbow(sigma: Array) -> int:
    """How many eigenvalues of ``sigma`` [d] come before its elbow: the place farthest
    below the line between its ends.

    At least 1. (The paper names Thorndike 1953 and no formula.)
    """
    first = sigma[0]
    last = sigma[-1]
    steps = max(len(sigma) - 1, 1)
    line = first + (last - first) * np.arange(len(sigma)) / steps
    farthest = int(np.argmax(line - sigma))
    return max(1, farthest)


def entropy(sigma: Array, k: str | int) -> float:
    """H_k of a spectrum [d] (nats); ``k`` is one of TRUNCATIONS or a count."""
    if k == "elbow":
        count = elbow(sigma)
    elif k == "all":
        count = len(sigma)
    else:
        count = int(k)
    kept = sigma[:count]
    logarithms = np.log(np.where(kept > 0, kept, 1.0))
    return float(-(kept * logarithms).sum())


def eranks(x: npt.ArrayLike) -> Array:
    """Effective ranks of each matrix of ``x`` [..., n, d] at every truncation: [...,
    len(TRUNCATIONS)]."""
    sigma = spectrum(x)
    rows = sigma.reshape(-1, sigma.shape[-1])
    ranks = np.empty((len(rows), len(TRUNCATIONS)))
    for i, row in enumerate(rows):
        for place, k in enumerate(TRUNCATIONS):
            ranks[i, place] = np.exp(entropy(row, k))
    return ranks.reshape(*sigma.shape[:-1], len(TRUNCATIONS))


# -- attention of the newest tokens ----------------------------------------------------
def last_attention(q: Array, k: Array, scale: float) -> Array:
    """What the last LAST tokens attend to, summed over them and over a lane's query
    heads: [H, n].

    q [Hq, n, d], k [H, n, d] of a whole causal text.
    """
    lanes, n, d = k.shape
    first = max(0, n - LAST)
    rows = np.arange(first, n)
    queries = q[:, rows].reshape(lanes, -1, len(rows), d)
    keys = k[:, None].swapaxes(-1, -2)
    scores = queries @ keys * scale
    causal = np.arange(n) <= rows[:, None]
    scores = np.where(causal, scores, -np.inf)
    largest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - largest)
    shares = weights / weights.sum(-1, keepdims=True)
    return shares.sum((1, 2))


def window(attention: Array, size: int, recent: float) -> npt.NDArray[np.int64]:
    """Places [size], ascending, that a head keeps: the newest ``recent`` of them, then
    those of most ``attention`` [n].
    """
    n = len(attention)
    newest = round(recent * size)
    saliency = attention.copy()
    saliency[n - newest :] = np.inf
    falling = np.argsort(-saliency, kind="stable")
    return np.sort(falling[:size])


# -- a calibration ---------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Entropies:
    """Effective ranks of S sampled texts; the last axis is TRUNCATIONS. Queries and
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

    def observe(
        self, text: int, layer: int, hidden: Array, q: Array, k: Array, scale: float
    ) -> None:
        """Fill in one layer of one text: hidden [n, D], q [Hq, n, d], k [H, n, d]."""
        at = (text, layer)
        tokens = k.shape[1]
        attention = last_attention(q, k, scale)
        size = max(LAST, round(WINDOW * tokens))
        self.hidden[at] = eranks(hidden)
        self.queries[at] = eranks(q)
        self.keys[at] = eranks(k)
        for i, recent in enumerate(RECENT):
            kept = []
            for keys, weights in zip(k, attention, strict=True):
                kept.append(keys[window(weights, size, recent)])
            self.windows[at][i] = eranks(np.stack(kept)).mean(0)
        length = np.linalg.norm(attention, axis=-1, keepdims=True)
        unit = attention / length
        self.likeness[at] = unit @ unit.T


def truncation(k: str) -> int:
    """The place of ``k`` in TRUNCATIONS."""
    return TRUNCATIONS.index(k)


# -- what the method decides by --------------------------------------------------------
def lane_eranks(entropies: Entropies, k: str) -> Array:
    """[S, L, H]: a KV head's effective rank is the mean over its query heads."""
    ranks = entropies.queries[..., truncation(k)]
    texts, layers = ranks.shape[:2]
    kv_heads = entropies.keys.shape[2]
    groups = ranks.reshape(texts, layers, kv_heads, -1)
    return groups.mean(-1)


def votes(eranks_of: Array) -> npt.NDArray[np.int64]:
    """[L, H]: how many texts put a head into the upper half of its layer, from
    effective ranks [S, L, H].

    Where a layer has a single head, all layers' heads are ranked together.
    """
    single = eranks_of.shape[2] == 1
    ranks = eranks_of.swapaxes(1, 2) if single else eranks_of
    rising = np.argsort(ranks, -1, kind="stable")
    place = np.argsort(rising, -1, kind="stable")
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
    whole = entropies.keys[..., at].mean((0, 2))
    trends = entropies.windows[..., at].mean(0).T
    correlations = [_pearson(whole, trend) for trend in trends]
    best = int(np.argmax(correlations))
    return RECENT[best], correlations


def _pearson(a: Array, b: Array) -> float:
    a = a - a.mean()
    b = b - b.mean()
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    if size <= 0:
        return 0.0
    return float(a @ b) / size
