"""PageMoves: what a session does to pages between two steps, as one value.

The pool says which pages, a step says when, and the session moves the bytes. The order
is always the same: copies before the step runs; after it the seals, then what moves
single tokens, then the resets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvlathe.plan.moves import Selection

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy page ``source`` of a bucket to its page ``target`` (copy on write)."""

    bucket: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class FullPage:
    """A full page to be sealed: ``page`` of fresh bucket ``fresh``.

    ``cold_pages``: one page of each of its cold buckets, in the order of
    ``plan.index.buckets[fresh].cold``. ``position``: place of the page's first token in its sequence.
    Stochastic rounding depends on it.
    """

    fresh: int
    page: int
    cold_pages: tuple[int, ...]
    position: int


@dataclass(frozen=True, slots=True)
class PageSelection:
    """A ``selection`` to be made among the tokens in ``pages``, by their scores.

    ``targets``: new pages of each of the selection's targets. ``seen`` [tokens]: observed
    rows at or after each position, where scores are means over rows. ``keys``: of the
    noise of each lane, where there is noise.
    """

    selection: Selection
    pages: tuple[int, ...]
    targets: tuple[tuple[int, ...], ...]
    seen: Int64 | None = None
    keys: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Relocation:
    """Write chosen tokens of ``pages``, with their scores, into ``target_pages``, new
    pages of bucket ``target``.

    ``places`` [lanes of the target, n]: for each lane (in lane order) the places of its
    tokens in ``pages`` of bucket ``source``, ascending. Within a bucket the bytes stay
    what they are. Between buckets the number format changes, and the target's pages are
    filled.
    """

    source: int
    pages: Sequence[int]
    target: int
    target_pages: Sequence[int]
    places: Int64


@dataclass(frozen=True, slots=True)
class ScoreReset:
    """Set the observed attention of all tokens in ``pages`` of a bucket to 0."""

    bucket: int
    pages: Sequence[int]


@dataclass(eq=False, slots=True)
class PageMoves:
    """Moves of one sequence's pages, or of several. A session carries them out in the
    order of the fields."""

    copies: list[Copy] = field(default_factory=list[Copy])
    seals: list[FullPage] = field(default_factory=list[FullPage])
    selections: list[PageSelection] = field(default_factory=list[PageSelection])
    relocations: list[Relocation] = field(default_factory=list[Relocation])
    resets: list[ScoreReset] = field(default_factory=list[ScoreReset])

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(
            self.seals
            or self.copies
            or self.selections
            or self.relocations
            or self.resets
        )
