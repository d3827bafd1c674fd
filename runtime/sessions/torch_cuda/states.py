"""States of sequences in a step of the torch decoder: where its tokens lie, and what a
mixer knows of those before (kvlathe/layers/mixers.py), by slots of the GPU's memory
(runtime/sessions/gpu/states.py).

A step of one token for each sequence is computed by itself, and may be captured. In other
steps sequences of one token are, and the others CHUNK tokens at a time, whatever stands
beside them.

Sizes: T tokens of B sequences, N chunks, K taps, C channels, H heads.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import util

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.layers.mixers import (
    HeadRows,
    MixerMemory,
    MixerParts,
    Mixing,
    convolution,
    head_rows,
    with_skip,
)
from kvlathe.layers.recurrence import (
    CHUNK,
    chunk_products,
    recur_once,
)
from kvlathe.runtime.sessions.gpu.states import NOBODY
from kvlathe.runtime.sessions.torch_cuda.device import int64_on

log = logging.getLogger("kvlathe")
AT_ONCE = 64
"""Chunks whose products exist at a time, or as many as a step has sequences."""


@dataclass(frozen=True, eq=False)
class StepStates:
    """``memory`` float32 [slots, numbers of all layers]. ``before``, ``after`` int64 [B]:
    slots of the sequences. ``counts``: their tokens, of a step that is no decode."""

    memory: Tensor
    before: Tensor
    after: Tensor
    counts: Sequence[int] = ()

    @classmethod
    def of(cls, memory: Tensor, slots: Tensor, counts: Sequence[int]) -> StepStates:
        """``slots`` int32 [2, B], 0 of padding rows."""
        before, after = slots.long()
        return cls(memory, before, after.clamp(min=NOBODY), counts)

    @cached_property
    def places(self) -> StepPlaces:
        """Places of the tokens of a step that is no decode."""
        return StepPlaces(self.counts, self.memory.device)

    def of_layer(self, first: int, mixing: Mixing) -> MixerMemory:
        """Those of the layer whose numbers begin at ``first``."""
        if self.memory.is_cuda and has_kernels():
            return KernelTokens(self, first, mixing)
        return (SomeTokens if self.counts else OneToken)(self, first, mixing)


class StepPlaces:
    """The places of a step's tokens, int64 on its device.

    ``single``: sequences of one token, and ``single_rows``, their rows. ``longer``: the
    others, those of most tokens first. Their tokens are ``rows``; cut into chunks, they
    are ``chunk_rows`` [N * CHUNK] (T where there is none), of which ``taken`` are tokens.
    Chunks stand one after the other: the first of all ``longer`` ones, the second of
    those that have one ... ``widths``: how many each time. ``sequence_of`` [T];
    ``firsts`` [B + 1]: where each sequence begins.
    """

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self.counts, self.device = np.array(counts), device
        self.starts = np.cumsum([0, *counts])
        tokens = int(self.starts[-1])
        single = np.flatnonzero(self.counts == 1)
        self.single = int64_on(single, device)
        self.single_rows = int64_on(self.starts[:-1][single], device)
        longer = np.argsort(-self.counts, kind="stable")
        longer = longer[self.counts[longer] > 1]
        self.longer = int64_on(longer, device)
        chunks = -(-self.counts[longer] // CHUNK)
        self.widths = [int((chunks > i).sum()) for i in range(max(chunks, default=0))]
        rows = [
            self.starts[one] + CHUNK * i + np.arange(CHUNK)
            for i, width in enumerate(self.widths)
            for one in longer[:width]
        ]
        ends = [self.starts[one + 1] for width in self.widths for one in longer[:width]]
        within = np.array(rows).reshape(-1, CHUNK)
        found = np.where(within < np.array(ends).reshape(-1, 1), within, tokens)
        found = found.flatten()
        self.chunk_rows = int64_on(found, device)
        taken = np.flatnonzero(found < tokens)
        self.taken, self.rows = int64_on(taken, device), int64_on(found[taken], device)
        self.firsts = int64_on(self.starts, device)
        sequences = np.repeat(np.arange(len(counts)), self.counts)
        self.sequence_of = int64_on(sequences, device)
        self._order = np.arange(len(longer))
        self._joined: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    @cached_property
    def pieces(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Chunks for kernels, as many at a time as AT_ONCE says: their ``chunk_rows``;
        where the i-th chunks of all sequences begin; how many each sequence has."""
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        first = 0
        for widths in _pieces(self.widths):
            rows = self.chunk_rows[first * CHUNK : (first + sum(widths)) * CHUNK]
            counts = (np.array(widths)[:, None] > self._order).sum(0)
            firsts = np.cumsum([0, *widths[:-1]])
            on = [int64_on(one, self.device) for one in (firsts, counts)]
            found.append((rows, on[0], on[1]))
            first += sum(widths)
        return found

    def joined(self, window: int) -> tuple[Tensor, Tensor, Tensor]:
        """Places of the tokens [T], of the ``window`` inputs before each sequence [B *
        window], and of its newest ones [B * window], where each sequence's inputs stand
        before its tokens."""
        if window not in self._joined:
            sequences = np.arange(len(self.counts))
            shift = np.repeat((sequences + 1) * window, self.counts)
            firsts = (self.starts[:-1] + sequences * window)[:, None] + np.arange(
                window
            )
            newest = firsts + self.counts[:, None]
            places = (np.arange(len(shift)) + shift, firsts.ravel(), newest.ravel())
            on = [int64_on(one, self.device) for one in places]
            self._joined[window] = on[0], on[1], on[2]
        return self._joined[window]


