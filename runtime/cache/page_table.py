"""Page tables, and what a step does to them. Data only: PagePool fills these records,
a step has the session carry them out."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvlathe.runtime.sessions.page_moves import Copy, PageMoves
from kvlathe.runtime.sessions.protocols import Int32, State

Pages = list[list[int]]
"""For each bucket page ids, oldest first."""


@dataclass(eq=False, slots=True)
class CompactedPrefix:
    """The first ``cached`` tokens of later sequences, of which lanes hold only some:
    ``pages`` of each bucket, and how many tokens they hold. ``ids``: the tokens, as
    int32 bytes; ``salt``: the tenant; ``share``: of its KV pairs, what was to stay;
    ``key``: what keys of blocks after it begin with.
    """

    ids: bytes
    salt: bytes
    cached: int
    pages: Pages
    lengths: list[int]
    share: float
    key: bytes


@dataclass(eq=False, slots=True)
class Block:
    """A block of the prefix cache: ``pages`` of each bucket. ``ends``: whether a
    sequence may go on after it, which needs the windows before its end, and the
    ``state`` there."""

    pages: Pages
    ends: bool
    state: State | None = None


@dataclass(eq=False, slots=True)
class PageTable:
    """The pages of one sequence.

    For each bucket: its page ids, oldest first, how many committed tokens of these queries
    see, and how many have reached the bucket so far (of a cold bucket: 0). Pages behind
    the tokens that are seen wait there (lives.Age). Lists that have
    run in a step are replaced, never changed. ``base``: the compacted prefix that it
    begins with. ``state``: None where no layer keeps one, and before the first token.
    """

    pages: Pages
    lengths: list[int]
    arrived: list[int]
    base: CompactedPrefix | None = None
    state: State | None = None
    _rows: list[Int32] = field(default_factory=list)
    _rows_of: Pages | None = None

    @property
    def rows(self) -> list[Int32]:
        """``pages`` as arrays, made anew only when they have changed."""
        if self._rows_of is not self.pages:
            self._rows_of = self.pages
            self._rows = [np.array(ids, np.int32) for ids in self.pages]
        return self._rows


@dataclass(eq=False, slots=True)
class PageChange:
    """The change of one sequence's pages by a step, beside writing new tokens.

    ``taken``: all pages that it took. ``before``: the table's pages if it is rolled
    back. ``after``: its pages once the step is committed. ``copies``: what the session
    does before the step runs; ``moves``: after it. ``drops``: whether pages that it had
    or took leave then.
    """

    taken: Pages
    before: Pages
    after: Pages
    copies: list[Copy] = field(default_factory=list[Copy])
    moves: PageMoves = field(default_factory=PageMoves)
    drops: bool = False

    def keep(self, pages: Pages) -> None:
        """Nothing moves after the step, and of its pages only these stay."""
        self.after = pages
        self.moves = PageMoves()
        self.drops = True


@dataclass(eq=False, slots=True)
class Reservation:
    """Room for more ``tokens`` of one sequence (in each bucket).

    ``lengths``: of its table once it is committed. ``seals``: whether pages are sealed
    and tokens moved after the new tokens. ``change``: None where its pages stay what
    they are.
    """

    table: PageTable
    tokens: list[int]
    lengths: list[int]
    seals: bool
    change: PageChange | None = None


@dataclass(frozen=True, slots=True)
class Swapped:
    """A sequence outside the arena: the bytes of its pages (scores are in them), and
    its counts, for each bucket; ``base`` and ``state`` as in PageTable."""

    data: list[list[bytes]]
    lengths: list[int]
    arrived: list[int]
    base: CompactedPrefix | None = None
    state: State | None = None
