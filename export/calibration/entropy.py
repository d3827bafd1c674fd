"""Truncated matrix entropy (UNComp, section 3): how many directions the tokens of a
text really use.

Of a matrix X [n, d], one row a token: rows are centred and each brought to length 1,
Sigma is their mean outer product (Eq. 1, trace 1), H_k = - sum of sigma log sigma over
its k largest eigenvalues (Eq. 9), erank_k = exp(H_k) (Eq. 10). float64 throughout,
wherever the tensors are.
Sizes: Hq query heads, H KV heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvlathe.export.calibration.effective_ranks import (
    LAST,
    RECENT,
    TRUNCATIONS,
    WINDOW,
    Entropies,
)
from kvlathe.export.model.plain_attention import PlainAttention, seen_from


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
    places = torch.arange(n, device=k.device)
    rows = places[first:]
    queries = q[:, first:].reshape(lanes, -1, len(rows), d)  # [H, G, R, d]
    scores = queries @ k[:, None].mT * attention.scale  # [H, G, R, n]
    by_row = seen_from(rows, places, attention.window)  # [R, n]
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
def observe(
    entropies: Entropies,
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
        (entropies.hidden, eranks(hidden)),
        (entropies.queries, eranks(q)),
        (entropies.keys, eranks(k)),
        (entropies.windows, windows),
        (entropies.likeness, unit @ unit.mT),
    )
    for array, ranks in found:
        array[(*at, *map(slice, ranks.shape))] = ranks.cpu().numpy()
