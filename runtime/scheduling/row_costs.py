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
LEAST = 3
"""Steps without more rows that are measured before any has more: the first may hold
what happens once."""
LARGEST = 4.0
"""Times the usual: a step that takes longer was held up by something else."""
STALE = 64
"""Steps with more rows, after which one without tells again what that takes."""


class RowCosts:
    """Of steps of decodes: ``sequences`` rows, and ``rows`` more."""

    def __init__(self) -> None:
        self._plain: dict[int, Mean] = {}
        # Of weights, x, y, x x and x y, where y is a share of a step; by the size of
        # steps. Large ones may run otherwise: not in a CUDA graph, say.
        self._sums: dict[int, list[float]] = {}
        self._since = 0
        self._last: float | None = None  # x of the step before, if it had more rows

    def ran(self, rows: int, sequences: int, seconds: float) -> None:
        """A step took so long."""
        mean = self._plain.setdefault(sequences, Mean())
        if mean.count:
            usual = mean.value * self._longer(rows, sequences)
            seconds = min(seconds, LARGEST * usual)
        self._last = None
        if not rows:
            self._since = 0
            self._fade(sequences, FORGOTTEN)
            mean.add(seconds)
            return
        self._since += 1
        if mean.count:
            self._last = rows * self._each(sequences)
            self._add(sequences, self._last, seconds / mean.value - 1)

    def began_again(self, sequences: int, seconds: float) -> None:
        """A step without more rows, which the host could not prepare while the one before
        it ran. What that took longer is a price of the rows before it."""
        mean = self._plain.get(sequences)
        if self._last is not None and mean is not None and mean.count:
            times = seconds / mean.value
            longer = min(times, LARGEST) - 1
            longer = max(longer, 0.0)
            sums = self._fade(sequences, 1.0)
            sums[2] += longer
            sums[4] += self._last * longer
        self._last = None

    def times(self, rows: int, sequences: int) -> float:
        """How many times as long a step takes with ``rows`` more rows. Infinite where
        it had better be measured first how long one takes without."""
        mean = self._plain.get(sequences)
        if rows and (mean is None or mean.count < LEAST or self._since > STALE):
            return math.inf
        return self._longer(rows, sequences)

    def _longer(self, rows: int, sequences: int) -> float:
        if not rows:
            return 1.0
        first, slope = self._line(sequences)
        x = rows * self._each(sequences)
        return 1 + max(0.0, first + slope * x)

    def _each(self, sequences: int) -> float:
        """What a row counts: in a large step less."""
        return 8 / (7 + sequences)

    def _fade(self, sequences: int, share: float) -> list[float]:
        """The sums for steps of about so many sequences, of which a share is left."""
        size = sequences.bit_length()
        sums = self._sums.get(size, [0.0] * 5)
        self._sums[size] = [value * share for value in sums]
        return self._sums[size]

    def _add(self, sequences: int, x: float, y: float) -> None:
        sums = self._fade(sequences, FADES)
        for place, value in enumerate((1, x, y, x * x, x * y)):
            sums[place] += value

    def _line(self, sequences: int) -> tuple[float, float]:
        """The line through what was seen and, lightly, what was supposed."""
        count, x, y, xx, xy = self._fade(sequences, 1.0)
        for supposed, share in SUPPOSED:
            count += 1
            x += supposed
            y += share
            xx += supposed * supposed
            xy += supposed * share
        spread = count * xx - x * x
        slope = (count * xy - x * y) / spread
        slope = max(0.0, slope)
        first = (y - slope * x) / count
        return first, slope
