"""RowCosts: how much longer a step takes with more rows, learnt from steps that ran."""

from __future__ import annotations

import math

from kvlathe.runtime.scheduling.admission import Mean

DECAY = 0.95  # weight of an observation relative to the next
IDLE_DECAY = 0.99  # the same over a step without more rows: guessing is tried again
PRIOR = ((1, 0.3), (9, 0.9))  # (extra rows, slowdown) before any measurement
MIN_PLAIN_STEPS = 3  # without more rows, before any has more: the first may be slow
MAX_SLOWDOWN = 4.0  # a step that takes longer was held up by something else
WARM_UP = 2  # steps with more rows that say nothing: what they need is loaded first
MAX_AGE = 64  # steps with more rows until one without is measured again


class RowCosts:
    """Times of steps of decodes: ``sequences`` rows, and ``rows`` more."""

    def __init__(self) -> None:
        self._plain: dict[int, Mean] = {}
        # Sums of weights, x, y, x x and x y, where x is rows and y the slowdown; by the
        # size of steps. Large ones may run otherwise: not in a CUDA graph, say.
        self._sums: dict[int, list[float]] = {}
        self._widest: dict[int, int] = {}  # most rows so far, by the size of steps
        self._ended = 0
        self._seen: dict[int, int] = {}  # sequences that had ended then
        self._since = self._tried = 0
        self._last: float | None = None  # x of the step before, if it had more rows

    def plain(self, sequences: int) -> float:
        """Seconds of a step without more rows; 0 where that is not known."""
        mean = self._plain.get(sequences)
        return mean.value if mean else 0.0

    def ended(self) -> None:
        """A sequence has ended, and those after it may be shorter."""
        self._ended += 1

    def _is_old(self, sequences: int) -> bool:
        """Whether half of a step's sequences have ended since such a step was seen."""
        since = self._ended - self._seen.get(sequences, self._ended)
        return 2 * since >= sequences

    def ran(self, rows: int, sequences: int, seconds: float) -> None:
        """A step took so long."""
        mean = self._plain.setdefault(sequences, Mean())
        if not rows:
            if self._is_old(sequences):
                mean.count = min(mean.count, 1)
            self._seen[sequences] = self._ended
        if mean.count:
            usual = mean.value * self.longer(rows, sequences)
            seconds = min(seconds, MAX_SLOWDOWN * usual)
        self._last = None
        if not rows:
            self._since = 0
            self._fade(sequences, IDLE_DECAY)
            mean.add(seconds)
            return
        self._since += 1
        self._tried += 1
        if mean.count and self._tried > WARM_UP:
            size = sequences.bit_length()
            self._widest[size] = max(rows, self._widest.get(size, 0))
            self._last = rows * self._each(sequences)
            self._add(sequences, self._last, seconds / mean.value - 1)

    def began_again(self, sequences: int, seconds: float) -> None:
        """A step without more rows, which the host could not prepare while the one
        before it ran. What that took longer is a price of the rows before it."""
        mean = self._plain.get(sequences)
        if self._last is not None and mean is not None and mean.count:
            longer = min(seconds / mean.value, MAX_SLOWDOWN) - 1
            longer = max(longer, 0.0)
            sums = self._fade(sequences, 1.0)
            sums[2] += longer
            sums[4] += self._last * longer
        self._last = None

    def times(self, rows: int, sequences: int) -> float:
        """The factor by which a step takes longer with ``rows`` more rows. Infinite
        where it had better be measured first how long one takes without."""
        mean = self._plain.get(sequences)
        if rows and (
            mean is None
            or mean.count < MIN_PLAIN_STEPS
            or self._since > MAX_AGE
            or self._is_old(sequences)
        ):
            return math.inf
        return self.longer(rows, sequences)

    def longer(self, rows: int, sequences: int) -> float:
        """As ``times``, as far as it is known."""
        if not rows:
            return 1.0
        first, slope = self._line(sequences)
        x = rows * self._each(sequences)
        return 1 + max(0.0, first + slope * x)

    def risk(self, rows: int, sequences: int) -> float:
        """The part of a step's time that ``rows`` more may cost: what is known, up to
        twice as many as were measured; beyond that each may be a step of its own."""
        if rows > 2 * self._widest.get(sequences.bit_length(), 0):
            return float(rows)
        return self.longer(rows, sequences) - 1

    def _each(self, sequences: int) -> float:
        """The weight of a row: in a large step less."""
        return 8 / (7 + sequences)

    def _fade(self, sequences: int, share: float) -> list[float]:
        """The sums for steps of about so many sequences, of which a share is left."""
        size = sequences.bit_length()
        self._sums[size] = [value * share for value in self._sums.get(size, [0.0] * 5)]
        return self._sums[size]

    def _add(self, sequences: int, x: float, y: float) -> None:
        sums = self._fade(sequences, DECAY)
        for place, value in enumerate((1, x, y, x * x, x * y)):
            sums[place] += value

    def _line(self, sequences: int) -> tuple[float, float]:
        """(first, slope) of the least-squares line through the observations and
        PRIOR."""
        count, x, y, xx, xy = self._fade(sequences, 1.0)
        for extra, slowdown in PRIOR:
            count += 1
            x += extra
            y += slowdown
            xx += extra * extra
            xy += extra * slowdown
        spread = count * xx - x * x
        slope = (count * xy - x * y) / spread
        slope = max(0.0, slope)
        return (y - slope * x) / count, slope
