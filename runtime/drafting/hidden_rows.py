"""Hidden rows: what a model's head read at the newest places of each sequence, for a layer
that guesses tokens from it.

A row is a part of its step's array, and keeps all of that. So the oldest steps are
forgotten where arrays have more rows than MOST for each sequence that may run: however
long others wait, no more is kept.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvlathe.plan.manifest import Limits
from kvlathe.plan.memory import HOST_BYTES
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.scheduling.sequence import Chunk, Sequence
from kvlathe.runtime.scheduling.step import Step
from kvlathe.runtime.sessions.protocols import HiddenRow

MOST = 32
"""Places of a sequence that are remembered."""


def hidden_bytes(plan: CompressionPlan, limits: Limits) -> int:
    """Bytes of all rows that are remembered, at most: float32 on a CPU, and half of it
    on a GPU. 256 sequences of an 8B model have 128 MB."""
    return MOST * limits.max_batch_size * plan.model.hidden_size * HOST_BYTES


@dataclass(slots=True)
class Trail:
    """Rows of a sequence's places from ``first`` on, without a gap."""

    first: int = 0
    rows: list[HiddenRow] = field(default_factory=list[HiddenRow])
    steps: list[int] = field(default_factory=list[int])  # numbers of their steps

    @property
    def end(self) -> int:
        return self.first + len(self.rows)

    def add(self, place: int, row: HiddenRow, step: int = 0) -> None:
        """A place that was there before is computed again, and so are those behind it.
        Where places are left out, those before them are forgotten."""
        if self.first <= place <= self.end:
            del self.rows[place - self.first :], self.steps[place - self.first :]
        else:
            self.first, self.rows, self.steps = place, [], []
        self.rows.append(row)
        self.steps.append(step)
        if len(self.rows) > MOST:
            self._drop()

    def forget(self, step: int) -> None:
        """The rows of a step and those before it."""
        while self.steps and self.steps[0] <= step:
            self._drop()

    def _drop(self) -> None:
        del self.rows[0], self.steps[0]
        self.first += 1

    def of(self, place: int, count: int) -> list[HiddenRow]:
        """Those of ``count`` places, all of which are there."""
        start = place - self.first
        return self.rows[start : start + count]


class HiddenRows:
    """The trails of all sequences that grow, out of arrays of ``most`` rows together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._trails: dict[Sequence, Trail] = {}
        self._sizes = deque[int]()  # rows of the arrays of the newest steps
        self._held = self._steps = 0  # all rows of those, and steps until now

    def begins(self, step: Step) -> None:
        """WatchingDrafter.begins."""
        step.context.session.keep_hidden()

    def watch(self, step: Step) -> None:
        """WatchingDrafter.watch."""
        growing = set(step.growing)
        if not growing:
            return
        hidden = step.context.session.hidden()
        self._steps += 1
        row = 0
        for chunk in step.chunks:
            if chunk in growing:
                trail = self._trails.setdefault(chunk.sequence, Trail())
                for at in _staying(chunk):
                    place = chunk.sequence.cached + chunk.wanted[at]
                    trail.add(place, (hidden, row + at), self._steps)
            row += len(chunk.wanted)
        self._sizes.append(row)
        self._held += row
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Whole steps, as far as their arrays are too many. The newest one stays."""
        while len(self._sizes) > 1 and self._held > self._most:
            self._held -= self._sizes.popleft()
            for trail in self._trails.values():
                trail.forget(self._steps - len(self._sizes))

    def of(self, sequence: Sequence) -> Trail | None:
        """Its trail, where it leads up to its newest token and is not empty."""
        trail, newest = self._trails.get(sequence), len(sequence.tokens) - 1
        ready = trail is not None and trail.first < newest <= trail.end
        return trail if ready else None

    def forget(self, sequence: Sequence) -> None:
        self._trails.pop(sequence, None)


def _staying(chunk: Chunk) -> range:
    """The newest of a chunk's rows of logits whose tokens stay."""
    stay = len(chunk.choices) if chunk.drafts else len(chunk.wanted)
    return range(max(0, stay - MOST), stay)
