"""StepTensors: what every layer of one step is given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from kvlathe.layers.mixers import Spans


@dataclass(frozen=True)
class StepTensors:
    """The inputs that every layer of one step shares: the op's inputs of the same
    names. ``cos``/``sin`` are None without RoPE.

    Without cached tokens (``lengths`` all 0) ``page_tables`` and ``pools`` may stay
    empty. ``observation_weights``: None where no row is observed. ``places``:
    of one sequence with nothing cached, the tokens [R], ascending, whose output is
    wanted; None: all. ``states`` [B, numbers] and ``spans``: what layers keep of each
    sequence, and where its tokens are; None where no layer keeps a state.
    """

    cos: Tensor | None
    sin: Tensor | None
    cu_seqlens_q: Tensor
    query_offsets: Tensor
    lengths: Tensor
    page_tables: list[Tensor] = field(default_factory=list)
    pools: dict[str, Tensor] = field(default_factory=dict)
    observation_weights: Tensor | None = None
    places: Tensor | None = None
    states: Tensor | None = None
    spans: Spans | None = None

    def still(self) -> StepTensors:
        """The same with angles that turn nothing."""
        assert self.cos is not None
        ones, zeros = torch.ones_like(self.cos), torch.zeros_like(self.cos)
        return replace(self, cos=ones, sin=zeros)


def sequences(step: StepTensors) -> Iterator[tuple[int, slice]]:
    """(sequence, its rows) of every sequence that has queries."""
    for b, (start, end) in enumerate(pairwise(step.cu_seqlens_q.tolist())):
        if start < end:
            yield b, slice(start, end)
