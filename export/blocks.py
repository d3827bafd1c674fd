"""The parts of a decoder layer that are not attention: linear maps, norms, tables, the angles of RoPE."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """y = x @ weight (+ bias); weight [in, out]. Biases start as zeros, weights as whatever the memory held."""

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=dtype), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight if self.bias is None else x @ self.weight + self.bias


class Norm(nn.Module):
    """RMS or layer norm over the last axis, in float32."""

    def __init__(self, kind: str, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind, self.eps = kind, eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False) if kind == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        if self.bias is not None:
            wide = F.layer_norm(wide, self.weight.shape, self.weight.float(), self.bias.float(), self.eps)
            return wide.to(x.dtype)
        wide = wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Table(nn.Module):
    """weight [rows, width]; picks rows."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width, dtype=dtype), requires_grad=False)

    def forward(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.weight)


class Rotator(nn.Module):
    """cos and sin of every position and plane, computed in float32 as transformers does."""

    inv_freq: Tensor
    amplitude: Tensor

    def __init__(self, planes: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(planes, dtype=torch.float32))
        self.register_buffer("amplitude", torch.empty(planes, dtype=torch.float32))

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos, sin [T, d/2]."""
        angles = positions.float().unsqueeze(-1) * self.inv_freq
        return (angles.cos() * self.amplitude).to(dtype), (angles.sin() * self.amplitude).to(dtype)
