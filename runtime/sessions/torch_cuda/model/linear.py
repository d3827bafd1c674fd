"""The linear maps of a decoder layer, of floats or of codes, each taken out of the
tensors by its role. Maps of one input are joined, so that they are one product."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kvlathe.runtime.sessions.torch_cuda.model.coded import (
    CodedLinear,
    Product,
    taken_code,
)
from kvlathe.runtime.sessions.torch_cuda.model.shard_group import ShardGroup


class LayerMap(Protocol):
    """A linear map of a layer, or several beside each other."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual += x W + bias."""
        ...

    def begin(self, residual: Tensor, x: Tensor) -> Tensor:
        """This shard's summand of ``add_to``."""
        ...


class Linear:
    """y = x @ weight (+ bias); biases of zeros are left out."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias if bias is not None and bool(bias.any()) else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return x @ self.weight
        return torch.addmm(self.bias, x, self.weight)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual += x @ weight + bias, by the product itself."""
        residual.addmm_(x, self.weight)
        return residual if self.bias is None else residual.add_(self.bias)

    def begin(self, residual: Tensor, x: Tensor) -> Tensor:
        """``add_to``: no other shard has a part of it."""
        return self.add_to(residual, x)


class SummedLinear(Linear):
    """A product of which every shard has a part: their sum. Shard 0 has the bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None, group: ShardGroup) -> None:
        super().__init__(weight, bias)
        self.group = group

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.sum(super().__call__(x))

    def begin(self, residual: Tensor, x: Tensor) -> Tensor:
        """This shard's summand of ``add_to``, into ``residual``: on shard 0 residual + x @
        weight + bias, on others x @ weight."""
        if self.group.shard:
            return torch.mm(x, self.weight, out=residual)
        return self.add_to(residual, x)


def has_map(tensors: dict[str, Tensor], role: str) -> bool:
    """Whether ``tensors`` have the linear map ``role``."""
    return f"{role}.weight" in tensors or f"{role}.codes" in tensors


def output_map(
    tensors: dict[str, Tensor], role: str, group: ShardGroup, product: Product
) -> SummedLinear | CodedLinear:
    """The linear map ``role``, whose outputs shards add up."""
    bias = tensors.pop(f"{role}.bias", None)
    coded = taken_code(tensors, role)
    if coded is not None:
        return CodedLinear([coded], bias, product)
    return SummedLinear(tensors.pop(f"{role}.weight"), bias, group)


def beside(
    tensors: dict[str, Tensor], roles: list[str], multiple: int, product: Product
) -> tuple[Linear | CodedLinear, list[int]]:
    """The linear maps ``roles`` as one, padded to a ``multiple`` of columns, and their
    widths; that of the padding comes last."""
    if f"{roles[0]}.codes" in tensors:
        return _codes_beside(tensors, roles, product)
    weights = [tensors.pop(f"{role}.weight") for role in roles]
    biases = [tensors.pop(f"{role}.bias", None) for role in roles]
    widths = [weight.shape[1] for weight in weights]
    pad = -sum(widths) % multiple
    first = weights[0]
    columns = [*weights, first.new_zeros(len(first), pad)]
    shifts = [
        first.new_zeros(width) if bias is None else bias
        for width, bias in zip(widths, biases, strict=True)
    ]
    shifts.append(first.new_zeros(pad))
    whole = Linear(torch.cat(columns, 1), torch.cat(shifts))
    return whole, [*widths, pad]


def _codes_beside(
    tensors: dict[str, Tensor], roles: list[str], product: Product
) -> tuple[CodedLinear, list[int]]:
    """The same of maps that are codes, whose product fills up its outputs itself."""
    coded = [taken_code(tensors, role) for role in roles]
    weights = [weight for weight in coded if weight is not None]
    biases = [tensors.pop(f"{role}.bias", None) for role in roles]
    widths = [len(weight.codes) for weight in weights]
    shifts = [
        weight.scales.new_zeros(width) if bias is None else bias
        for width, bias, weight in zip(widths, biases, weights, strict=True)
    ]
    return CodedLinear(weights, torch.cat(shifts), product), [*widths, 0]


class QkvMaps:
    """x [T, D] -> q, k, v, by one product. A layer may have queries alone."""

    def __init__(
        self, tensors: dict[str, Tensor], multiple: int, product: Product
    ) -> None:
        self.roles = [role for role in ("v", "q", "k") if has_map(tensors, role)]
        both = beside(tensors, self.roles, multiple, product)
        self.together: LayerMap = both[0]
        self.widths = both[1]

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        every = self.together(x).split_with_sizes(self.widths, -1)
        parts = dict(zip(self.roles, every, strict=False))
        # Values may be what keys are made of.
        k = parts.get("k", x)
        return parts["q"], k, parts.get("v", k)
