"""Routers: which experts each token passes, and what each of them counts.

Sizes: T packed tokens, E experts, C experts that a token passes, G groups of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Scores = Literal["softmax", "sigmoid"]
LEAST = 1e-20
"""Added to sums that weights are divided by: all sigmoids of a token may be 0."""


@dataclass(frozen=True)
class Routing:
    """Routing of tokens to experts: how many a token passes, and whether their weights
    sum to 1. ``scores``: what a router's logits become. Of ``groups`` of experts only
    ``kept_groups`` are chosen from, the ones whose ``group_best`` best experts score
    most (DeepSeek-V3, arXiv 2412.19437).

    ``jitter``: experts are chosen one after the other, each weighed by a softmax over
    what is left, without logits that are farther than this share below the best one
    (SparseMixer, arXiv 2409.12136); 0 elsewhere. Where ``limit`` is not 0, experts compute gate
    sigmoid(alpha gate) (up + 1), with gate at most ``limit`` and up within it (gpt-oss,
    arXiv 2508.10925).
    """

    chosen: int
    normalized: bool
    alpha: float = 0.0
    limit: float = 0.0
    scores: Scores = "softmax"
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 2
    jitter: float = 0.0
    before: bool = False
    """Weights multiply what experts read, not what they give (Llama 4)."""
    by_logits: bool = False
    """A correction is added to logits, not to scores (Kolibri 1)."""


def choose(
    logits: Tensor, correction: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    """A router's logits [T, E] -> weights [T, C], float32, and experts [T, C].
    ``correction`` [E] is added to scores for the choice alone."""
    logits = logits.float()
    if routing.jitter:
        return _mixed(logits, routing)
    scores = logits.sigmoid() if routing.scores == "sigmoid" else logits.softmax(-1)
    ranked = logits if routing.by_logits else scores
    if correction is not None:
        ranked = ranked + correction.float()
    if routing.kept_groups < routing.groups:
        ranked = _of_best_groups(ranked, routing)
    experts = ranked.topk(routing.chosen, -1).indices
    weights = scores.gather(-1, experts)
    if routing.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST)
    return weights, experts


def _of_best_groups(ranked: Tensor, routing: Routing) -> Tensor:
    """ranked [T, E], -inf in groups that are not chosen from."""
    grouped = ranked.unflatten(-1, (routing.groups, -1))  # [T, G, E / G]
    scores = grouped.topk(routing.group_best, -1).values.sum(-1)  # [T, G]
    best = scores.topk(routing.kept_groups, -1).indices
    groups = torch.arange(routing.groups, device=ranked.device)
    is_kept = (best.unsqueeze(-1) == groups).any(-2)  # [T, G]
    return grouped.masked_fill(~is_kept.unsqueeze(-1), -torch.inf).flatten(-2)


def _mixed(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """As transformers' Phi-3.5-MoE chooses: weights of an expert are those among the
    logits near it, and do not sum to 1."""
    weights: list[Tensor] = []
    experts: list[Tensor] = []
    places = torch.arange(logits.shape[-1], device=logits.device)
    left = logits
    for _ in range(routing.chosen):
        best, expert = left.max(-1, keepdim=True)  # [T, 1]
        is_far = (best - logits) / logits.abs().maximum(best) > 2 * routing.jitter
        near = left.masked_fill(is_far, -torch.inf).softmax(-1)
        weights.append(near.gather(-1, expert))
        experts.append(expert)
        left = left.masked_fill(places == expert, -torch.inf)
    return torch.cat(weights, -1), torch.cat(experts, -1)
