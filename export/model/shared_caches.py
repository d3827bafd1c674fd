"""SharedCaches: gradients of scores by keys and values that several layers read, where
layers are run one at a time, the last one first.

A reader's gradients by them are added up until the layer comes that makes them: its own
gradients begin at these sums, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvlathe.layers.beside import Beside
from kvlathe.plan.heads import ModelShape


class SharedCaches:
    """Caches of one sequence. ``given`` has the keys and values of every layer that others
    read."""

    def __init__(self, shape: ModelShape, given: Beside) -> None:
        self._shape, self._given = shape, given
        self._sums: dict[tuple[int, int], list[Tensor]] = {}
        for layer, (k, v) in given.shared.items():
            leaves = k.clone().requires_grad_(), v.clone().requires_grad_()
            given.shared[layer] = leaves

    def read(self, layer: int) -> list[Tensor]:
        """Keys and values of another layer that a layer reads; none where it has its
        own."""
        source = self._shape.source(layer)
        return [] if source == layer else [*self._given.shared[source]]

    def made(self, layer: int) -> list[Tensor]:
        """Keys and values that a layer, which has just run, makes for others."""
        return [*self._given.shared[layer]] if self._is_read(layer) else []

    def add(self, layer: int, score: int, found: Sequence[Tensor]) -> None:
        """Add the gradients ``found`` of a score by what ``layer`` reads."""
        if not found:
            return
        at = self._shape.source(layer), score
        known = self._sums.get(at)
        own = [*found]
        if known is not None:
            own = [a + b for a, b in zip(known, found, strict=True)]
        self._sums[at] = own

    def slopes(self, layer: int, score: int) -> list[Tensor]:
        """The sums of a score by what ``layer`` makes for others."""
        return self._sums.pop((layer, score)) if self._is_read(layer) else []

    def _is_read(self, layer: int) -> bool:
        return self._shape.readers(layer) > 1
