"""A step as tensors: what the decoder and attention read of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from kvlathe.runtime.sessions.gpu.step_buffer import Bindings, StepArrays, StepKind
from kvlathe.runtime.sessions.torch_cuda.device import tensor_of
from kvlathe.runtime.sessions.torch_cuda.states import StepStates


@dataclass(frozen=True, eq=False)
class Observed:
    """The observed rows of a step, int32 on the device: ``rows`` [T], ``starts`` [B + 1]
    of each sequence, and the ``positions`` [T] of all tokens. ``most``: of one sequence at
    most."""

    rows: Tensor
    starts: Tensor
    positions: Tensor
    most: int


@dataclass(frozen=True, eq=False)
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


@dataclass(frozen=True, eq=False)
class StepInputs:
    """A step as attention takes it. int32 on the device: ``cu_seqlens_q`` [B+1],
    ``lengths`` [B, S], ``page_tables`` S times [B, M_s].

    In a step of ``kind.decode`` sequence b has exactly row b, or none. ``observed``:
    where the plan ranks tokens. ``mass``: where somebody asks for it. ``copies_of`` int32
    [B] on the device: as of kvlathe_prompts (abi.h).
    """

    cu_seqlens_q: Tensor
    lengths: Tensor
    page_tables: Sequence[Tensor]
    kind: StepKind
    observed: Observed | None = None
    mass: Mass | None = None
    copies_of: Tensor | None = None


@dataclass(frozen=True, eq=False)
class TorchStep:
    """A step as the decoder takes it: ``input_ids`` and ``positions`` int32 [T],
    ``logit_rows`` int32 [R], what its ``attention`` reads, its ``states``, where layers
    keep some, and the ``adapters`` of its rows, int32 [T], where there are any."""

    input_ids: Tensor
    positions: Tensor
    logit_rows: Tensor
    attention: StepInputs
    states: StepStates | None = None
    adapters: Tensor | None = None

    @classmethod
    def of(cls, step: StepArrays, outputs: Bindings | None = None) -> TorchStep:
        """The same memory as tensors. Waits for the GPU where ``outputs`` ask for a
        ``mass``: the host has to know how much it reads."""
        arrays = {name: tensor_of(step.arrays[name]) for name in step.form.shapes}
        mass = None
        if outputs is not None and "mass" in outputs:
            mass = _mass(arrays, tensor_of(outputs["mass"]))
        observed = None
        if mass is None and "observed_rows" in arrays:
            observed = Observed(
                arrays["observed_rows"],
                arrays["observed_starts"],
                arrays["positions"],
                step.arrays["query_offsets"].shape[0],
            )
        attention = StepInputs(
            arrays["cu_seqlens_q"],
            arrays["lengths"],
            [arrays[f"page_table_{b}"] for b in range(arrays["lengths"].shape[1])],
            step.kind,
            observed,
            mass,
        )
        states = None
        if step.form.keeps:
            memory, counts = tensor_of(step.arrays["states"]), step.kind.counts
            states = StepStates.of(memory, arrays["state_slots"], counts)
        return cls(
            arrays["input_ids"],
            arrays["positions"],
            arrays["logit_rows"],
            attention,
            states,
            arrays.get("adapters"),
        )


def _mass(arrays: dict[str, Tensor], largest: Tensor) -> Mass:
    every = arrays["observed_rows"].long()  # [T]
    ends = arrays["observed_starts"].tolist()
    return Mass(
        largest,
        arrays["cu_seqlens_q"].tolist(),
        [every[first:end] for first, end in pairwise(ends)],
        arrays["lengths"].tolist(),
    )
