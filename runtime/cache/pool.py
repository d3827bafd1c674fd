"""PagePool: which pages belong to which sequence, and how a step takes more of them.
Accounting only.

A step is a transaction: ``reserve`` takes every page it can need, then ``commit`` or
``rollback``. Nothing else holds pages, so a step that fails or is abandoned leaks none.
A Session moves the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from operator import add

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.demand import PageDemand
from kvlathe.plan.index import Route
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.moves import Moves, Selection
from kvlathe.runtime.cache.arena import OutOfPages, PageArena
from kvlathe.runtime.cache.page_table import (
    PageChange,
    Pages,
    PageTable,
    Reservation,
    Swapped,
)
from kvlathe.runtime.sessions.page_moves import Copy, FullPage, PageSelection
from kvlathe.runtime.sessions.protocols import PageMover


class PagePool(PageArena):
    """Pages of every bucket of ``layout`` in an arena of ``arena_bytes``, and the page
    tables of sequences."""

    def __init__(self, layout: CacheLayout, arena_bytes: int) -> None:
        super().__init__(layout.page_stride, arena_bytes)
        self.layout = layout
        self.plan = layout.plan
        self.demand = PageDemand(layout)
        self._ranked = self.plan.index.ranked
        self._routes = self.plan.index.routes
        self._hot = [route.buckets[0] for route in self._routes]
        # Pages of each hot bucket that are never sealed; None where none is.
        self._unsealed = [route.unsealed for route in self._routes]
        # One token more in each hot bucket.
        self._one = [int(bucket.is_hot) for bucket in self.plan.index.buckets]

    def open(self) -> PageTable:
        """The table of a sequence without tokens."""
        buckets = len(self.strides)
        pages: Pages = [[] for _ in self.strides]
        return PageTable(pages, lengths=[0] * buckets, arrived=[0] * buckets)

    def has_room_for(self, tokens: int, prompt: int | None = None) -> bool:
        """Whether the empty pool surely holds a sequence at every moment until it has
        ``tokens`` tokens. ``prompt`` of them are its prompt (None: up to all)."""
        return all(self.fits([pages]) for pages in self.demand.moments(tokens, prompt))

    def worst_pages(self, tokens: int, prompt: int | None = None) -> list[int]:
        """Pages of each bucket that the same sequence can need, each at its own worst
        moment."""
        moments = self.demand.moments(tokens, prompt)
        return [max(pages) for pages in zip(*moments, strict=True)]

    def steady(self, table: PageTable) -> int:
        """Tokens, at least 1, that a decode adds up to the next time that tokens can
        move."""
        for count in range(1, self.plan.page_tokens):
            for route in self._routes:
                if route.can_move(table.arrived[route.buckets[0]] + count):
                    return count
        return self.plan.page_tokens

    # -- a step ------------------------------------------------------------------------
    def reserve(
        self, table: PageTable, tokens: int | Sequence[int], seal: bool = False
    ) -> Reservation:
        """Take every page that appending ``tokens`` tokens can need: one number for
        each hot bucket, or a number for each bucket. With ``seal`` also the pages
        that the moves after it fill.

        ``table.pages`` then includes the new pages of the hot buckets. Raises
        OutOfPages; nothing was taken then.
        """
        if tokens == 1 and not self._ranked and self._has_room(table, seal):
            lengths = list(map(add, table.lengths, self._one))
            return Reservation(table, self._one, lengths, seal)
        arriving = self._arriving(tokens)
        lengths = list(map(add, table.lengths, arriving))
        appended = self._appended(table, arriving, lengths)
        shared = [b for b in self._hot if arriving[b] and self._shares(table, b)]
        moves = self._moves(table, arriving, lengths) if seal else []
        try:
            taken = self.take(self._counts(appended, shared, moves))
        except OutOfPages:
            if all(self._shares(table, b) for b in shared):
                raise
            # Reclaiming freed the other owner: retry without the copy.
            return self.reserve(table, tokens, seal)
        spare = [iter(ids) for ids in taken]
        during = [
            ids + list(islice(spare[b], appended[b]))
            for b, ids in enumerate(table.pages)
        ]
        done = PageChange(taken, table.pages, during)
        for b in shared:
            self._copy(done, table, b, next(spare[b]))
        for route, move in moves:
            first = table.arrived[route.buckets[0]] - table.lengths[route.buckets[0]]
            self._move(done, route, move, lengths, first, spare)
        table.pages = during
        return Reservation(table, arriving, lengths, seal, done)

    def _has_room(self, table: PageTable, seal: bool) -> bool:
        """Whether one token more fills none of the pages that are there and are its
        own, and none waits to be sealed: most steps of a decode."""
        p = self.plan.page_tokens
        for b, unsealed in zip(self._hot, self._unsealed, strict=True):
            place, used = divmod(table.lengths[b], p)
            waits = seal and unsealed is not None and place > unsealed
            if waits or not 0 < used < p - 1:
                return False
            if self._owners[b][table.pages[b][place]] > 1:
                return False
        return True

    def _arriving(self, tokens: int | Sequence[int]) -> list[int]:
        """Tokens that reach each bucket; none reaches a cold one."""
        if isinstance(tokens, int):
            return [one * tokens for one in self._one]
        return [one * count for one, count in zip(self._one, tokens, strict=True)]

    def _appended(
        self, table: PageTable, arriving: list[int], lengths: list[int]
    ) -> list[int]:
        """New pages of each bucket for the tokens that arrive."""
        p = self.plan.page_tokens
        return [
            -(-lengths[b] // p) - len(ids) if arriving[b] else 0
            for b, ids in enumerate(table.pages)
        ]

    def _shares(self, table: PageTable, b: int) -> bool:
        """Whether the page that the next token is written to has another owner."""
        place, within = divmod(table.lengths[b], self.plan.page_tokens)
        if within == 0:
            return False
        return self._owners[b][table.pages[b][place]] > 1

    def _moves(
        self, table: PageTable, arriving: list[int], lengths: list[int]
    ) -> list[tuple[Route, Moves]]:
        """Moves that follow once the step's tokens are there."""
        pending: list[tuple[Route, Moves]] = []
        for route in self._routes:
            b = route.buckets[0]
            if arriving[b]:
                move = route.moves(lengths, table.arrived[b] + arriving[b])
                pending.append((route, move))
        return pending

    def _counts(
        self,
        appended: list[int],
        shared: list[int],
        moves: list[tuple[Route, Moves]],
    ) -> list[int]:
        """Pages of each bucket: to append to, to copy to, to seal into and to move
        to."""
        counts = list(appended)
        for b in shared:
            counts[b] += 1
        for route, move in moves:
            for c in route.buckets[1:]:
                counts[c] += move.seals
            for selection in move.selections:
                for target in selection.targets:
                    counts[target.bucket] += target.pages(self.plan.page_tokens)
        return counts

    def _copy(self, done: PageChange, table: PageTable, b: int, target: int) -> None:
        """The page that is written next is shared: write to ``target``, a copy."""
        during = done.after[b]
        place = table.lengths[b] // self.plan.page_tokens
        done.copies.append(Copy(b, during[place], target))
        during[place] = target

    def _move(
        self,
        done: PageChange,
        route: Route,
        move: Moves,
        lengths: list[int],
        first: int,
        spare: list[Iterator[int]],
    ) -> None:
        """Give the moves of a route their pages; ``done.after`` and ``lengths``
        become the table's. ``first``: position of the hot bucket's first token."""
        if not (move.seals or move.selections or move.drops):
            return
        done.after = [list(ids) for ids in done.after]
        if move.seals:
            self._seal(done, route, move, lengths, first, spare)
        for selection in move.selections:
            self._select(done, selection, lengths, spare)
        for drop in move.drops:
            del done.after[drop.bucket][drop.first : drop.first + drop.pages]
            lengths[drop.bucket] -= drop.pages * self.plan.page_tokens
            done.drops = True
        for shown in move.shown:
            lengths[shown.bucket] = shown.tokens

    def _seal(
        self,
        done: PageChange,
        route: Route,
        move: Moves,
        lengths: list[int],
        first: int,
        spare: list[Iterator[int]],
    ) -> None:
        """Pages of the hot bucket go to each of its cold ones."""
        hot, *cold = route.buckets
        seals = move.seals
        p = self.plan.page_tokens
        targets = [list(islice(spare[c], seals)) for c in cold]
        for i, cold_pages in enumerate(zip(*targets, strict=True)):
            place = move.first + i
            page = done.after[hot][place]
            done.moves.seals.append(FullPage(hot, page, cold_pages, first + place * p))
        del done.after[hot][move.first : move.first + seals]
        lengths[hot] -= seals * p
        for c, pages in zip(cold, targets, strict=True):
            done.after[c] += pages
            lengths[c] += seals * p

    def _select(
        self,
        done: PageChange,
        selection: Selection,
        lengths: list[int],
        spare: list[Iterator[int]],
    ) -> None:
        """All tokens of a bucket leave their pages for those of the selection's
        targets."""
        source = tuple(done.after[selection.bucket])
        done.after[selection.bucket] = []
        lengths[selection.bucket] = 0
        targets: list[tuple[int, ...]] = []
        for target in selection.targets:
            count = target.pages(self.plan.page_tokens)
            pages = tuple(islice(spare[target.bucket], count))
            targets.append(pages)
            done.after[target.bucket] += pages
            lengths[target.bucket] += target.tokens
        done.moves.selections.append(PageSelection(selection, source, tuple(targets)))

    def to_page_end(self, table: PageTable) -> int:
        """Tokens, at least 1, that fill a page which is being filled: where nothing is
        ranked, pages seal or leave only then."""
        p = self.plan.page_tokens
        return min(p - table.lengths[b] % p for b in self._hot)

    def shorten(self, done: Reservation, tokens: int) -> None:
        """Count only the first ``tokens`` of those that a step was to add: fewer
        than fill a page, so that nothing seals or leaves. The others' rows stay behind
        those that count, and are written over."""
        assert done.change is not None, "one token is not cut"
        table, arriving = done.table, self._arriving(tokens)
        done.tokens = arriving
        done.lengths = list(map(add, table.lengths, arriving))
        p = self.plan.page_tokens
        kept: Pages = []
        for b, ids in enumerate(table.pages):
            kept.append(ids[: -(-done.lengths[b] // p)] if self._one[b] else ids)
        done.change.keep(kept)

    def commit(self, done: Reservation) -> None:
        """The step has run and its moves are done: the tokens are there."""
        table, change = done.table, done.change
        table.lengths = done.lengths
        table.arrived = list(map(add, table.arrived, done.tokens))
        if change is None:
            return
        table.pages = change.after
        moves = change.moves
        if change.copies or moves.seals or moves.selections or change.drops:
            for b, after in enumerate(change.after):
                for page in {*change.before[b], *change.taken[b]}.difference(after):
                    self._drop(b, page)

    def rollback(self, done: Reservation) -> None:
        """The step did not happen: every page goes back, the table is what it was."""
        if done.change:
            done.table.pages = done.change.before
            self.drop(done.change.taken)

    # -- whole sequences ---------------------------------------------------------------
    def fork(self, table: PageTable) -> PageTable:
        """A second sequence over the same pages; whoever writes to a shared page first
        gets its own copy.

        Raises KvlatheError where a life forbids it.
        """
        if not self.plan.index.sharable:
            raise KvlatheError(
                "this sequence cannot be forked",
                "its engine ranks tokens by what later ones attend, so two continuations"
                " keep different ones",
                "send the prompt again, or build with a compression that ranks no tokens",
            )
        self.share(table.pages)
        pages: Pages = [list(ids) for ids in table.pages]
        counts = list(table.lengths), list(table.arrived)
        return PageTable(pages, *counts, table.base, table.state)

    def release(self, table: PageTable) -> None:
        """Give everything back. The table is empty and may be released again."""
        self.drop(table.pages)
        table.pages = [[] for _ in self.strides]
        table.lengths = [0] * len(self.strides)
        table.arrived = [0] * len(self.strides)
        table.base = table.state = None

    def swap_out(self, table: PageTable, mover: PageMover) -> Swapped:
        """Move a sequence to host memory and release its pages."""
        data: list[list[bytes]] = []
        for bucket, ids in enumerate(table.pages):
            data.append([mover.read_page(bucket, page) for page in ids])
        if table.state is not None:
            mover.leave_state(table.state)
        counts = list(table.lengths), list(table.arrived)
        swapped = Swapped(data, *counts, table.base, table.state)
        self.release(table)
        return swapped

    def swap_in(self, swapped: Swapped, mover: PageMover) -> PageTable:
        """Raises OutOfPages; ``swapped`` is unchanged then."""
        taken = self.take([len(pages) for pages in swapped.data])
        try:
            for b, ids in enumerate(taken):
                for page, data in zip(ids, swapped.data[b], strict=True):
                    mover.write_page(b, page, data)
        except BaseException:
            self.drop(taken)
            raise
        counts = (list(swapped.lengths), list(swapped.arrived))
        return PageTable(taken, *counts, swapped.base, swapped.state)
