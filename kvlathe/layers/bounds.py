"""Gated MLPs whose two factors are bounded (gpt-oss, arXiv 2508.10925), or of which few
gates are left (Gemma 3n)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.layers.rows import ACTIVATIONS


@dataclass(frozen=True)
class Bound:
    """Bounds of an MLP. With ``alpha`` it computes gate sigmoid(alpha gate) (up + 1), its
    gate at most ``limit`` and up within it; without, activation(gate) at most ``limit``,
    times up within it. With ``deviations`` there is no limit: of each token's gates counts
    what is more than so many standard deviations above their mean."""

    limit: float = 0.0
    alpha: float = 0.0
    deviations: float | None = None


def bounded(gate: Tensor, up: Tensor, bound: Bound, activation: str) -> Tensor:
    """gate and up [..., I] -> [..., I]"""
    if bound.deviations is not None:
        return ACTIVATIONS[activation](_highest(gate, bound.deviations)) * up
    limit = bound.limit
    up = up.clamp(-limit, limit)
    if not bound.alpha:
        return ACTIVATIONS[activation](gate).clamp(max=limit) * up
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(bound.alpha * gate) * (up + 1)


def _highest(gate: Tensor, deviations: float) -> Tensor:
    """gate [..., I] less what its row must exceed, or 0."""
    wide = gate.float()
    mean = wide.mean(-1, keepdim=True)
    spread = (wide - mean).square().mean(-1, keepdim=True).sqrt()
    return F.relu(wide - (mean + deviations * spread)).to(gate.dtype)
