"""FairQueue: whose turn it is. First come, first served within a tenant; tenants share by the tokens they ask for.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): a request starts, in virtual time, when the one before it of the
same tenant ends, or now if the tenant was idle; the earliest start goes first. So a tenant that sends a thousand
requests at once delays others by one request at most, and nobody waits for ever. With one tenant the order is that of
arrival.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from kvlathe.runtime.sequence import Sequence


class FairQueue:
    """Waiting sequences. Those that ran before and had to leave (``push_back``) go first, oldest first."""

    def __init__(self) -> None:
        self._clock = 0  # virtual time, in tokens
        self._ends: dict[bytes, int] = {}  # when each tenant's last request ends, in virtual time
        self._heap: list[tuple[int, int, Sequence]] = []  # start, number of arrival, sequence
        self._waiting: dict[Sequence, None] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._waiting

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._waiting))

    def push(self, sequence: Sequence) -> None:
        start = max(self._clock, self._ends.get(sequence.salt, 0))
        self._ends[sequence.salt] = start + sequence.most_tokens
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._insert(start, sequence)

    def push_back(self, sequence: Sequence) -> None:
        """Return a sequence that was popped: it comes before all that never were."""
        self._insert(-1, sequence)

    def peek(self) -> Sequence | None:
        """Who is next."""
        while self._heap and self._heap[0][2] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Sequence:
        sequence = self.peek()
        if sequence is None:
            raise IndexError("nobody waits")
        self._clock = max(self._clock, heapq.heappop(self._heap)[0])
        del self._waiting[sequence]
        if not self._waiting:
            self._ends.clear()  # everybody is idle: nobody is owed anything
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting sequence out, wherever it is."""
        del self._waiting[sequence]

    def _insert(self, start: int, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (start, sequence.arrival, sequence))
        self._waiting[sequence] = None
