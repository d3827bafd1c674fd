"""The inputs of one node kvlathe::Attend, as ONNX Runtime and TensorRT give them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvlathe.export.attention.node import node_inputs
from kvlathe.export.attention.tables import LayerTables
from tests.native.step16 import Step16

GIVEN = ("q", "k", "v", "cos", "sin", "cu_seqlens_q", "query_offsets", "lengths")


def inputs_of(step: Step16, memory: Tensor) -> dict[str, Tensor]:
    """By name, in the op's order, where ``memory`` lies: uint8, the cache.

    Plugins take no unsigned bytes, so the view of bytes is signed.
    """
    case, unit = step.case, step.plan.index.unit
    whole = memory[: len(memory) // (2 * unit) * (2 * unit)]
    values = {name: getattr(step, name) for name in GIVEN}
    for s, table in enumerate(step.tables):
        values[f"page_table_{s}"] = torch.from_numpy(table)
    values |= step.state
    for name, x in LayerTables(step.plan, case.layer).items():
        values[name] = torch.from_numpy(np.ascontiguousarray(x))
    values["pool_f16"] = whole.view(torch.float16).view(-1, unit)
    values["pool_u8"] = whole.view(torch.int8).view(-1, unit)
    found: dict[str, Tensor] = {}
    for name in node_inputs(step.plan, case.layer):
        found[name] = values[name].contiguous().to(memory.device)
    return found
