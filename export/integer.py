"""Attention on codes (HACK, Eq. 4): QK^T and PV as integer products plus corrections; nothing is dequantized.

For one partition, with a ~ s_a a' (symmetric: its minimum is 0) and b ~ s_b b' + m_b,

    sum a b ~ s_a s_b sum a' b' + m_b s_a sum a'

where only sum a' b' is a matrix product, of 8-bit integers into 32 bit; partitions add up. With a minimum of a there
would be two more terms, m_a s_b sum b' + n m_a m_b, and sum b' would have to be stored with the cache. Q is symmetric
in one scale a partition, and P, which is in [0, 1], in one scale for each query and partition: one far larger share
elsewhere, an attention sink, then does not round the others to zero.

These are the eager forms; export/onnx_integer.py writes the same into the graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS_Q, LEVELS_P = 127, 255
LEAST_SCALE = 1e-30
"""Scales below this are those of rows of zeros, or as good as that."""


def quantized(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Whole numbers of at most ``levels`` and their scale [..., 1], symmetric over the last axis: x ~ scale * codes."""
    scale = (x.abs().amax(-1, keepdim=True) / levels).clamp(min=LEAST_SCALE)
    return (x / scale).round(), scale


def scores(q: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, groups: Tensor) -> Tensor:
    """q [H, G, Q, Rk] times keys, [H, G, Q, N].

    ``codes`` [H, N, Rk] of the keys, ``scale`` and ``minimum`` [H, N, g] of their groups along the rank, ``groups``
    [H, g, Rk]: 1 where a channel belongs to a group.
    """
    split = torch.where(groups[:, :, None, None].bool(), q.unsqueeze(1), 0.0)  # [H, g, G, Q, Rk]
    whole, step = quantized(split, LEVELS_Q)
    products = (whole.int().flatten(1, 3) @ codes.int().mT).unflatten(1, split.shape[1:4])
    factor, offset = (x.mT[:, :, None, None] for x in (scale, minimum))  # [H, g, 1, 1, N]
    return (step * (products * factor + whole.sum(-1, keepdim=True) * offset)).sum(1)


def outputs(shares: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """The mean of values under shares [H, G, Q, N] that sum to 1, [H, G, Q, Rv].

    ``codes`` [H, N, Rv] of the values, ``scale`` and ``minimum`` [H, N / n, Rv] of their groups of n tokens.
    """
    partitions = (scale.shape[1], shares.shape[-1] // scale.shape[1])
    split = shares.unflatten(-1, partitions).permute(0, 3, 1, 2, 4)  # [H, N/n, G, Q, n]
    whole, step = quantized(split, LEVELS_P)
    products = (whole.int().flatten(2, 3) @ codes.int().unflatten(1, partitions)).unflatten(2, split.shape[2:4])
    factor, offset, sums = scale[:, :, None, None], minimum[:, :, None, None], whole.sum(-1, keepdim=True)
    return (step * (products * factor + sums * offset)).sum(1) / (step * sums).sum(1).clamp(min=LEAST_SCALE)
