"""The recurrence of layers with a state (kvlathe/layers/mixers.py), eager.

For each head, with a state S [dk, dv], decays a, strengths b, rows q, k, v:

    S <- exp(a) S;   S <- S + k^T b (v - k S)    delta rule
                     S <- S + k^T v              state space;    y = q S

Many tokens are computed by products, CHUNK at a time: Yang et al., arXiv 2412.06464, and
Mamba-2's SSD.

Sizes: B sequences, Q tokens of each, H heads, dk and dv dims of a key and of a value, C
tokens of a chunk, N chunks of any sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64
"""Tokens that are computed by products. They count in the state together."""


@dataclass(frozen=True, eq=False)
class ChunkProducts:
    """All of chunks [N, H, C, ...] that no state is needed for: what queries read of the
    state before (``reads`` [dk]) and of the chunk's own tokens (``own`` [C]); what each
    token leaves in the state after (``keys`` [dk], ``values`` [dv]), less what it
    replaces of the state before (``replaced`` [dk], of a delta rule); and what is ``left``
    of that state [N, H, 1, 1]."""

    reads: Tensor
    own: Tensor
    keys: Tensor
    values: Tensor
    left: Tensor
    replaced: Tensor | None = None

    def part(self, chunks: slice) -> ChunkProducts:
        """Those of some chunks."""
        replaced = None if self.replaced is None else self.replaced[chunks]
        return ChunkProducts(
            self.reads[chunks],
            self.own[chunks],
            self.keys[chunks],
            self.values[chunks],
            self.left[chunks],
            replaced,
        )

    def run(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """states [N, H, dk, dv] before -> what queries read [N, H, C, dv], states
        after."""
        values = self.values
        if self.replaced is not None:
            values = values - self.replaced @ states
        y = self.reads @ states + self.own @ values
        return y, states * self.left + self.keys.mT @ values


def chunk_products(
    q: Tensor, k: Tensor, v: Tensor, decays: Tensor, strengths: Tensor | None
) -> ChunkProducts:
    """q, k [N, H, C, dk], v [N, H, C, dv], log of decays and strengths [N, H, C]."""
    total = decays.cumsum(-1)  # log of what is left of the state before
    between = total.unsqueeze(-1) - total.unsqueeze(-2)
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device)
    left = between.masked_fill(later.triu(1), -torch.inf).exp()  # [N, H, C, C]
    before = total.exp().unsqueeze(-1)
    replaced = None
    if strengths is not None:  # what each token adds, less what others added of it
        b = strengths.unsqueeze(-1)
        system = ((k * b) @ k.mT * left).tril(-1)
        both = torch.linalg.solve_triangular(
            system, b * torch.cat([v, k * before], -1), upper=False, unitriangular=True
        )
        v, replaced = both.split([v.shape[-1], k.shape[-1]], -1)
    own = q @ k.mT * left
    rest = (total[..., -1:] - total).exp().unsqueeze(-1)
    return ChunkProducts(q * before, own, k * rest, v, before[:, :, -1:], replaced)


def recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decays: Tensor,
    strengths: Tensor | None,
    states: Tensor,
) -> tuple[Tensor, Tensor]:
    """As ``mixers.Recur``."""

    def cut(one: Tensor, first: int) -> Tensor:
        return one[:, first : first + CHUNK].transpose(1, 2)

    outputs: list[Tensor] = []
    for first in range(0, q.shape[1], CHUNK):
        rows = cut(q, first), cut(k, first), cut(v, first), cut(decays, first)
        own = None if strengths is None else cut(strengths, first)
        y, states = chunk_products(*rows, own).run(states)
        outputs.append(y)
    return torch.cat(outputs, 2).transpose(1, 2), states


def recur_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decays: Tensor,
    strengths: Tensor | None,
    states: Tensor,
) -> tuple[Tensor, Tensor]:
    """One token of each sequence: q, k [B, H, dk], v [B, H, dv], decays and strengths
    [B, H], states [B, H, dk, dv] -> what queries read [B, H, dv], states after."""
    states = states * decays.exp()[..., None, None]
    if strengths is not None:
        held = (k.unsqueeze(-2) @ states).squeeze(-2)
        v = (v - held) * strengths.unsqueeze(-1)
    states = states + k.unsqueeze(-1) * v.unsqueeze(-2)
    return (q.unsqueeze(-2) @ states).squeeze(-2), states
