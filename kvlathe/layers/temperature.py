"""Queries that grow with their positions, so that long sequences do not flatten the
softmax (Ministral 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Temperature:
    """A query at position p is multiplied by 1 + beta log(1 + floor(p / length))."""

    beta: float
    length: float


def query_factors(temperature: Temperature, positions: Tensor) -> Tensor:
    """positions [T] -> [T, 1] float32."""
    steps = (positions.float() / temperature.length).floor()
    return (1 + temperature.beta * steps.log1p()).unsqueeze(-1)
