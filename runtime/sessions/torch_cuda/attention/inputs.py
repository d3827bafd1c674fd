"""A step on the device, as attention takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvlathe.runtime.sessions.gpu.step_buffer import NO_SHORT_ROWS, ShortRows


@dataclass(frozen=True)
class Observed:
    """The observed rows of a step, int32 on the device: ``rows`` [T], ``starts`` [B + 1]
    of each sequence, and the ``positions`` [T] of all tokens. ``most``: of one sequence at
    most."""

    rows: Tensor
    starts: Tensor
    positions: Tensor
    most: int


@dataclass(frozen=True)
class Mass:
    """What the observed rows of a step give each token at most (docs/attend.md), where
    the plan compacts prefixes: ``largest`` float32 [B, kept lanes, N] on the device, to
    be filled. ``rows``: the observed ones of each sequence, int64 on the device. The rest
    is known to the host: ``starts`` [B + 1] of each sequence's rows, and its ``lengths``
    [buckets]."""

    largest: Tensor
    starts: Sequence[int]
    rows: Sequence[Tensor]
    lengths: Sequence[Sequence[int]]


@dataclass(frozen=True)
class StepInputs:
    """A step on the device, int32: ``cu_seqlens_q`` [B+1], ``lengths`` [B, S],
    ``page_tables`` S times [B, M_s].

    ``single``: sequence b has exactly row b, or none (a decode step). ``rows``: all rows
    from this one on are of prompt chunks: of sequences that bring LEAST_CHUNK or more.
    ``observed``: where the plan ranks tokens. ``short``: what sequences without a prompt
    chunk bring. ``chunks``: whether any may bring one. ``mass``: where somebody asks for
    it. ``copies_of`` int32 [B] on the device: as of kvlathe_prompts (abi.h).
    """

    cu_seqlens_q: Tensor
    lengths: Tensor
    page_tables: Sequence[Tensor]
    single: bool
    rows: int
    observed: Observed | None = None
    short: ShortRows = NO_SHORT_ROWS
    chunks: bool = True
    mass: Mass | None = None
    copies_of: Tensor | None = None
