"""Laws of products with weights that are codes, wherever they are computed."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvlathe.layers.coded_weight import CodedWeight
from kvlathe.runtime.sessions.torch_cuda.model.coded import (
    CodedLinear,
    CodeTable,
    code_table,
)
from kvlathe.runtime.sessions.torch_cuda.model.rows import NativeRows

HALF = 2.0**-11
LEAST = 2.0**-24
"""The halves closest to 0 are so far apart."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of maps beside each other: ``group`` 0 for e4m3."""

    inputs: int
    outputs: tuple[int, ...]
    group: int
    zeros: bool = False


def any_codes(shape: Shape, device: str) -> list[CodedWeight]:
    """Every code there is but e4m3's two that are no numbers."""
    form = _nibbles if shape.group else _e4m3
    return [form(shape, outputs, device) for outputs in shape.outputs]


def _e4m3(shape: Shape, outputs: int, device: str) -> CodedWeight:
    size = (outputs, 1, shape.inputs)
    codes = torch.randint(0, 254, size, device=device)
    codes[codes > 126] += 1
    numbers = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.rand(outputs, 1, device=device) / 448
    return CodedWeight(numbers, scales.half(), None, 8)


def _nibbles(shape: Shape, outputs: int, device: str) -> CodedWeight:
    groups = shape.inputs // shape.group
    size = (outputs, groups, shape.group // 2)
    codes = torch.randint(0, 256, size, device=device)
    scales = torch.rand(outputs, groups, device=device) / 8
    stored = (outputs, (groups + 1) // 2)
    zeros = torch.randint(0, 256, stored, device=device)
    own = zeros.to(torch.uint8) if shape.zeros else None
    return CodedWeight(codes.to(torch.uint8), scales.half(), own, 4)


def matrix(weights: list[CodedWeight], inputs: int) -> Tensor:
    """[N, K] float64"""
    rows = [weight.matrix(inputs).double() for weight in weights]
    return torch.cat(rows)


def products_are_those_of_the_numbers(
    rows: NativeRows, shape: Shape, tokens: int, device: str
) -> None:
    """Within one rounding of the answer, one of each weight of 4 bits, and sums in
    float32; and a residual is added before the answer is rounded."""
    weights = any_codes(shape, device)
    numbers = matrix(weights, shape.inputs)
    wide = torch.randn(tokens, shape.inputs + 8, device=device).half()
    x = wide[:, : shape.inputs]
    linear = CodedLinear(weights, None, rows.product)
    exact = x.double() @ numbers.T
    size = x.double().abs() @ numbers.abs().T
    of_weights = HALF if shape.group else 0
    sums = size * (1e-5 + of_weights) + LEAST
    error = (linear(x) - exact).abs()
    assert (error <= exact.abs() * HALF + sums).all()
    residual = torch.randn(exact.shape, device=device).half()
    whole = exact + residual
    error = (linear.add_to(residual, x) - whole).abs()
    rounding = whole.abs()
    if len(linear.table.codes) > linear.table.width:  # rounded before it is added, too
        rounding += exact.abs()
    assert (error <= rounding * HALF * 1.01 + sums).all()


def many_rows_multiply_the_same_weights(
    rows: NativeRows, shape: Shape, tokens: int, device: str
) -> None:
    """Codes of 4 bits that become halves, a slice of outputs at a time."""
    weights = any_codes(shape, device)
    table = code_table(weights)
    x = torch.randn(tokens, shape.inputs, device=device).half()
    numbers = matrix(weights, shape.inputs)
    found = rows.product(x, table, None)[:, : table.width]
    exact = x.double() @ numbers.T
    size = x.double().abs() @ numbers.abs().T
    error = (found - exact).abs()
    bound = exact.abs() * HALF + size * 2 * HALF
    assert (error <= bound + LEAST).all()


def identity_reads_every_weight(rows: NativeRows, table: CodeTable) -> None:
    """The identity times codes of 4 bits is the weights, each rounded once."""
    eye = torch.eye(table.inputs, device=table.codes.device).half()
    found = rows.product(eye, table, None)
    assert torch.equal(found.T, table.widened(torch.float16))
