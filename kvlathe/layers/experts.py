"""MLPs that are many experts, of which each token passes a few.

Sizes: T packed tokens, E experts, D hidden size, I columns of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlathe.layers.activations import ACTIVATIONS


@dataclass(frozen=True)
class Routing:
    """How many experts a token passes, and whether their weights sum to 1."""

    chosen: int
    normalized: bool


@dataclass(frozen=True)
class ExpertWeights:
    """``router`` [D, E]; ``gate`` and ``up`` [E, D, I], ``down`` [E, I, D]."""

    router: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


def run_experts(
    x: Tensor, weights: ExpertWeights, routing: Routing, activation: str
) -> Tensor:
    """x [T, D] -> [T, D]: the sum of the chosen experts' MLPs, each times its softmax
    over all of them.

    Every expert computes every token, and those that were not chosen count 0: three
    products that every runtime has, and that can be captured. They cost E / chosen
    times the chosen ones' (docs/models.md).
    """
    shares = _shares(x, weights.router, routing).to(x.dtype)  # [T, E]
    act = ACTIVATIONS[activation]
    every = x.unsqueeze(0)
    inner = act(every @ weights.gate) * (every @ weights.up)
    counted = inner * shares.T.unsqueeze(-1)
    return (counted @ weights.down).sum(0)


def _shares(x: Tensor, router: Tensor, routing: Routing) -> Tensor:
    """What each expert counts for each token, [T, E] float32: 0 for most."""
    every = (x @ router).float().softmax(-1)
    values, places = every.topk(routing.chosen, -1)
    if routing.normalized:
        values = values / values.sum(-1, keepdim=True)
    experts = torch.arange(router.shape[1], device=x.device)
    is_chosen = places.unsqueeze(-1) == experts  # [T, chosen, E]
    return (is_chosen * values.unsqueeze(-1)).sum(-2)
