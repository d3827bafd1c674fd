"""A step of vLLM as one call of the native library in each layer.

Where pages are sealed, a prompt's rows attend sealed pages and their own, whatever
vLLM's chunks are. So nothing that is computed depends on how vLLM cuts prompts, and a
shared prefix is what the sequence would have computed itself. For the library each page
of a prompt is a sequence of its own: a piece. All rows are appended first. Then the
pages that they fill are sealed, where some piece of the step reads one of them, and
then all pieces are attended at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvlathe.plan.plan import CompressionPlan
from kvlathe_vllm.hot_pages import NULL_BLOCK, HotPages, lasting_pages

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
LEAST_COPIED = 128
"""Rows of a prompt that make copies of its past worth while, as in prompt_copies.cu."""
NOBODY = -1
"""Whose copies a piece reads that reads none."""


@dataclass(frozen=True)
class Step:
    """A step of B sequences: ``starts`` [B + 1] of their rows, ``lengths`` [B] tokens
    after it, ``table`` [B, W] blocks."""

    starts: Int32
    lengths: Int32
    table: Int32

    def same(self, other: Step) -> bool:
        if not np.array_equal(self.starts, other.starts):
            return False
        if not np.array_equal(self.lengths, other.lengths):
            return False
        return np.array_equal(self.table, other.table)


@dataclass(frozen=True)
class Sealing:
    """A full page: its hot page, its block, the place of its first token."""

    hot: int
    block: int
    position: int


@dataclass(frozen=True, eq=False)
class Call:
    """A step of n pieces, whose rows follow one another. ``cu`` [n + 1], ``lengths``
    [n, buckets] before it, ``blocks`` [n, W], ``hot`` [n, 1]. ``of`` [n]: the sequence
    that a piece is of.

    ``sealing``: the pages that it fills. ``seals_first``: some piece reads one of them.
    ``kept``: pairs of hot pages; the first's bytes go to the second after the call.
    """

    cu: Int32
    lengths: Int32
    blocks: Int32
    hot: Int32
    of: Int32
    sealing: list[Sealing]
    seals_first: bool
    kept: list[tuple[int, int]]


@dataclass
class Piece:
    """New tokens of sequence ``of`` from ``first`` to before ``end``."""

    of: int
    first: int
    end: int
    hot: int


@dataclass
class Calls:
    """The memory of a worker between steps. ``count``: sequences that run at most.
    ``guesses``: whether a step may bring tokens that the next one takes back, fewer than
    a page. Hot pages that such a step fills stay until the next one says how far its
    sequence came."""

    plan: CompressionPlan
    count: int
    guesses: bool = False
    pages: HotPages = field(init=False)
    _last: tuple[Step, Call] | None = None

    def __post_init__(self) -> None:
        self.pages = HotPages(lasting_pages(self.count, self.guesses))

    def of(self, step: Step) -> Call:
        """vLLM asks once for each kind of layer; the answer is the same."""
        if self._last is not None and self._last[0].same(step):
            return self._last[1]
        made = self._make(step)
        self._last = (step, made)
        return made

    def _make(self, step: Step) -> Call:
        queries = np.diff(step.starts)
        cached = step.lengths - queries
        pieces: list[Piece] = []
        kept: list[tuple[int, int]] = []
        if self.plan.index.seals:
            self._touch(step, cached, queries)
            with self.pages.step():
                for b in np.flatnonzero(queries).tolist():
                    self._cut(step, b, int(cached[b]), pieces, kept)
        else:
            for b in np.flatnonzero(queries).tolist():
                pieces.append(Piece(b, int(cached[b]), int(step.lengths[b]), 0))
        return self._call(step, pieces, kept)

    def _touch(self, step: Step, cached: Int32, queries: Int32) -> None:
        """Before any page is given away: those of this step's sequences are in use, and
        nobody takes back what is in the page before."""
        page = self.plan.page_tokens
        last = cached // page
        begun = np.flatnonzero((queries > 0) & (cached % page > 0))
        used = {int(step.table[b, last[b]]) for b in begun}
        for block in used:
            self.pages.resume(block)
        if not self.guesses:
            return
        for b in np.flatnonzero((queries > 0) & (last > 0)):
            before = int(step.table[b, last[b] - 1])
            if before not in used:  # else it is shared, and filled in this step
                self.pages.release(before)

    def _cut(
        self,
        step: Step,
        b: int,
        first: int,
        pieces: list[Piece],
        kept: list[tuple[int, int]],
    ) -> None:
        """The new tokens of a sequence, page by page. Pages that the step both begins
        and fills need no lasting hot page. Where the sequence fills the page that it
        has, and begins another, that one's rows go there at last."""
        page = self.plan.page_tokens
        blocks = step.table[b]
        end = int(step.lengths[b])
        new = end - first
        held, resumed = -1, NULL_BLOCK
        while first < end:
            block = int(blocks[first // page])
            stop = min(end, (first // page + 1) * page)
            is_full = stop % page == 0
            if first % page:
                hot = held = self.pages.resume(block)
                resumed = block
            elif is_full:
                hot = self.pages.passing()
            elif held < 0 or self.guesses:
                hot = self.pages.begin(block)
            else:
                hot = self.pages.passing()
                self.pages.move(resumed, block)
                kept.append((hot, held))
            pieces.append(Piece(b, first, stop, hot))
            first = stop
        # What more than a page of tokens fills, none of them guesses.
        filled = new > page if self.guesses else end % page == 0
        if held >= 0 and filled:
            self.pages.end(resumed)

    def _call(
        self, step: Step, pieces: list[Piece], kept: list[tuple[int, int]]
    ) -> Call:
        page = self.plan.page_tokens
        cu = np.zeros(len(pieces) + 1, np.int32)
        cu[1:] = np.cumsum([piece.end - piece.first for piece in pieces])
        cached = np.array([piece.first for piece in pieces], np.int64)
        sealed = cached // page * page
        sequences = [piece.of for piece in pieces]
        hot = np.array([piece.hot for piece in pieces], np.int32)
        sealing = self._sealing(step, pieces)
        return Call(
            cu=cu,
            lengths=self._lengths(cached, sealed),
            blocks=np.ascontiguousarray(step.table[sequences]),
            hot=hot[:, None],
            of=np.array(sequences, np.int32),
            sealing=sealing,
            seals_first=self._reads(step, pieces, sealing),
            kept=kept,
        )

    def _lengths(self, cached: Int64, sealed: Int64) -> Int32:
        """[n, buckets]: what each bucket holds of each sequence."""
        columns: list[Int64] = []
        for bucket in self.plan.index.buckets:
            if not bucket.stays:
                columns.append(cached - sealed)
            elif bucket.is_hot:
                columns.append(cached)
            else:
                columns.append(sealed)
        return np.ascontiguousarray(np.stack(columns, 1), np.int32)

    def _sealing(self, step: Step, pieces: list[Piece]) -> list[Sealing]:
        page = self.plan.page_tokens
        if not self.plan.index.seals:
            return []
        found: list[Sealing] = []
        for piece in pieces:
            if piece.end % page:
                continue
            place = piece.end // page - 1
            block = int(step.table[piece.of, place])
            found.append(Sealing(piece.hot, block, place * page))
        return found

    def _reads(self, step: Step, pieces: list[Piece], sealing: list[Sealing]) -> bool:
        """Whether a piece reads a page that the step seals: a later page of the same
        prompt does, and so does a sequence that shares it."""
        page = self.plan.page_tokens
        if not sealing:
            return False
        sealed = np.zeros(int(step.table.max()) + 1, bool)
        sealed[[one.block for one in sealing]] = True
        sealed[NULL_BLOCK] = False
        before = (step.table[x.of, : x.first // page] for x in pieces)
        return any(sealed[blocks].any() for blocks in before)


def is_decode(call: Call) -> bool:
    """Whether piece i is the one new token of sequence i. Two tokens on both sides of a
    page's end are two pieces."""
    if (np.diff(call.cu) != 1).any():
        return False
    return np.array_equal(call.of, np.arange(len(call.of)))


def copies_of(call: Call, least_rows: int) -> Int32:
    """Whose 16-bit copies of sealed pages each piece reads: those of the last piece of
    its prompt, whose pages begin with its own. Nobody's where the prompt brings few
    rows that are attended in tiles: in pieces of ``least_rows`` or more."""
    rows = np.diff(call.cu)
    rows[rows < least_rows] = 0
    pays = np.bincount(call.of, rows) >= LEAST_COPIED
    last = np.searchsorted(call.of, call.of, side="right") - 1
    last[~pays[call.of]] = NOBODY
    return last.astype(np.int32)
