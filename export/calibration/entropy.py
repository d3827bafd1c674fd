"""Truncated matrix entropy (UNComp, section 3): how many directions the tokens of a
text really use.

Of a matrix X [n, d], one row a token: rows are centred and each brought to length 1,
Sigma is their mean outer product (Eq. 1, trace 1), H_k = - sum of sigma log sigma over
its k largest eigenvalues (Eq. 9), erank_k = exp(H_k) (Eq. 10). float64 throughout,
wherever the tensors are.
Sizes: L layers, Hq query heads, H KV heads, S texts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlathe.export.model.plain_attention import PlainAttention, seen_tokens
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
def spectrum(x: Tensor) -> Tensor:
    """Eigenvalues of Sigma, falling, of each matrix in ``x`` [..., n, d]: [..., min(n,
    d)], summing to 1.

    Rows at the mean have no direction and do not count; a matrix of nothing else has
    the spectrum 0. NaN gives NaN.
    """
    x = x.double()
    n, d = x.shape[-2:]
    if not bool(x.isfinite().all()):
        return x.new_full((*x.shape[:-2], min(n, d)), torch.nan)
    rows = x - x.mean(-2, keepdim=True)
    size = rows.norm(dim=-1, keepdim=True)
    away = size > 1e-12 * x.abs().max()
    rows = torch.where(away, rows / size, 0.0)  # unit vectors [..., n, d]
    # Both products have the same eigenvalues but for zeros: take the smaller one.
    gram = rows @ rows.mT if n < d else rows.mT @ rows
    counted = away.sum((-2, -1)).clamp(min=1)
    return (torch.linalg.eigvalsh(gram).flip(-1) / counted[..., None]).clamp(min=0.0)


def elbows(sigma: Tensor) -> Tensor:
    """Number of eigenvalues of each spectrum in ``sigma`` [..., d] before its elbow:
    the place farthest below the line between its ends.

    At least 1. (The paper names Thorndike 1953 and no formula.)
    """
    first = sigma[..., :1]
    last = sigma[..., -1:]
    count = sigma.shape[-1]
    places = torch.arange(count, device=sigma.device)
    line = first + (last - first) * places / max(count - 1, 1)  # [..., d]
    return (line - sigma).argmax(-1).clamp(min=1)


def entropies_of(sigma: Tensor) -> Tensor:
    """H_k of each spectrum in ``sigma`` [..., d] (nats) at every truncation: [...,
    len(TRUNCATIONS)]."""
    sums = -(sigma * torch.where(sigma > 0, sigma, 1.0).log()).cumsum(-1)
    whole = sigma.shape[-1]
    counts: list[Tensor] = []
    for k in TRUNCATIONS:
        if k == "elbow":
            counts.append(elbows(sigma))
            continue
        count = whole if k == "all" else min(int(k), whole)
        counts.append(torch.full_like(counts[0], count))
    return sums.gather(-1, torch.stack(counts, -1) - 1)


def eranks(x: Tensor) -> Tensor:
    """Effective ranks of each matrix of ``x`` [..., n, d] at every truncation: [...,
    len(TRUNCATIONS)]."""
    return entropies_of(spectrum(x)).exp()


# -- attention of the newest tokens ----------------------------------------------------
def last_attention(q: Tensor, k: Tensor, attention: PlainAttention) -> Tensor:
    """Attention of the last LAST tokens, summed over them and over a lane's query
    heads: [H, n].

    q [Hq, n, d], k [H, n, d] of a whole causal text.
    """
    lanes, n, d = k.shape
    first = max(0, n - LAST)
    rows = torch.arange(first, n, device=k.device)
    queries = q[:, first:].reshape(lanes, -1, len(rows), d)  # [H, G, R, d]
    scores = queries @ k[:, None].mT * attention.scale  # [H, G, R, n]
    by_row = seen_tokens(n, attention.window, k.device)[rows]  # [R, n]
    shares = attention.shares(scores.flatten(0, 1), by_row)
    return shares.unflatten(0, (lanes, -1)).sum((1, 2))


def window(attention: Tensor, size: int, recent: float) -> Tensor:
    """Places [..., size], ascending, that a head keeps: the newest ``recent`` of them,
    then those of most ``attention`` [..., n].
    """
    n = attention.shape[-1]
    newest = round(recent * size)
    saliency = attention.clone()
    saliency[..., n - newest :] = torch.inf
    falling = saliency.argsort(dim=-1, descending=True, stable=True)
    return falling[..., :size].sort(-1).values


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
        self,
        text: int,
        layer: int,
        hidden: Tensor,
        q: Tensor,
        k: Tensor,
        attended: PlainAttention,
    ) -> None:
        """Fill in one layer of one text: hidden [n, D], q [Hq, n, d], k [H, n, d]."""
        at = (text, layer)
        tokens, d = k.shape[1:]
        attention = last_attention(q, k, attended)  # [H, n]
        size = max(LAST, round(WINDOW * tokens))
        kept = []
        for recent in RECENT:
            of_lanes = window(attention, size, recent)[..., None].expand(-1, -1, d)
            kept.append(k.gather(1, of_lanes))
        windows = eranks(torch.stack(kept)).mean(1)  # [len(RECENT), len(TRUNCATIONS)]
        unit = attention / attention.norm(dim=-1, keepdim=True)  # [H, n]
        found = (
            (self.hidden, eranks(hidden)),
            (self.queries, eranks(q)),
            (self.keys, eranks(k)),
            (self.windows, windows),
            (self.likeness, unit @ unit.mT),
        )
        for array, ranks in found:
            array[at] = ranks.cpu().numpy()


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
