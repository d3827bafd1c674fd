"""Queries that grow with their positions, so that long sequences do not flatten the
softmax (Llama 4, Ministral 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Temperature:
    """A query at position p is multiplied by 1 + beta log(1 + floor((p + first) /
    length)). ``layers``: the layers in which it is; empty where it is in all."""

    beta: float
    length: float
    first: int = 0
    layers: tuple[int, ...] = ()

    def of(self, layer: int, factors: Tensor) -> Tensor | None:
        """``factors`` as a layer takes them."""
        return factors if not self.layers or layer in self.layers else None


def query_factors(temperature: Temperature, positions: Tensor) -> Tensor:
    """positions [T] -> [T, 1] float32."""
    steps = ((positions.float() + temperature.first) / temperature.length).floor()
    return (1 + temperature.beta * steps.log1p()).unsqueeze(-1)
