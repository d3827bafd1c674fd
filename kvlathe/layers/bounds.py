"""Gated MLPs whose two factors are bounded (gpt-oss, arXiv 2508.10925)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlathe.layers.rows import ACTIVATIONS


@dataclass(frozen=True)
class Bound:
    """Bounds of an MLP. With ``alpha`` it computes gate sigmoid(alpha gate) (up + 1), its
    gate at most ``limit`` and up within it; without, activation(gate) at most ``limit``,
    times up within it."""

    limit: float
    alpha: float = 0.0


def bounded(gate: Tensor, up: Tensor, bound: Bound, activation: str) -> Tensor:
    """gate and up [..., I] -> [..., I]"""
    limit = bound.limit
    up = up.clamp(-limit, limit)
    if not bound.alpha:
        return ACTIVATIONS[activation](gate).clamp(max=limit) * up
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(bound.alpha * gate) * (up + 1)
