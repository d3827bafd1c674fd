"""The weights of a decoder as an engine folder has them: decoder.json describes how its
layers are wired and where each tensor lies (export/model/weights_file.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvlathe.layers.wiring import Wiring

Cut = Callable[[str, Tensor], Tensor | None]
"""What is read of a tensor, by its name; None for nothing."""


def _read(folder: Path, index: str) -> dict[str, Any]:
    return json.loads((folder / index).read_text("utf-8"))


def read_decoder(
    folder: Path, index: str, device: str, cut: Cut | None = None
) -> tuple[Wiring, dict[str, Tensor]]:
    """What decoder.json (``index``) describes: the wiring, and the weights on
    ``device``, read one at a time, whole or as ``cut`` gives them."""
    raw = _read(folder, index)
    path = folder / raw["weights"]
    mapped = torch.from_file(
        str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8
    )

    def tensor(dtype: str, shape: list[int], offset: int) -> Tensor:
        kind = getattr(torch, dtype)
        size = kind.itemsize * torch.Size(shape).numel()
        return mapped[offset : offset + size].view(kind).view(shape)

    tensors: dict[str, Tensor] = {}
    for name, entry in raw["tensors"].items():
        whole = tensor(**entry)
        part = whole if cut is None else cut(name, whole)
        if part is not None:
            tensors[name] = part.contiguous().to(device, copy=True)
    return Wiring.from_json(raw["wiring"]), tensors


def decoder_shapes(folder: Path, index: str) -> dict[str, Tensor]:
    """The weights that decoder.json (``index``) describes, without their numbers."""
    shapes: dict[str, Tensor] = {}
    for name, entry in _read(folder, index)["tensors"].items():
        kind = getattr(torch, entry["dtype"])
        shapes[name] = torch.empty(entry["shape"], dtype=kind, device="meta")
    return shapes
