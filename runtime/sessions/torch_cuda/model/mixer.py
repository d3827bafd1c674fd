"""The maps of a layer that keeps a state, out of a decoder's tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlathe.layers.mixers import MixerParts
from kvlathe.runtime.sessions.torch_cuda.model.coded import Product
from kvlathe.runtime.sessions.torch_cuda.model.linear import Linear, beside


def mixer_parts(tensors: dict[str, Tensor], product: Product) -> MixerParts | None:
    """Take them out of a layer's tensors of its mixer (export/model/mixer_tensors.py);
    None where it has none."""
    if not tensors:
        return None
    taps: list[Tensor] = []
    while (name := f"taps.{len(taps)}") in tensors:
        taps.append(tensors.pop(name))
    gates = tensors.get("gates.weight")
    return MixerParts(
        project=beside(tensors, ["project"], 1, product)[0],
        out=beside(tensors, ["out"], 1, product)[0],
        taps=torch.stack(taps).unbind(0),  # rows of one matrix, as kernels read them
        conv_bias=tensors.get("conv_bias"),
        gates=None if gates is None else Linear(gates, tensors.get("gates.bias")),
        decay=tensors.get("decay"),
        step_bias=tensors.get("step_bias"),
        skip=tensors.get("skip"),
        norm=tensors.get("norm"),
    )
