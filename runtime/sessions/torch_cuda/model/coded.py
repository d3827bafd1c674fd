"""Products with weights that are codes: e4m3 with a scale for each output, and 4 bits in
groups. What they are, by torch; rows.py has them by the native kernels.

Sizes: T rows, K inputs, N outputs, g inputs of a group, G groups of an output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.layers.coded_weight import CodedWeight, middle, unpack

FP8 = torch.float8_e4m3fn
MOST = torch.finfo(FP8).max
MULTIPLE = 16
"""Outputs are filled up to a multiple of it, and inputs of e4m3."""


@dataclass(frozen=True)
class CodeTable:
    """Maps beside each other, as products read them.

    ``codes``: e4m3 [N, K], or uint8 [N, K / 2], the first input in a byte's low bits.
    ``scales``: float32 [1, N] of e4m3, else float16 [G, N]. ``zeros``: uint8 [G, N], or
    None where all are 8. ``width``: the outputs without what fills them up.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    width: int

    @property
    def is_fp8(self) -> bool:
        return self.codes.is_floating_point()

    @property
    def bits(self) -> int:
        return 8 if self.is_fp8 else 4

    @property
    def inputs(self) -> int:
        return self.codes.shape[1] * 8 // self.bits

    @property
    def group(self) -> int:
        return self.inputs // len(self.scales)

    def widened(self, dtype: torch.dtype) -> Tensor:
        """The weights of 4 bits [N, K]."""
        groups = len(self.scales)
        codes = unpack(self.codes, 4)
        numbers = codes.unflatten(1, (groups, -1)).float()
        zeros = middle(4) if self.zeros is None else self.zeros.T.unsqueeze(-1)
        scales = self.scales.T.unsqueeze(-1)
        weights = (numbers - zeros) * scales.float()
        return weights.flatten(1).to(dtype)


Product = Callable[[Tensor, CodeTable, Tensor | None], Tensor]
"""x [T, K] and a table -> x W^T [T, N], or residual [T, N] with that added."""


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> codes [T, K] of e4m3, scales [T, 1] float32. Each row's largest number
    becomes the largest of e4m3."""
    largest = x.abs().amax(-1, keepdim=True).float()
    # Times 1 / 448: torch divides by it on CPUs, and multiplies like this on GPUs.
    scales = largest.clamp_min(torch.finfo(torch.float16).tiny) * (1 / MOST)
    codes = (x / scales).clamp_(-MOST, MOST).to(FP8)
    return codes, scales


def scaled_product(rows: tuple[Tensor, Tensor], table: CodeTable, x: Tensor) -> Tensor:
    """x W^T of ``rows`` that are e4m3, too, by torch."""
    codes, scales = rows
    return torch.ops.aten._scaled_mm(
        codes,
        table.codes.T,
        scale_a=scales,
        scale_b=table.scales,
        out_dtype=x.dtype,
    )


def coded_product(x: Tensor, table: CodeTable, residual: Tensor | None) -> Tensor:
    """A ``Product`` by torch alone."""
    if table.is_fp8:
        y = scaled_product(fp8_rows(x), table, x)
        return y if residual is None else residual.add_(y)
    y = F.linear(x, table.widened(x.dtype))
    return y if residual is None else residual.add_(y)


def code_table(weights: Sequence[CodedWeight]) -> CodeTable:
    """The maps ``weights`` beside each other."""
    width = sum(len(weight.codes) for weight in weights)
    missing = -width % MULTIPLE
    if weights[0].codes.is_floating_point():
        codes = torch.cat([weight.codes[:, 0] for weight in weights])
        columns = -codes.shape[1] % MULTIPLE
        codes = _filled(codes, columns, missing)
        scales = torch.cat([weight.scales for weight in weights])
        of_outputs = _filled(scales.T.float(), missing)
        return CodeTable(codes, of_outputs, None, width)
    codes = torch.cat([weight.codes.flatten(1) for weight in weights])
    codes = _filled(codes, 0, missing)
    scales = torch.cat([weight.scales for weight in weights])
    of_groups = _filled(scales.T, missing)
    if all(weight.zeros is None for weight in weights):
        return CodeTable(codes, of_groups, None, width)
    zeros = torch.cat([_zeros(weight) for weight in weights])
    return CodeTable(codes, of_groups, _filled(zeros.T, missing), width)


def _zeros(weight: CodedWeight) -> Tensor:
    """uint8 [N, G]"""
    zeros = weight.middles().squeeze(-1)
    return zeros.expand(weight.scales.shape).to(torch.uint8)


def _filled(codes: Tensor, columns: int, rows: int = 0) -> Tensor:
    """With so many more columns and rows of zeros."""
    if not (columns or rows):
        return codes.contiguous()
    size = (codes.shape[0] + rows, codes.shape[1] + columns)
    whole = codes.new_empty(size)
    whole.view(torch.uint8).zero_()
    whole[: codes.shape[0], : codes.shape[1]] = codes
    return whole


class CodedLinear:
    """y = x W (+ bias) of one or more maps beside each other."""

    def __init__(
        self,
        weights: Sequence[CodedWeight],
        bias: Tensor | None,
        product: Product = coded_product,
    ) -> None:
        self.table, self.product = code_table(weights), product
        self.bias = bias if bias is not None and bool(bias.any()) else None

    def __call__(self, x: Tensor) -> Tensor:
        y = self.product(self._padded(x), self.table, None)[:, : self.table.width]
        return y if self.bias is None else y + self.bias

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual += x W + bias."""
        if self.bias is not None or residual.shape[1] < len(self.table.codes):
            return residual.add_(self(x))
        return self.product(self._padded(x), self.table, residual)

    def begin(self, residual: Tensor, x: Tensor) -> Tensor:
        """``add_to``: codes are not spread over GPUs."""
        return self.add_to(residual, x)

    def _padded(self, x: Tensor) -> Tensor:
        """[T, K]; x itself where nothing is missing."""
        missing = self.table.inputs - x.shape[1]
        return F.pad(x, (0, missing)) if missing else x


def taken_code(tensors: dict[str, Tensor], role: str) -> CodedWeight | None:
    """The map ``role``, taken out of a layer's ``tensors``; None where it has floats."""
    codes = tensors.pop(f"{role}.codes", None)
    if codes is None:
        return None
    scales = tensors.pop(f"{role}.scales")
    zeros = tensors.pop(f"{role}.zeros", None)
    bits = 8 if codes.is_floating_point() else 4
    return CodedWeight(codes, scales, zeros, bits)
