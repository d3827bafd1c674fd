"""Products with weights that are codes, by what torch has: fp8 with a scale for each row
of both sides (torch._scaled_mm), and 4 bits in groups (torch._weight_int4pack_mm).

Both run on CPUs too, where their laws are tested. Sizes: T rows, K inputs, N outputs, g
inputs of a group, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlathe.layers.coded_weight import CodedWeight, middle, unpacked

ATEN = torch.ops.aten
FP8 = torch.float8_e4m3fn
MOST = torch.finfo(FP8).max
MULTIPLE = 16
"""Outputs of both products are multiples of it, and inputs of that in fp8."""
INNER_TILES = (8, 4, 2)
"""Of 16 inputs that the product in 4 bits takes at once."""
RowMap = Callable[[Tensor], Tensor]
Fp8Rows = Callable[[Tensor], tuple[Tensor, Tensor]]
"""x [T, K] -> codes [T, K], scales [T, 1] float32."""


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's largest number becomes the largest of e4m3."""
    largest = x.abs().amax(-1, keepdim=True).float()
    scales = largest.clamp_min(torch.finfo(torch.float16).tiny) / MOST
    codes = (x / scales).clamp_(-MOST, MOST).to(FP8)
    return codes, scales


def fp8_map(weights: Sequence[CodedWeight], rows: Fp8Rows = fp8_rows) -> RowMap:
    """x [T, K] -> [T, all N and what fills them up to a multiple of 16]."""
    codes = torch.cat([weight.codes[:, 0] for weight in weights])
    scales = torch.cat([weight.scales for weight in weights])
    codes = _filled(codes, MULTIPLE)
    scales = F.pad(scales, (0, 0, 0, len(codes) - len(scales)))
    missing = -codes.shape[1] % MULTIPLE
    codes = _wider(codes, missing).T
    of_outputs = scales.T.contiguous()

    def product(x: Tensor) -> Tensor:
        x_codes, of_rows = rows(_padded(x, missing))
        return ATEN._scaled_mm(
            x_codes, codes, scale_a=of_rows, scale_b=of_outputs, out_dtype=x.dtype
        )

    return product


def int4_map(weights: Sequence[CodedWeight]) -> RowMap:
    """x [T, K] -> [T, all N and what fills them up to a multiple of 16]. On a GPU the
    product is in bfloat16."""
    codes = torch.cat([unpacked(weight.codes, 4).flatten(1) for weight in weights])
    pairs = torch.cat([_scales_and_shifts(weight) for weight in weights])
    codes = _filled(codes, MULTIPLE)
    pairs = F.pad(pairs, (0, 0, 0, 0, 0, len(codes) - len(pairs)))
    inputs, groups = codes.shape[1], pairs.shape[1]
    tiles = next(tiles for tiles in INNER_TILES if inputs % (16 * tiles) == 0)
    of_groups = pairs.transpose(0, 1).contiguous()
    group = inputs // groups
    if codes.is_cuda:
        return _int4_on_a_gpu(codes, of_groups, group, tiles)
    packed = ATEN._convert_weight_to_int4pack_for_cpu(codes.int(), tiles)

    def product(x: Tensor) -> Tensor:
        whole = _padded(x, inputs - x.shape[1])
        own = of_groups.to(x.dtype)
        return ATEN._weight_int4pack_mm_for_cpu(whole, packed, group, own)

    return product


def _int4_on_a_gpu(codes: Tensor, of_groups: Tensor, group: int, tiles: int) -> RowMap:
    inputs = codes.shape[1]
    # The first code of a byte is in its high bits here.
    both = (codes[:, ::2] << 4) | codes[:, 1::2]
    packed = ATEN._convert_weight_to_int4pack(both.contiguous(), tiles)
    own = of_groups.bfloat16()

    def product(x: Tensor) -> Tensor:
        whole = _padded(x, inputs - x.shape[1]).bfloat16()
        y = ATEN._weight_int4pack_mm(whole, packed, group, own)
        return y.to(x.dtype)

    return product


def _scales_and_shifts(weight: CodedWeight) -> Tensor:
    """[N, G, 2]: a weight is (code - 8) * scale + shift."""
    scales = weight.scales.float()
    zeros = weight.middles().squeeze(-1)
    shifts = (middle(weight.bits) - zeros) * scales
    return torch.stack([scales, shifts.expand_as(scales)], -1)


def _padded(x: Tensor, missing: int) -> Tensor:
    """[T, K + missing]; x itself where nothing is missing."""
    return F.pad(x, (0, missing)) if missing else x


def _filled(codes: Tensor, multiple: int) -> Tensor:
    """With as many rows of codes of 0 as are missing."""
    missing = -len(codes) % multiple
    empty = torch.zeros(missing, codes.shape[1], device=codes.device)
    return torch.cat([codes, empty.to(codes.dtype)]) if missing else codes


def _wider(codes: Tensor, missing: int) -> Tensor:
    """fp8 [N, K] -> [N, K + missing]."""
    empty = torch.zeros(len(codes), missing, device=codes.device)
    return torch.cat([codes, empty.to(codes.dtype)], 1) if missing else codes


class CodedLinear:
    """y = x W (+ bias) of one or more maps beside each other; ``width``: the outputs
    without what fills them up."""

    def __init__(
        self, weights: Sequence[CodedWeight], bias: Tensor | None, rows: Fp8Rows
    ) -> None:
        is_float = weights[0].codes.is_floating_point()
        self.map = fp8_map(weights, rows) if is_float else int4_map(weights)
        self.width = sum(len(weight.codes) for weight in weights)
        self.bias = bias if bias is not None and bool(bias.any()) else None

    def __call__(self, x: Tensor) -> Tensor:
        y = self.map(x)[:, : self.width]
        return y if self.bias is None else y + self.bias

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual += x W + bias."""
        return residual.add_(self(x))

    def begin(self, residual: Tensor, x: Tensor) -> Tensor:
        """``add_to``: codes are not spread over GPUs."""
        return self.add_to(residual, x)


def taken_code(tensors: dict[str, Tensor], role: str) -> CodedWeight | None:
    """The map ``role``, taken out of a layer's ``tensors``; None where it has floats."""
    codes = tensors.pop(f"{role}.codes", None)
    if codes is None:
        return None
    scales = tensors.pop(f"{role}.scales")
    zeros = tensors.pop(f"{role}.zeros", None)
    bits = 8 if codes.is_floating_point() else 4
    return CodedWeight(codes, scales, zeros, bits)
