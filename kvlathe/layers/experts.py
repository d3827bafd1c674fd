"""MLPs that are many experts, of which each token passes a few.

Sizes: T packed tokens, E experts, D hidden size, I columns of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvlathe.layers.bounds import Bound, bounded
from kvlathe.layers.routing import Routing, choose
from kvlathe.layers.rows import ACTIVATIONS


class Router(Protocol):
    """The weights around experts, as ExpertWeights names them."""

    @property
    def router(self) -> Tensor: ...
    @property
    def router_bias(self) -> Tensor | None: ...
    @property
    def correction(self) -> Tensor | None: ...
    @property
    def into(self) -> Tensor | None: ...
    @property
    def back(self) -> Tensor | None: ...


@dataclass(frozen=True)
class ExpertWeights:
    """``router`` [D, E]; ``gate`` and ``up`` [E, D, I], ``down`` [E, I, D]. Biases
    [E], twice [E, 1, I], and [E, D]; or None. ``correction`` [E]: as in ``choose``.
    Without ``gate`` an expert is a plain MLP. Where experts read a latent of L dims,
    ``into`` [D, L] and ``back`` [L, D]; maps of experts then have L in place of D."""

    router: Tensor
    up: Tensor
    down: Tensor
    gate: Tensor | None = None
    router_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    correction: Tensor | None = None
    into: Tensor | None = None
    back: Tensor | None = None

    @property
    def parts(self) -> list[Tensor]:
        """What experts have of their own, as PARTS orders it."""
        found = [getattr(self, name) for name in PARTS]
        return [part for part in found if part is not None]


PARTS = ("up", "down", "gate", "up_bias", "down_bias", "gate_bias")


def run_experts(
    x: Tensor, weights: ExpertWeights, routing: Routing, activation: str
) -> Tensor:
    """x [T, D] -> [T, D]: the sum of the chosen experts' MLPs, each times its weight.

    Every expert computes every token, and those that were not chosen count 0: three
    products that every runtime has, and that can be captured. They cost E / chosen
    times the chosen ones', which graphs for CPUs compute alone (export/onnx/experts.py).
    """
    values, places = choose_experts(x, weights, routing)
    x = read_by_experts(x, weights)
    shares = _shares(values, places, weights).to(x.dtype)  # [T, E]
    by_expert = shares.T.unsqueeze(-1)  # [E, T, 1]
    every = x.unsqueeze(0)
    if routing.before:
        inner = _inner(every * by_expert, weights, routing, activation)
    else:
        inner = _inner(every, weights, routing, activation) * by_expert
    out = (inner @ weights.down).sum(0)
    if weights.down_bias is not None:
        out = out + shares @ weights.down_bias
    return given_by_experts(out, weights)


def read_by_experts(x: Tensor, weights: Router) -> Tensor:
    """x [T, D] -> [T, D], or [T, L] where experts read a latent."""
    return x if weights.into is None else x @ weights.into


def given_by_experts(out: Tensor, weights: Router) -> Tensor:
    """The sum of what experts gave, as ``read_by_experts`` -> [T, D]."""
    return out if weights.back is None else out @ weights.back


def run_expert(
    x: Tensor, weights: ExpertWeights, routing: Routing, activation: str
) -> Tensor:
    """x [T, D] -> [T, D]: the MLP of one expert, whose ``gate``, ``up`` and ``down`` are
    [D, I] and [I, D], and biases [1, I] and [D]."""
    inner = _inner(x, weights, routing, activation)
    return _biased(inner @ weights.down, weights.down_bias)


def choose_experts(
    x: Tensor, weights: ExpertWeights, routing: Routing
) -> tuple[Tensor, Tensor]:
    """x [T, D] -> what each chosen expert counts [T, chosen], float32, and which they
    are, [T, chosen]."""
    logits = router_logits(x, weights, routing)
    return choose(logits, weights.correction, routing)


def router_logits(x: Tensor, weights: Router, routing: Routing) -> Tensor:
    """x [T, D] -> [T, E]"""
    router = weights.router
    # Sigmoids lie close together, and so do scores that a correction chooses among.
    if routing.scores == "sigmoid" or weights.correction is not None:
        x, router = x.float(), router.float()
    logits = x @ router
    return logits if weights.router_bias is None else logits + weights.router_bias


def _biased(every: Tensor, bias: Tensor | None) -> Tensor:
    """every [..., T, I] + bias [..., 1, I]."""
    return every if bias is None else every + bias


def _inner(
    x: Tensor, weights: ExpertWeights, routing: Routing, activation: str
) -> Tensor:
    """x [..., T, D] -> [..., T, I]"""
    up = _biased(x @ weights.up, weights.up_bias)
    if weights.gate is None:
        return ACTIVATIONS[activation](up)
    gate = _biased(x @ weights.gate, weights.gate_bias)
    if not routing.limit:
        return ACTIVATIONS[activation](gate) * up
    return bounded(gate, up, Bound(routing.limit, routing.alpha), activation)


def _shares(values: Tensor, places: Tensor, weights: ExpertWeights) -> Tensor:
    """Weight of each expert for each token, [T, E] float32: 0 for most."""
    experts = torch.arange(weights.router.shape[-1], device=values.device)
    is_chosen = places.unsqueeze(-1) == experts  # [T, chosen, E]
    return (is_chosen * values.unsqueeze(-1)).sum(-2)
