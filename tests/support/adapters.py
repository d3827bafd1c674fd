"""LoRA adapters of tiny models, written as PEFT writes them, and the same models with
the sum put in by hand."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

RANK = 4
Deltas = Mapping[str, Tensor]
"""B @ A [out, in] by name of the module, unscaled."""


def maps_of(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of every map in the layers of a transformers model."""
    found: dict[str, tuple[int, int]] = {}
    for name, module in model.named_modules():
        is_map = isinstance(module, torch.nn.Linear | Conv1D)
        if not is_map or name == "lm_head" or "vision" in name:
            continue
        shape = tuple(module.weight.shape)
        turned = isinstance(module, Conv1D)
        found[name] = (shape[0], shape[1]) if turned else (shape[1], shape[0])
    return found


def write_adapter(
    folder: Path | None,
    model: torch.nn.Module,
    seed: int = 0,
    rank_of: Callable[[str], int] = lambda _: RANK,
    **config: Any,  # noqa: ANN401
) -> Deltas:
    """Random matrices for every map, beside ``config``; without a folder, what they
    would be."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    deltas: dict[str, Tensor] = {}
    for module, (inputs, outputs) in maps_of(model).items():
        rank = rank_of(module)
        a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        b = torch.randn(outputs, rank, generator=generator) / rank**0.5
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
        deltas[module] = b.double() @ a.double()
    if folder is None:
        return deltas
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    ends = sorted({module.rsplit(".", 1)[-1] for module in deltas})
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2, "target_modules": ends}
    said |= {"bias": "none", "fan_in_fan_out": False}
    (folder / "adapter_config.json").write_text(json.dumps(said | config))
    return deltas


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Write an adapter's tensors again, changed."""
    path = folder / "adapter_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def with_sum(
    model: torch.nn.Module, deltas: Deltas, scale_of: Callable[[str], float]
) -> torch.nn.Module:
    """A copy of a transformers model whose maps are W + scale * B @ A."""
    merged = copy.deepcopy(model)
    for name, module in merged.named_modules():
        if name in deltas:
            assert isinstance(module, torch.nn.Linear | Conv1D)
            delta = scale_of(name) * deltas[name]
            turned = delta.T if isinstance(module, Conv1D) else delta
            weight = module.weight.detach().double() + turned
            module.weight = torch.nn.Parameter(weight.float())
    return merged
