"""LayerAttention: what the kernels know of one layer's attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from kvlathe.plan.layer_table import layer_table
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import CudaLibrary, LayerForm


class Pool(Protocol):
    """The bytes of a device in which pages lie: a uint8 tensor, or a range of memory that
    no tensor holds."""

    @property
    def device(self) -> torch.device: ...

    def data_ptr(self) -> int: ...

    def numel(self) -> int: ...


@dataclass(frozen=True, eq=False)
class LayerAttention:
    """One layer. ``form``: its handle in the library, and the parts that it reads; that
    of its source, where it reads another's.
    ``layout`` int32: its layer table on the device. ``scale``: of q . k. ``sinks`` [H, G]
    float32: sink logits, where the model has some."""

    form: LayerForm
    layout: Tensor
    scale: float
    sinks: Tensor | None = None


def layers_of(
    library: CudaLibrary,
    plan: CompressionPlan,
    scales: Sequence[float],
    device: torch.device,
    sinks: Sequence[Tensor] = (),
) -> dict[int, LayerAttention]:
    """Every layer of a plan that has attention. ``sinks``: of each, or none."""
    layout = CacheLayout(plan)

    @cache
    def read(source: int) -> tuple[LayerForm, Tensor]:
        table = torch.from_numpy(layer_table(layout, source))
        return LayerForm(library, layout, source), table.to(device)

    return {
        layer: LayerAttention(
            *read(plan.model.source(layer)),
            scales[layer],
            sinks[layer] if sinks else None,
        )
        for layer in range(plan.model.layers)
        if plan.index.active(plan.model.source(layer))
    }


def workspace_bytes(
    library: CudaLibrary, layers: Iterable[LayerAttention], most_rows: int
) -> int:
    """Bytes that the attention of any of ``layers`` needs beside the pool, in steps of at
    most so many tokens."""
    return max(library.workspace_bytes(most_rows, x.form.heads) for x in layers)
