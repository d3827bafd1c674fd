"""Hidden rows: what a model's head read at the newest places of each sequence, for a layer
that guesses tokens from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvlathe.runtime.scheduling.sequence import Chunk, Sequence
from kvlathe.runtime.scheduling.step import Step
from kvlathe.runtime.sessions.protocols import HiddenRow

MOST = 32
"""Places of a sequence that are remembered. A row of an 8B model has 8 KB in 16 bit, so 256
sequences keep 64 MB that no account has."""


@dataclass(slots=True)
class Trail:
    """Rows of a sequence's places from ``first`` on, without a gap."""

    first: int = 0
    rows: list[HiddenRow] = field(default_factory=list[HiddenRow])

    @property
    def end(self) -> int:
        return self.first + len(self.rows)

    def add(self, place: int, row: HiddenRow) -> None:
        """A place that was there before is computed again, and so are those behind it.
        Where places are left out, those before them are forgotten."""
        if self.first <= place <= self.end:
            del self.rows[place - self.first :]
        else:
            self.first, self.rows = place, []
        self.rows.append(row)
        if len(self.rows) > MOST:
            del self.rows[0]
            self.first += 1

    def of(self, place: int, count: int) -> list[HiddenRow]:
        """Those of ``count`` places, all of which are there."""
        start = place - self.first
        return self.rows[start : start + count]


class HiddenRows:
    """The trails of all sequences that grow."""

    def __init__(self) -> None:
        self._trails: dict[Sequence, Trail] = {}

    def begins(self, step: Step) -> None:
        """WatchingDrafter.begins."""
        step.context.session.keep_hidden()

    def watch(self, step: Step) -> None:
        """WatchingDrafter.watch."""
        growing = set(step.growing)
        if not growing:
            return
        hidden = step.context.session.hidden()
        row = 0
        for chunk in step.chunks:
            if chunk in growing:
                trail = self._trails.setdefault(chunk.sequence, Trail())
                for at in _staying(chunk):
                    place = chunk.sequence.cached + chunk.wanted[at]
                    trail.add(place, (hidden, row + at))
            row += len(chunk.wanted)

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
