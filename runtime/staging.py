"""Staging: a prompt on its way through the stages of a plan, which lose tokens in between (plan.Stage).

All chunks of a prompt pass one group of layers; then the rows that stay are gathered, and their chunks pass the next
group. What a scheduler must know: a prompt of n tokens has more than n rows to compute (``Sequence.next_tokens`` gives
them chunk by chunk), its K and V are cached once the last pass ends, and until then it holds the hidden states of a
pass on the host. A step may hold chunks of any stages beside decodes, which pass them all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvlathe.export.plan import CompressionPlan, Pass
from kvlathe.runtime.session import Int32

Rows = npt.NDArray[np.float32]


@dataclass(eq=False, slots=True)
class Staging:
    """A prompt of ``tokens`` tokens. ``positions``: places in the prompt of the rows of this pass; ``done`` of them are
    computed. ``source`` [rows, D]: what they enter it with, None at the first layer. ``rows``: rows that each layer has
    computed so far.
    """

    plan: CompressionPlan
    tokens: int
    chunk: int
    positions: Int32 = field(init=False)
    rows: list[int] = field(init=False)
    done: int = 0
    source: Rows | None = None
    _passes: list[Pass] = field(init=False)
    _hidden: list[Rows] = field(default_factory=list)
    _mass: npt.NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self._passes = list(self.plan.passes(self.tokens))
        self.positions = np.arange(self.tokens, dtype=np.int32)
        self._mass = np.zeros(self.tokens)
        self.rows = [0] * self.plan.model.layers

    @property
    def stages(self) -> range:
        """The stages of this pass."""
        return range(self._passes[0].first, self._passes[0].end)

    @property
    def last(self) -> bool:
        """Whether the prompt is cached once this pass ends."""
        return len(self._passes) == 1

    @property
    def left(self) -> int:
        """Rows of this pass to be computed."""
        return len(self.positions) - self.done

    def next_rows(self, most: int) -> int:
        """The next chunk: up to the pass's end or the grid, which counts the rows of a pass."""
        return min(self.left, self.chunk - self.done % self.chunk, most)

    def places(self, count: int) -> slice:
        return slice(self.done, self.done + count)

    def advance(self, count: int, hidden: Rows | None, mass: npt.NDArray[np.floating] | None) -> bool:
        """``count`` rows more are computed; whether that was the prompt's last.

        hidden [count, D] is what they leave the pass with; ``mass`` [rows so far] what they give each row in the pass's
        last layer, summed over its lanes.
        """
        for layer in (layer for stage in self.stages for layer in self.plan.layers_of(stage)):
            self.rows[layer] += count
        self.done += count
        if self.last:
            return not self.left
        assert hidden is not None and mass is not None
        self._hidden.append(hidden)
        self._mass[: self.done] += mass
        if not self.left:
            self._next()
        return False

    def _next(self) -> None:
        """Only the rows that stay enter the next pass."""
        assert self.plan.probe
        kept = survivors(self._mass, self._passes[1].tokens, self.plan.probe.last)
        self.source, self.positions = np.concatenate(self._hidden)[kept], self.positions[kept]
        self.done, self._mass, self._hidden = 0, np.zeros(len(kept)), []
        del self._passes[0]


def survivors(mass: npt.NDArray[np.float64], count: int, last: int) -> npt.NDArray[np.intp]:
    """Places [count], ascending: the ``last`` ones, and of the others those of most ``mass`` (of two, the earlier)."""
    ranked = mass.copy()
    ranked[len(mass) - min(last, count) :] = np.inf
    return np.sort(np.argsort(-ranked, kind="stable")[:count])
