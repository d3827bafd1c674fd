"""RowCosts: how much longer a step takes with more rows, learnt from steps that ran."""

from __future__ import annotations

import math

from kvlathe.runtime.scheduling.admission import Mean

FADES = 0.95
"""What a step counts beside the next one."""
FORGOTTEN = 0.99
"""What is left of it after a step without more rows: who stopped guessing because of a few
slow steps tries again."""
SUPPOSED = ((1, 0.3), (9, 0.9))
"""Before there is evidence: rows, and by which share of itself they prolong a step of
one."""
LARGEST = 4.0
"""Times the usual: a step that takes longer was held up by something else."""
STALE = 64
"""Steps with more rows, after which one without tells again what that takes."""


class RowCosts:
    """Of steps of decodes: ``sequences`` rows, and ``rows`` more."""

    def __init__(self) -> None:
        self._plain: dict[int, Mean] = {}
        self._sums = [0.0] * 5  # of weights, x, y, x x and x y; y is a share of a step
        self._since = 0

    def ran(self, rows: int, sequences: int, seconds: float) -> None:
        """A step took so long."""
        mean = self._plain.setdefault(sequences, Mean())
        if mean.count:
            usual = mean.value * self._longer(rows, sequences)
            seconds = min(seconds, LARGEST * usual)
        if not rows:
            self._since = 0
            self._sums = [value * FORGOTTEN for value in self._sums]
            mean.add(seconds)
            return
        self._since += 1
        if mean.count:
            self._add(rows * self._each(sequences), seconds / mean.value - 1)

    def times(self, rows: int, sequences: int) -> float:
        """How many times as long a step takes with ``rows`` more rows. Infinite where
        it had better be measured first how long one takes without."""
        mean = self._plain.get(sequences)
        if rows and (mean is None or not mean.count or self._since > STALE):
            return math.inf
        return self._longer(rows, sequences)

    def _longer(self, rows: int, sequences: int) -> float:
        if not rows:
            return 1.0
        first, slope = self._line()
        return 1 + max(0.0, first + slope * rows * self._each(sequences))

    def _each(self, sequences: int) -> float:
        """What a row counts: in a large step less."""
        return 8 / (7 + sequences)

    def _add(self, x: float, y: float) -> None:
        sums = [value * FADES for value in self._sums]
        for place, value in enumerate((1, x, y, x * x, x * y)):
            sums[place] += value
        self._sums = sums

    def _line(self) -> tuple[float, float]:
        """The line through what was seen and, lightly, what was supposed."""
        count, x, y, xx, xy = self._sums
        for supposed, share in SUPPOSED:
            count += 1
            x += supposed
            y += share
            xx += supposed * supposed
            xy += supposed * share
        slope = (count * xy - x * y) / (count * xx - x * x)
        slope = max(0.0, slope)
        return (y - slope * x) / count, slope
