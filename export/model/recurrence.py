"""The recurrence of layers with a state (kvlathe/layers/mixers.py): eager, some tokens at
a time, and its node while exporting.

For each head, with a state S [dk, dv], decays a, strengths b, rows q, k, v:

    S <- exp(a) S;   S <- S + k^T b (v - k S)    delta rule
                     S <- S + k^T v              state space;    y = q S

Sizes: B sequences, Q tokens of each, H heads, dk and dv dims of a key and of a value, C
tokens of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64
"""Tokens that are computed by products. They count in the state together."""
NODES = {True: "DeltaRule", False: "StateSpace"}
"""Whether strengths are given -> the operator."""


def recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decays: Tensor,
    strengths: Tensor | None,
    states: Tensor,
) -> tuple[Tensor, Tensor]:
    """As ``Recur``. Chunks follow Yang et al., arXiv 2412.06464, and Mamba-2's SSD."""
    if torch.compiler.is_exporting():
        return _node(q, k, v, decays, strengths, states)
    tokens = q.shape[1]
    given = [q, k, v, decays, *([] if strengths is None else [strengths])]
    by_head = [one.transpose(1, 2) for one in given]  # [B, H, Q, ...]
    outputs: list[Tensor] = []
    for first in range(0, tokens, CHUNK):
        chunk = [one[:, :, first : first + CHUNK] for one in by_head]
        y, states = _chunk(chunk, states)
        outputs.append(y)
    return torch.cat(outputs, 2).transpose(1, 2), states


def _chunk(rows: list[Tensor], states: Tensor) -> tuple[Tensor, Tensor]:
    """q, k [B, H, C, dk], v [B, H, C, dv], decays and strengths [B, H, C] -> outputs
    [B, H, C, dv], states after."""
    q, k, v, decays, *strengths = rows
    total = decays.cumsum(-1)  # log of what is left of the state before
    between = total.unsqueeze(-1) - total.unsqueeze(-2)
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device)
    left = between.masked_fill(later.triu(1), -torch.inf).exp()  # [B, H, C, C]
    before = total.exp().unsqueeze(-1)
    for strength in strengths:  # what each token adds, less what others added of it
        b = strength.unsqueeze(-1)
        system = ((k * b) @ k.mT * left).tril(-1)
        wanted = b * (v - (k * before) @ states)
        v = torch.linalg.solve_triangular(
            system, wanted, upper=False, unitriangular=True
        )
    y = (q * before) @ states + (q @ k.mT * left) @ v
    rest = (total[..., -1:] - total).exp().unsqueeze(-1)
    return y, states * before[:, :, -1:] + (k * rest).mT @ v


def _node(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decays: Tensor,
    strengths: Tensor | None,
    states: Tensor,
) -> tuple[Tensor, Tensor]:
    """One node of the exported graph."""
    given = [] if strengths is None else [strengths]
    y, after = torch.onnx.ops.symbolic_multi_out(
        f"kvlathe::{NODES[strengths is not None]}",
        [q, k, v, decays, *given, states],
        dtypes=[torch.float32, torch.float32],
        shapes=[v.shape, states.shape],
        version=1,
    )
    return y, after