class _Slots(MixerMemory):
    """The numbers of one layer, in slots."""

    def __init__(self, step: StepStates, first: int, mixing: Mixing) -> None:
        self.step, self.mixing = step, mixing
        self._inputs = step.memory.narrow(1, first, mixing.window)
        matrices = mixing.numbers - mixing.window
        self._matrices = step.memory.narrow(1, first + mixing.window, matrices)

    def inputs(self) -> Tensor:
        """The inputs before each sequence [B, K - 1, C]."""
        found = self._inputs.index_select(0, self.step.before)
        return found.unflatten(1, (-1, self.mixing.channels))

    def keep_inputs(self, newest: Tensor) -> None:
        """[B, K - 1, C]"""
        self._inputs.index_copy_(0, self.step.after, newest.flatten(1))

    def matrices(self, sequences: Tensor | None = None) -> Tensor:
        """Those before the step [B, H, dk, dv], or of some sequences."""
        slots = _chosen(self.step.before, sequences)
        found = self._matrices.index_select(0, slots)
        own = self.mixing
        return found.unflatten(1, (own.heads, own.key_dim, own.value_dim))

    def keep_matrices(self, after: Tensor, sequences: Tensor | None = None) -> None:
        slots = _chosen(self.step.after, sequences)
        self._matrices.index_copy_(0, slots, after.flatten(1))

    def recur_once(
        self, rows: HeadRows, sequences: Tensor | None, at: Tensor | None
    ) -> Tensor:
        """One token of each of some sequences, at these rows of the step, or of all: what
        queries read [B, H, dv]."""
        each = self.mixing.heads // self.mixing.groups
        q, k, v, decays = (
            _chosen(one, at) for one in (rows.q, rows.k, rows.v, rows.decays)
        )
        q, k = (one.repeat_interleave(each, 1) for one in (q, k))
        strengths = None if rows.strengths is None else _chosen(rows.strengths, at)
        states = self.matrices(sequences)
        y, after = recur_once(q, k, v, decays, strengths, states)
        self.keep_matrices(after, sequences)
        return y


class OneToken(_Slots):
    """A MixerMemory of a step of one token for each sequence. Row b is of sequence b."""

    def convolved(self, parts: MixerParts, x: Tensor, silu: bool) -> Tensor:
        every = torch.cat([self.inputs(), x.float().unsqueeze(1)], 1)  # [B, K, C]
        self.keep_inputs(every[:, 1:])
        total = convolution(parts, every, 1).squeeze(1).to(x.dtype)
        return F.silu(total) if silu else total

    def heads(
        self, mixing: Mixing, parts: MixerParts, channels: Tensor, gates: Tensor
    ) -> Tensor:
        rows = head_rows(mixing, parts, channels.float(), gates)
        return with_skip(parts, rows, self.recur_once(rows, None, None))


