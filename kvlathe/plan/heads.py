"""The shape of a model's attention, and what every head of it caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RANK_MULTIPLE = 16
"""Ranks are multiples of this: one 16-wide matrix-unit step, one 32-byte sector in 16
bit."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One (layer, KV head): how its Q and K are projected and how many dimensions of K
    and V are cached.

    ``input_dim`` is the width of this lane's rows of q (each query head) and of k as
    they reach Attend, before RoPE. ``rope`` says what Attend does to them: rotate every
    plane (``full``), rotate the planes listed in ``planes`` (the input holds only
    those, first halves then second halves), or nothing (``none``).
    ``projected``: Q and K then pass their matrices A and B [input_dim, rank_k] inside
    Attend. A lane that is not projected has ``rank_k`` = input_dim rounded up to 16
    (the padding is cached as zeros and counted).
    ``fill_from``: a removed lane (ranks 0) whose output is the output of that KV head
    of the same layer; fold adds its W_O to that head's, so a removed lane costs nothing
    at run time and does not appear in Attend.
    """

    layer: int
    head: int
    input_dim: int
    rank_k: int
    rank_v: int
    rope: Literal["full", "none", "planes"] = "full"
    planes: tuple[int, ...] = ()
    projected: bool = False
    fill_from: int | None = None

    @property
    def removed(self) -> bool:
        return self.rank_k == 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The attention shape a plan was made for. ``max_positions`` in tokens.

    ``softcap``: scores are softcap * tanh(score / softcap) before the softmax; 0 leaves
    them (Gemma 2, arXiv 2408.00118). ``sinks``: each query head has a learned logit
    beside its scores, whose value is zero (gpt-oss; attention sinks, arXiv 2309.17453).
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    softcap: float = 0.0
    sinks: bool = False

    @property
    def shifts(self) -> bool:
        """Whether scores may all be shifted by one number: softmax then ignores it."""
        return not (self.softcap or self.sinks)

    @property
    def group_size(self) -> int:
        """Query heads for each KV head."""
        return self.query_heads // self.kv_heads
