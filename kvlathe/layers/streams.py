"""Several hidden states of a token side by side (AltUp, arXiv 2301.13310; Gemma 3n). A
layer computes the first of these *streams*. It predicts all of them before, and corrects
them by what it gave.

Sizes: T packed tokens, N streams, D hidden size. Between layers streams are [T, N * D].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RowMap = Callable[[Tensor], Tensor]
HALF_POWER = 0.5**0.5
LEAST_SQUARE = 1e-5
"""The least mean square of a stream that is scaled."""


@dataclass(frozen=True)
class Streams:
    """Maps of one layer. ``norm``: of what ``router`` [T, D] -> [T, N] reads; ``predict``
    [T, N] -> [T, N * N], ``correct`` [T, N] -> [T, N]."""

    count: int
    norm: RowMap
    router: RowMap
    predict: RowMap
    correct: RowMap

    def predicted(self, wide: Tensor) -> Tensor:
        """wide [T, N * D] -> [T, N, D], of which the layer computes the first."""
        streams = wide.unflatten(-1, (self.count, -1))
        weights = self.predict(self._routed(streams[:, 0]))
        return streams + weights.unflatten(-1, (self.count, -1)) @ streams

    def corrected(self, predicted: Tensor, given: Tensor) -> Tensor:
        """predicted [T, N, D] and what the layer gave [T, D] -> [T, N, D]."""
        shares = self.correct(self._routed(given)) + 1
        news = given - predicted[:, 0]
        return predicted + shares.unsqueeze(-1) * news.unsqueeze(1)

    def ended(
        self, predicted: Tensor, x: Tensor, scale: Tensor | None, given: RowMap
    ) -> Tensor:
        """The layer's end: predicted [T, N, D] and what it gave, x [T, D] -> [T, N * D].
        ``given`` [T, D] -> [T, D] of the first stream, times ``scale`` [D] where there
        is one, is added to all others."""
        streams = self.corrected(predicted, x)
        first = streams[:, :1]
        read = first[:, 0] if scale is None else first[:, 0] * scale
        return torch.cat([first, streams[:, 1:] + given(read).unsqueeze(1)], 1).flatten(
            1
        )

    def _routed(self, x: Tensor) -> Tensor:
        return self.router(self.norm(x)).float().tanh().to(x.dtype)


def with_laurel(attended: Tensor, laurel: Tensor) -> Tensor:
    """The sum with what attention gave and that of maps beside it, [T, D] each, over
    sqrt(2) (LAuReL, arXiv 2411.07501)."""
    return (attended + laurel) * HALF_POWER


def widened(x: Tensor, maps: Sequence[RowMap]) -> Tensor:
    """x [T, D] -> streams [T, N * D]: itself, and N - 1 maps of it as long as it."""
    return torch.cat([x, *(_as_long(one(x), x) for one in maps)], -1)


def narrowed(wide: Tensor, maps: Sequence[RowMap]) -> Tensor:
    """wide [T, N * D] -> [T, D]: the mean of the first stream and of N - 1 maps of the
    others, as long as it."""
    first, *others = wide.chunk(len(maps) + 1, -1)
    pairs = zip(maps, others, strict=True)
    every = [first, *(_as_long(one(x), first) for one, x in pairs)]
    return torch.stack(every).mean(0)


def _as_long(x: Tensor, other: Tensor) -> Tensor:
    """x [T, D], scaled to the mean square of ``other`` [T, D]."""
    wanted, own = (one.float().square().mean(-1, keepdim=True) for one in (other, x))
    factors = wanted.sqrt() / own.clamp(min=LEAST_SQUARE).sqrt()
    return (x.float() * factors).to(x.dtype)
