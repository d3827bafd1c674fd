"""Beside: what layers are given beside hidden states: keys and values of layers whose
cache others read, and embeddings of tokens for each layer (Gemma 3n, Gemma 4).

Sizes: T packed tokens, L layers, P dims of a layer's embedding, R some of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

KeysAndValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Beside:
    """``inputs`` [T, L, P]: embeddings for each layer; None where there are none.
    ``shared``: keys and values, as Attend takes them, of each layer that others read."""

    inputs: Tensor | None = None
    shared: dict[int, KeysAndValues] = field(default_factory=dict)

    def cut(self, tokens: int) -> Beside:
        """That of the first ``tokens`` tokens."""
        inputs = None if self.inputs is None else self.inputs[:tokens]
        return Beside(
            inputs, {i: (k[:tokens], v[:tokens]) for i, (k, v) in self.shared.items()}
        )


def in_table(ids: Tensor, rows: int, words: int) -> Tensor:
    """Token ids [T] of ``words`` -> rows of a table that may have fewer, the last words'
    being the first."""
    return ids if rows >= words else torch.where(ids < rows, ids, 0)


def layer_inputs(
    rows: Tensor, projected: Tensor, norm: Callable[[Tensor], Tensor], layers: int
) -> Tensor:
    """rows and projected [T, L * P], of tokens and of what the first layer reads ->
    [T, L, P]."""
    shape = (layers, -1)
    return norm(projected.unflatten(-1, shape)) + rows.unflatten(-1, shape)
