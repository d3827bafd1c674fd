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
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

RowMap = Callable[[Tensor], Tensor]
LEAST_NORM = 1e-6
"""Added to squared lengths of queries and keys that a delta rule normalizes."""
MOST_STEP = 3e38
"""No bound of a state space's steps, which are float32: JSON has no infinity."""


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
    most_step: float = MOST_STEP
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


class MixerMemory(Protocol):
    """The states of a step's sequences in one layer. What it is given, it takes over into
    them; each call is made once a step."""

    def convolved(self, parts: MixerParts, x: Tensor, silu: bool) -> Tensor:
        """x [T, C] and the inputs before it -> the convolution [T, C], after its
        activation where ``silu``."""
        ...

    def heads(
        self, mixing: Mixing, parts: MixerParts, channels: Tensor, gates: Tensor
    ) -> Tensor:
        """channels [T, C] after their activation, gates [T, H or 2 H] -> what queries
        read of the matrices [T, H, dv] float32."""
        ...

    def gated(
        self, mixing: Mixing, parts: MixerParts, y: Tensor, gate: Tensor
    ) -> Tensor:
        """As ``gated``."""
        return gated(mixing, parts, y, gate)


def mix(mixing: Mixing, parts: MixerParts, x: Tensor, memory: MixerMemory) -> Tensor:
    """x [T, D] -> y [T, D]."""
    if mixing.kind == "conv":
        before, after, value = parts.project(x).chunk(3, -1)
        return parts.out(after * memory.convolved(parts, before * value, False))
    assert parts.gates
    channels, gate = parts.project(x).split([mixing.channels, mixing.inner], -1)
    channels = memory.convolved(parts, channels, True)
    y = memory.heads(mixing, parts, channels, parts.gates(x))
    return parts.out(memory.gated(mixing, parts, y, gate))


class SpreadMemory(MixerMemory):
    """States of sequences [B, numbers] float32, whose tokens are spread side by side.
    The definition."""

    def __init__(
        self, mixing: Mixing, spans: Spans, states: Tensor, recur: Recur
    ) -> None:
        window, self._matrix = states.split(
            [mixing.window, mixing.numbers - mixing.window], -1
        )
        self._window = window.unflatten(-1, (mixing.taps - 1, mixing.channels))
        self._spans, self._recur = spans, recur

    @property
    def after(self) -> Tensor:
        """[B, numbers] after the step."""
        return torch.cat([self._window.flatten(1), self._matrix], -1)

    def convolved(self, parts: MixerParts, x: Tensor, silu: bool) -> Tensor:
        spans, before = self._spans, self._window
        every = torch.cat([before, spans.spread(x).float()], 1)  # [B, K - 1 + Q, C]
        kept = torch.arange(before.shape[1], device=x.device)
        newest = (spans.counts.unsqueeze(1) + kept).long().unsqueeze(-1)
        self._window = every.gather(1, newest.expand(-1, -1, x.shape[1]))
        total = convolution(parts, every, spans.index.shape[1])
        total = spans.packed(total).to(x.dtype)
        return F.silu(total) if silu else total

    def heads(
        self, mixing: Mixing, parts: MixerParts, channels: Tensor, gates: Tensor
    ) -> Tensor:
        rows = head_rows(mixing, parts, channels.float(), gates)
        spread: list[Tensor] = []
        for one in (rows.q, rows.k, rows.v):
            heads = self._spans.spread(one.flatten(1)).unflatten(-1, one.shape[1:])
            each = mixing.heads // one.shape[1]
            spread.append(heads.repeat_interleave(each, 2) if each > 1 else heads)
        q, k, v = spread
        decays, strengths = self._spans.spread(rows.decays), None
        if rows.strengths is not None:
            strengths = self._spans.spread(rows.strengths)
        size = (mixing.heads, mixing.key_dim, mixing.value_dim)
        states = self._matrix.unflatten(-1, size)
        y, after = self._recur(q, k, v, decays, strengths, states)
        self._matrix = after.flatten(1)
        y = self._spans.packed(y.flatten(2)).unflatten(-1, (mixing.heads, -1))
        return with_skip(parts, rows, y)


def convolution(parts: MixerParts, every: Tensor, count: int) -> Tensor:
    """every [..., K - 1 + count, C] float32 -> [..., count, C]."""
    total = parts.conv_bias
    for tap, weight in enumerate(parts.taps):
        term = every.narrow(-2, tap, count) * weight
        total = term if total is None else total + term
    assert total is not None
    return total


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Rows of a step for the matrices of heads, float32: ``q`` and ``k`` [T, G, dk],
    ``v`` [T, H, dv], ``decays`` (their log) [T, H]; ``strengths`` [T, H] of a delta rule.
    ``values`` [T, H, dv]: of a state space, what skips it."""

    q: Tensor
    k: Tensor
    v: Tensor
    decays: Tensor
    strengths: Tensor | None = None
    values: Tensor | None = None


def head_rows(
    mixing: Mixing, parts: MixerParts, channels: Tensor, gates: Tensor
) -> HeadRows:
    """channels [T, C] float32, gates [T, H or 2 H]."""
    return (_delta if mixing.kind == "delta" else _space)(
        mixing, parts, channels, gates.float()
    )


def with_skip(parts: MixerParts, rows: HeadRows, y: Tensor) -> Tensor:
    """y [T, H, dv], and what of ``rows`` skips the matrices."""
    if rows.values is None or parts.skip is None:
        return y
    return y + rows.values * parts.skip


def _delta(
    mixing: Mixing, parts: MixerParts, channels: Tensor, gates: Tensor
) -> HeadRows:
    """Rows of a gated delta rule."""
    assert parts.decay is not None and parts.step_bias is not None
    keys = mixing.groups * mixing.key_dim
    q, k, v = channels.split([keys, keys, mixing.inner], -1)
    q, k = (_unit(one.unflatten(-1, (mixing.groups, -1))) for one in (q, k))
    strength, step = gates.chunk(2, -1)
    return HeadRows(
        q * mixing.key_dim**-0.5,
        k,
        v.unflatten(-1, (mixing.heads, -1)),
        F.softplus(step + parts.step_bias) * parts.decay,
        strength.sigmoid() * mixing.strength,
    )


def _space(
    mixing: Mixing, parts: MixerParts, channels: Tensor, gates: Tensor
) -> HeadRows:
    """Rows of a state space."""
    assert parts.decay is not None and parts.step_bias is not None
    keys = mixing.groups * mixing.key_dim
    v, k, q = channels.split([mixing.inner, keys, keys], -1)
    q, k = (one.unflatten(-1, (mixing.groups, -1)) for one in (q, k))
    v = v.unflatten(-1, (mixing.heads, -1))
    step = F.softplus(gates + parts.step_bias)
    step = step.clamp(mixing.least_step, mixing.most_step)
    return HeadRows(q, k, v * step.unsqueeze(-1), step * parts.decay, None, v)


def gated(mixing: Mixing, parts: MixerParts, y: Tensor, gate: Tensor) -> Tensor:
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
