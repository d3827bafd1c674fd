"""FairQueue: whose turn it is. First come, first served within a tenant; tenants share
by the tokens they ask for.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): a request starts, in virtual
time, when the one before it of the same tenant ends, or when it came if the tenant was
idle; the earliest start goes first. So a tenant that sends a thousand requests at once
delays others by one request at most, and nobody waits for ever. Requests that leave the
queue unserved cost their tenant nothing. With one tenant the order is that of arrival.

A tenant may give its own requests priorities: the lowest goes first, and delays the
others of that tenant alone.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterator

from kvlathe.runtime.scheduling.sequence import Sequence


class FairQueue:
    """Waiting sequences. Those that ran before and had to leave (``push_back``) go
    first, oldest first. ``entered``: everybody who waits, and the virtual time at which
    each came."""

    def __init__(self) -> None:
        # Virtual time, in tokens.
        self._clock = 0
        # When each tenant's last turn ends, in virtual time.
        self._ends: dict[bytes, int] = {}
        self.entered: dict[Sequence, int] = {}
        # Lines of each tenant by priority, none of them empty.
        self._lines: dict[bytes, dict[int, OrderedDict[Sequence, None]]] = {}
        # Those that ran before, oldest first.
        self._back: list[Sequence] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self.entered)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self.entered

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self.entered))

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence that has not run yet."""
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self.entered[sequence] = self._clock
        lines = self._lines.setdefault(sequence.salt, {})
        lines.setdefault(sequence.priority, OrderedDict())[sequence] = None

    def push_back(self, sequence: Sequence) -> None:
        """Return a sequence that was popped: it comes before all that never were."""
        self.entered[sequence] = self._clock
        bisect.insort(self._back, sequence, key=lambda s: s.arrival)

    def peek(self) -> Sequence | None:
        """The sequence that is next."""
        if self._back:
            return self._back[0]
        heads = (next(iter(lines[min(lines)])) for lines in self._lines.values())
        return min(heads, key=lambda s: (self._start(s), s.arrival), default=None)

    def pop(self) -> Sequence:
        """Take out who is next. Raises IndexError if nobody waits."""
        sequence = self.peek()
        if sequence is None:
            raise IndexError("nobody waits")
        if not self._back:
            start = self._start(sequence)
            self._clock = max(self._clock, start)
            self._ends[sequence.salt] = start + sequence.most_tokens
        self.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting sequence out, wherever it is."""
        del self.entered[sequence]
        if sequence in self._back:
            self._back.remove(sequence)
        else:
            lines = self._lines[sequence.salt]
            line = lines[sequence.priority]
            del line[sequence]
            if not line:
                del lines[sequence.priority]
            if not lines:
                del self._lines[sequence.salt]
        if not self.entered:
            self._ends.clear()  # everybody is idle: nobody is owed anything

    def _start(self, head: Sequence) -> int:
        """The start of the first in a tenant's line, in virtual time."""
        return max(self.entered[head], self._ends.get(head.salt, 0))