class SomeTokens(_Slots):
    """A MixerMemory of any other step."""

    def convolved(self, parts: MixerParts, x: Tensor, silu: bool) -> Tensor:
        before = self.inputs()
        count, window, channels = before.shape
        tokens, inputs, newest = self.step.places.joined(window)
        every = before.new_empty(len(x) + count * window, channels)
        every.index_copy_(0, tokens, x.float())
        every.index_copy_(0, inputs, before.flatten(0, 1))
        self.keep_inputs(every.index_select(0, newest).unflatten(0, (count, window)))
        total = convolution(parts, every, len(every) - window)
        total = total.index_select(0, tokens - window).to(x.dtype)
        return F.silu(total) if silu else total

    def heads(
        self, mixing: Mixing, parts: MixerParts, channels: Tensor, gates: Tensor
    ) -> Tensor:
        places = self.step.places
        rows = head_rows(mixing, parts, channels.float(), gates)
        y = torch.empty_like(rows.v)
        if len(places.single):
            found = self.recur_once(rows, places.single, places.single_rows)
            y.index_copy_(0, places.single_rows, found)
        if len(places.longer):
            y.index_copy_(0, places.rows, self.in_chunks(rows))
        return with_skip(parts, rows, y)

    def in_chunks(self, rows: HeadRows) -> Tensor:
        """[n, H, dv]: what queries of the n tokens of longer sequences read."""
        places = self.step.places
        states = self.matrices(places.longer)
        outputs: list[Tensor] = []
        first = 0
        for widths in _pieces(places.widths):
            end = first + sum(widths)
            rows_of = places.chunk_rows[first * CHUNK : end * CHUNK]
            products = chunk_products(*self._cut(rows, rows_of))
            at = 0
            for width in widths:
                part = products.part(slice(at, at + width))
                read, states[:width] = part.run(states[:width])
                outputs.append(read)
                at += width
            first = end
        self.keep_matrices(states, places.longer)
        found = torch.cat(outputs).transpose(1, 2).flatten(0, 1)
        return found.index_select(0, places.taken)

    def _cut(
        self, rows: HeadRows, at: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Rows of chunks [N, H, CHUNK, ...], zeros where there is no token."""

        def cut(one: Tensor) -> Tensor:
            padded = torch.cat([one, one.new_zeros(1, *one.shape[1:])])
            found = padded.index_select(0, at).unflatten(0, (-1, CHUNK)).transpose(1, 2)
            each = self.mixing.heads // one.shape[1]
            return found.repeat_interleave(each, 1) if each > 1 else found

        strengths = None if rows.strengths is None else cut(rows.strengths)
        return cut(rows.q), cut(rows.k), cut(rows.v), cut(rows.decays), strengths


class KernelTokens(SomeTokens):
    """A MixerMemory of any step by Triton's kernels (state_kernels.py)."""

    @property
    def _slots(self) -> tuple[Tensor, Tensor]:
        return self.step.before, self.step.after

    def convolved(self, parts: MixerParts, x: Tensor, silu: bool) -> Tensor:
        from kvlathe.runtime.sessions.torch_cuda import state_kernels

        where = None
        if self.step.counts:
            where = self.step.places.sequence_of, self.step.places.firsts
        given = parts, x, self._inputs, self._slots, where, silu
        return state_kernels.convolve(*given)

    def heads(
        self, mixing: Mixing, parts: MixerParts, channels: Tensor, gates: Tensor
    ) -> Tensor:
        from kvlathe.runtime.sessions.torch_cuda import state_kernels

        size = (len(channels), mixing.heads, mixing.value_dim)
        y = channels.new_empty(size, dtype=torch.float32)
        given = mixing, parts, channels, gates, y, self._matrices, self._slots
        if not self.step.counts:
            state_kernels.head_step(*given, None)
            return y
        places = self.step.places
        if len(places.longer):
            rows = head_rows(mixing, parts, channels.float(), gates)
            self.by_kernel(rows, y)
            y = with_skip(parts, rows, y)
        if len(places.single):
            given = mixing, parts, channels, gates, y, self._matrices, self._slots
            state_kernels.head_step(*given, (places.single, places.single_rows))
        return y

    def by_kernel(self, rows: HeadRows, y: Tensor) -> None:
        """As ``in_chunks``, into the rows of ``y`` [T, H, dv]."""
        from kvlathe.runtime.sessions.torch_cuda import state_kernels

        places = self.step.places
        before, after = (one.index_select(0, places.longer) for one in self._slots)
        for piece in places.pieces:
            given = self.mixing, rows, y, self._matrices
            state_kernels.chunk_steps(*given, (before, after), piece)
            before = after

    def gated(
        self, mixing: Mixing, parts: MixerParts, y: Tensor, gate: Tensor
    ) -> Tensor:
        from kvlathe.runtime.sessions.torch_cuda import state_kernels

        return state_kernels.gate_norm(mixing, parts, y, gate)


@cache
def has_kernels() -> bool:
    """Whether Triton is here, which torch for GPUs brings, and compiles them. Warns
    where it does not."""
    if util.find_spec("triton") is None:
        obstacle = "Triton is missing"
    else:
        from kvlathe.runtime.sessions.torch_cuda import state_kernels

        obstacle = state_kernels.obstacle()
    if obstacle:
        log.warning(
            "Layers that keep a state run slower, by torch alone: %s.", obstacle
        )
    return not obstacle


def _pieces(widths: Sequence[int]) -> list[list[int]]:
    """Widths that together have AT_ONCE chunks at most, one at least."""
    pieces: list[list[int]] = []
    for width in widths:
        if pieces and sum(pieces[-1]) + width <= AT_ONCE:
            pieces[-1].append(width)
        else:
            pieces.append([width])
    return pieces


def _chosen(one: Tensor, places: Tensor | None) -> Tensor:
    return one if places is None else one.index_select(0, places)
