"""Queries that grow with their positions, so that long sequences do not flatten the
softmax (Ministral 3, Llama 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True)
class Temperature:
    """A query at position p is multiplied by 1 + beta log(1 + floor((p + first) /
    length)), in ``layers``; empty: in all."""

    beta: float
    length: float
    first: int = 0
    layers: tuple[int, ...] = ()


def query_factors(
    temperature: Temperature | None, positions: Tensor, layers: Sequence[int]
) -> list[Tensor | None]:
    """positions [T] -> [T, 1] float32 of each of the ``layers``; None where queries do
    not grow."""
    if temperature is None:
        return [None] * len(layers)
    steps = ((positions.float() + temperature.first) / temperature.length).floor()
    factors = (1 + temperature.beta * steps.log1p()).unsqueeze(-1)
    own = temperature.layers or layers
    return [factors if layer in own else None for layer in layers]
