"""vLLM's tables of blocks, as numbers on the host. No vLLM and no torch here.

Its newer runner writes them to the GPU alone. Whoever reads them there waits for the
step before. So what it writes is kept here too (watch.py), and a step is made while the
one before runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


class HostRows:
    """Rows of blocks, one for each place that a sequence may have; as many and as long
    as were written.

    >>> rows = HostRows()
    >>> rows.write(2, 0, [7, 8])
    >>> rows.write(2, 1, [9])
    >>> rows.of(np.array([2, 0])).tolist()
    [[7, 9, 0, 0], [0, 0, 0, 0]]
    """

    def __init__(self) -> None:
        self._blocks = np.zeros((1, 1), np.int32)

    def write(self, row: int, start: int, blocks: Sequence[int]) -> None:
        """From place ``start`` on."""
        end = start + len(blocks)
        height, width = self._blocks.shape
        if row >= height or end > width:
            larger = (max(height, 2 * row + 1), max(width, 2 * end))
            grown = np.zeros(larger, np.int32)
            grown[:height, :width] = self._blocks
            self._blocks = grown
        self._blocks[row, start:end] = blocks

    def of(self, places: npt.NDArray[np.integer]) -> Int32:
        """A copy of some rows, in the order of ``places``. A row that was never written
        has zeros."""
        self.write(int(places.max(initial=0)), 0, ())
        return self._blocks[places]


_step: dict[int, Int32] = {}
"""Address of a table on the GPU -> its rows in the step that is made."""


def note(tables: dict[int, Int32]) -> None:
    """A step begins; what was said of the one before is no more."""
    _step.clear()
    _step.update(tables)


def take(address: int, count: int, pages: int) -> Int32 | None:
    """The first ``pages`` blocks of ``count`` rows of a table in the step that is made,
    once; None where nobody said. Behind a sequence's own blocks are zeros, or those of
    one that had its row before: nobody reads them."""
    known = _step.pop(address, None)
    if known is None:
        return None
    blocks = np.zeros((count, pages), np.int32)
    known = known[:count, :pages]
    blocks[: known.shape[0], : known.shape[1]] = known
    return blocks
