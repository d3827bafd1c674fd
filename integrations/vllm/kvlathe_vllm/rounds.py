"""A step of vLLM as calls of the native library.

Where pages are sealed, a prompt goes page by page: its rows attend sealed pages and their
own, whatever vLLM's chunks are. So nothing that is computed depends on how vLLM cuts
prompts, and a shared prefix is what the sequence would have computed itself. A round is
the next page of every sequence. Sequences that share blocks which another one fills in
the same step wait for the rounds that seal them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvlathe.plan.layer_block import in_blocks, seals
from kvlathe.plan.plan import CompressionPlan
from kvlathe_vllm.hot_pages import NULL_BLOCK, HotPages

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Step:
    """Of B sequences: ``starts`` [B + 1] rows of the step, ``lengths`` [B] tokens after it,
    ``table`` [B, W] blocks."""

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


@dataclass(frozen=True)
class Round:
    """One call of n sequences. ``rows``: those of the step; ``whole``: all, in order. ``cu``
    [n + 1], ``lengths`` [n, buckets] before it, ``blocks`` [n, W], ``hot`` [n, 1].
    ``sealing`` comes after it."""

    rows: Int64
    whole: bool
    cu: Int32
    lengths: Int32
    blocks: Int32
    hot: Int32
    sealing: list[Sealing]


@dataclass
class Piece:
    """New tokens of sequence ``of`` from ``first`` to before ``end``; ``row`` is the
    first's."""

    of: int
    row: int
    first: int
    end: int
    hot: int


@dataclass
class Rounds:
    """What a worker remembers between steps. ``count``: sequences that run at most."""

    plan: CompressionPlan
    count: int
    pages: HotPages = field(init=False)
    _last: tuple[Step, list[Round]] | None = None

    def __post_init__(self) -> None:
        self.pages = HotPages(self.count)

    def of(self, step: Step) -> list[Round]:
        """vLLM asks once for each kind of layer; the answer is the same."""
        if self._last is not None and self._last[0].same(step):
            return self._last[1]
        made = self._make(step)
        self._last = (step, made)
        return made

    def _make(self, step: Step) -> list[Round]:
        queries = np.diff(step.starts)
        cached = step.lengths - queries
        if not seals(self.plan):
            return self._one_round(step, cached)
        waves: list[list[Piece]] = []
        most = int(step.table.max(initial=0))
        ready = np.full(most + 1, -1)
        ended: list[int] = []
        self._touch(step, cached, queries)
        # Whoever fills a block had fewer tokens than those that share it.
        order = np.argsort(cached, kind="stable")
        for b in order.tolist():
            if queries[b]:
                first = int(cached[b])
                self._add(step, b, first, waves, ready, ended)
        for block in ended:
            self.pages.end(block)
        return [self._round(step, pieces) for pieces in waves]

    def _one_round(self, step: Step, cached: Int32) -> list[Round]:
        """Where nothing is sealed, everything at once."""
        pieces: list[Piece] = []
        for b, first in enumerate(cached.tolist()):
            row = int(step.starts[b])
            end = int(step.lengths[b])
            if end > first:
                pieces.append(Piece(b, row, first, end, 0))
        return [self._round(step, pieces)] if pieces else []

    def _touch(self, step: Step, cached: Int32, queries: Int32) -> None:
        """Before any page is given away: those of this step's sequences are in use."""
        page = self.plan.page_tokens
        partly = cached % page > 0
        goes_on = (queries > 0) & partly
        for b in np.flatnonzero(goes_on):
            place = cached[b] // page
            block = step.table[b, place]
            self.pages.resume(int(block))

    def _add(
        self,
        step: Step,
        b: int,
        first: int,
        waves: list[list[Piece]],
        ready: Int64,
        ended: list[int],
    ) -> None:
        """Cut the new tokens of a sequence into pages. ``ready``: the wave in which a
        block is sealed, or -1."""
        page = self.plan.page_tokens
        blocks = step.table[b]
        end = int(step.lengths[b])
        row = int(step.starts[b])
        before = first // page
        awaited = ready[blocks[:before]]
        wave = int(awaited.max(initial=-1)) + 1
        at = int(blocks[before])
        hot = self._hot_page(at, first % page)
        while first < end:
            following = (first // page + 1) * page
            stop = min(end, following)
            while len(waves) <= wave:
                waves.append([])
            piece = Piece(b, row, first, stop, hot)
            waves[wave].append(piece)
            if stop % page == 0 and at != NULL_BLOCK:
                ready[at] = wave
            if stop < end:
                other = int(blocks[stop // page])
                self.pages.move(at, other)
                at = other
            row += stop - first
            first = stop
            wave += 1
        if end % page == 0:
            ended.append(at)

    def _hot_page(self, block: int, held: int) -> int:
        """Of a block that holds so many tokens."""
        if held:
            return self.pages.resume(block)
        return self.pages.begin(block)

    def _round(self, step: Step, pieces: list[Piece]) -> Round:
        page = self.plan.page_tokens
        sizes = [piece.end - piece.first for piece in pieces]
        cu = np.zeros(len(pieces) + 1, np.int32)
        cu[1:] = np.cumsum(sizes)
        ranges: list[Int64] = []
        for piece, size in zip(pieces, sizes, strict=True):
            rows = np.arange(piece.row, piece.row + size)
            ranges.append(rows)
        rows = np.concatenate(ranges)
        every = np.arange(step.starts[-1])
        cached = np.array([piece.first for piece in pieces])
        sealed = cached // page * page
        sequences = [piece.of for piece in pieces]
        hot = np.array([piece.hot for piece in pieces], np.int32)
        return Round(
            rows=rows,
            whole=np.array_equal(rows, every),
            cu=cu,
            lengths=self._lengths(cached, sealed),
            blocks=np.ascontiguousarray(step.table[sequences]),
            hot=hot[:, None],
            sealing=self._sealing(step, pieces),
        )

    def _lengths(self, cached: Int64, sealed: Int64) -> Int32:
        """[n, buckets]: what each bucket holds of each sequence."""
        columns: list[Int64] = []
        held = in_blocks(self.plan)
        for b, bucket in enumerate(self.plan.buckets):
            if not held[b]:
                columns.append(cached - sealed)
            elif bucket.source is None:
                columns.append(cached)
            else:
                columns.append(sealed)
        lengths = np.stack(columns, 1)
        return np.ascontiguousarray(lengths, np.int32)

    def _sealing(self, step: Step, pieces: list[Piece]) -> list[Sealing]:
        page = self.plan.page_tokens
        if not seals(self.plan):
            return []
        full = [piece for piece in pieces if piece.end % page == 0]
        found: list[Sealing] = []
        for piece in full:
            place = piece.end // page - 1
            block = int(step.table[piece.of, place])
            position = place * page
            found.append(Sealing(piece.hot, block, position))
        return found
