"""Layers that mix tokens without keys and values: by a short convolution (LFM2, arXiv
2511.23404), by a gated delta rule (Gated DeltaNet, arXiv 2412.06464), or by a state
space (Mamba-2, arXiv 2405.21060). The one definition.

All that such a layer knows of the tokens before is its *state*, of one size: the newest
inputs of its convolution and, beside a short convolution alone, a matrix for each head.

Sizes: T packed tokens of a step, B sequences, Q the most tokens of one of them, D hidden
size, C channels of the convolution, K its taps, H heads, G groups of heads that share
queries and keys, dk and dv dims of a key and of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

RowMap = Callable[[Tensor], Tensor]
LEAST_NORM = 1e-6
"""Added to squared lengths of queries and keys that a delta rule normalizes."""


@dataclass(frozen=True)
class Mixing:
    """Sizes and kind of a mixer. ``channels`` C, ``taps`` K; ``heads`` H, ``groups`` G,
    ``key_dim`` dk and ``value_dim`` dv are 0 for a convolution alone. ``norm``: whether
    the output is normalized before its gate, after it or not at all, a delta rule's head
    by head, a state space's in ``norm_groups`` parts. ``least_step`` and ``most_step``
    bound a state space's steps; ``strength``: the most that a delta rule replaces of what
    a key holds."""

    kind: Literal["conv", "delta", "space"]
    channels: int
    taps: int
    heads: int = 0
    groups: int = 0
    key_dim: int = 0
    value_dim: int = 0
    norm: Literal["before", "after", "none"] = "before"
    norm_eps: float = 1e-6
    norm_groups: int = 1
    least_step: float = 0.0
    most_step: float = float("inf")
    strength: float = 1.0

    @property
    def inner(self) -> int:
        """Columns of what it gives before its last map."""
        return self.heads * self.value_dim or self.channels

    @property
    def window(self) -> int:
        """Numbers of a state that are inputs of the convolution."""
        return (self.taps - 1) * self.channels

    @property
    def numbers(self) -> int:
        """Numbers of the state of one sequence."""
        return self.window + self.heads * self.key_dim * self.value_dim


@dataclass(frozen=True)
class Spans:
    """Places of the tokens of each sequence of a step. ``index`` [B, Q]: of each its
    tokens, T past its end. ``counts`` [B]. ``places`` [T]: of each token, among B * Q.
    """

    index: Tensor
    counts: Tensor
    places: Tensor

    @classmethod
    def of(cls, ends: Tensor, offsets: Tensor, tokens: int, sequences: int) -> Spans:
        """``ends`` [B + 1] as cu_seqlens_q, ``offsets`` [Q] 0 .. Q - 1."""
        order = torch.arange(sequences, device=ends.device)
        starts = ends.index_select(0, order)
        ends = ends.index_select(0, order + 1)
        counts = ends - starts
        real = offsets.unsqueeze(0) < counts.unsqueeze(1)
        index = torch.where(real, starts.unsqueeze(1) + offsets.unsqueeze(0), tokens)
        token = torch.arange(tokens, device=ends.device)
        # Of tokens that are of no sequence, as a step may have behind all, the last.
        own = (token.unsqueeze(1) >= ends.unsqueeze(0)).sum(1).clamp(max=sequences - 1)
        within = token - starts.index_select(0, own)
        places = own * offsets.shape[0] + within.clamp(max=offsets.shape[0] - 1)
        return cls(index, counts, places)

    def spread(self, x: Tensor) -> Tensor:
        """[T, n] -> [B, Q, n], zeros past the end of a sequence."""
        padded = F.pad(x, (0, 0, 0, 1))
        rows = padded.index_select(0, self.index.flatten())
        return rows.unflatten(0, (self.index.shape[0], self.index.shape[1]))

    def packed(self, y: Tensor) -> Tensor:
        """[B, Q, n] -> [T, n]"""
        return y.flatten(0, 1).index_select(0, self.places)


Recur = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor]
]
"""(q, k [B, Q, H, dk], v [B, Q, H, dv], log of decays [B, Q, H], strengths [B, Q, H] of a
delta rule or None, states [B, H, dk, dv]) -> (what queries read [B, Q, H, dv], states
after). Tokens past the end of a sequence are zeros."""


@dataclass(frozen=True)
class MixerParts:
    """Maps and numbers of a mixer. ``taps``: K of [C]; ``conv_bias`` [C], or None. For
    heads: ``gates`` maps to what decides on steps; ``decay`` [H] (below 0), ``step_bias``
    [H], ``skip`` [H] of a state space, float32; ``norm`` [dv], or [H * dv] of a state
    space."""

    project: RowMap
    out: RowMap
    taps: Sequence[Tensor]
    conv_bias: Tensor | None
    gates: RowMap | None = None
    decay: Tensor | None = None
    step_bias: Tensor | None = None
    skip: Tensor | None = None
    norm: Tensor | None = None


def mix(
    mixing: Mixing,
    parts: MixerParts,
    x: Tensor,
    spans: Spans,
    states: Tensor,
    recur: Recur,
) -> tuple[Tensor, Tensor]:
    """x [T, D], states [B, numbers] float32 -> (y [T, D], states after the step)."""
    window, matrix = states.split([mixing.window, mixing.numbers - mixing.window], -1)
    window = window.unflatten(-1, (mixing.taps - 1, mixing.channels))
    if mixing.kind == "conv":
        before, after, value = parts.project(x).chunk(3, -1)
        mixed, window = _convolved(parts, before * value, spans, window)
        return parts.out(after * mixed), window.flatten(1)
    matrix = matrix.unflatten(-1, (mixing.heads, mixing.key_dim, mixing.value_dim))
    channels, gate = parts.project(x).split([mixing.channels, mixing.inner], -1)
    channels, window = _convolved(parts, channels, spans, window)
    of_kind = _delta if mixing.kind == "delta" else _space
    y, matrix = of_kind(
        mixing, parts, F.silu(channels).float(), x, spans, matrix, recur
    )
    y = _gated(mixing, parts, y, gate)
    return parts.out(y), torch.cat([window.flatten(1), matrix.flatten(1)], -1)


def _convolved(
    parts: MixerParts, x: Tensor, spans: Spans, window: Tensor
) -> tuple[Tensor, Tensor]:
    """x [T, C] and the inputs before [B, K - 1, C] -> (the convolution [T, C], the
    newest inputs after)."""
    every = torch.cat([window, spans.spread(x).float()], 1)  # [B, K - 1 + Q, C]
    count = spans.index.shape[1]
    total = parts.conv_bias
    for tap, weight in enumerate(parts.taps):
        term = every[:, tap : tap + count] * weight
        total = term if total is None else total + term
    assert total is not None
    kept = torch.arange(window.shape[1], device=x.device)
    newest = (spans.counts.unsqueeze(1) + kept).long().unsqueeze(-1)
    newest = newest.expand(-1, -1, x.shape[1])
    return spans.packed(total).to(x.dtype), every.gather(1, newest)


def _delta(
    mixing: Mixing,
    parts: MixerParts,
    channels: Tensor,
    x: Tensor,
    spans: Spans,
    matrix: Tensor,
    recur: Recur,
) -> tuple[Tensor, Tensor]:
    """Gated delta rule: [T, H, dv] float32, and the matrices after."""
    assert parts.gates and parts.decay is not None and parts.step_bias is not None
    keys = mixing.groups * mixing.key_dim
    q, k, v = channels.split([keys, keys, mixing.inner], -1)
    q, k = (_unit(one.unflatten(-1, (mixing.groups, -1))) for one in (q, k))
    strength, step = parts.gates(x).float().chunk(2, -1)
    strength = strength.sigmoid() * mixing.strength
    decays = F.softplus(step + parts.step_bias) * parts.decay
    rows = q * mixing.key_dim**-0.5, k, v.unflatten(-1, (mixing.heads, -1))
    return _recurred(mixing, rows, decays, strength, spans, matrix, recur)


def _space(
    mixing: Mixing,
    parts: MixerParts,
    channels: Tensor,
    x: Tensor,
    spans: Spans,
    matrix: Tensor,
    recur: Recur,
) -> tuple[Tensor, Tensor]:
    """State space: [T, H, dv] float32, and the matrices after."""
    assert parts.gates and parts.decay is not None and parts.step_bias is not None
    assert parts.skip is not None
    keys = mixing.groups * mixing.key_dim
    v, k, q = channels.split([mixing.inner, keys, keys], -1)
    q, k = (one.unflatten(-1, (mixing.groups, -1)) for one in (q, k))
    v = v.unflatten(-1, (mixing.heads, -1))
    step = parts.gates(x).float() + parts.step_bias
    step = F.softplus(step).clamp(mixing.least_step, mixing.most_step)
    rows = q, k, v * step.unsqueeze(-1)
    decays = step * parts.decay
    y, matrix = _recurred(mixing, rows, decays, None, spans, matrix, recur)
    return y + v * parts.skip, matrix


def _recurred(
    mixing: Mixing,
    rows: tuple[Tensor, Tensor, Tensor],
    decays: Tensor,
    strength: Tensor | None,
    spans: Spans,
    matrix: Tensor,
    recur: Recur,
) -> tuple[Tensor, Tensor]:
    """q, k [T, G, dk], v [T, H, dv], decays and strengths [T, H] -> what queries read
    [T, H, dv]."""
    spread: list[Tensor] = []
    for one in rows:
        heads = spans.spread(one.flatten(1)).unflatten(-1, one.shape[1:])
        each = mixing.heads // one.shape[1]
        spread.append(heads.repeat_interleave(each, 2) if each > 1 else heads)
    q, k, v = spread
    strengths = None if strength is None else spans.spread(strength)
    y, matrix = recur(q, k, v, spans.spread(decays), strengths, matrix)
    return spans.packed(y.flatten(2)).unflatten(-1, (mixing.heads, -1)), matrix


def _gated(mixing: Mixing, parts: MixerParts, y: Tensor, gate: Tensor) -> Tensor:
    """y [T, H, dv] float32, normalized and gated: [T, H * dv] as the gate."""
    wide = F.silu(gate.float())
    if mixing.norm == "none":
        return (y.flatten(1) * wide).to(gate.dtype)
    assert parts.norm is not None
    if mixing.kind == "delta":
        y = (parts.norm * _normal(y, mixing.norm_eps).to(gate.dtype)).flatten(1)
        return (y * wide).to(gate.dtype)
    y = y.flatten(1)
    if mixing.norm == "after":
        y = y * wide
    grouped = y.unflatten(-1, (mixing.norm_groups, -1))
    y = parts.norm * _normal(grouped, mixing.norm_eps).flatten(1).to(gate.dtype)
    return y if mixing.norm == "after" else (y * wide).to(gate.dtype)


def _normal(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _unit(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) + LEAST_NORM)
