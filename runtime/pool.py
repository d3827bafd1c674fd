"""PagePool: which pages belong to which sequence, and how a step takes more of them. Accounting only.

A step is a transaction: ``reserve`` takes every page it can need, then ``commit`` or ``rollback``. Nothing else holds
pages, so a step that fails or is abandoned leaks none. A Session moves the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import add

import numpy as np

from kvlathe.errors import KvlatheError
from kvlathe.export.layout import CacheLayout
from kvlathe.runtime.arena import OutOfPages, PageArena
from kvlathe.runtime.session import Int32, PageMover
from kvlathe.runtime.settle import Choice, Moves, pages_of, settle


@dataclass(eq=False, slots=True)
class PageTable:
    """One sequence. For each bucket: its page ids, oldest first, how many committed tokens they hold, and how many have
    reached the bucket so far (of a cold bucket: 0). Lists that have run in a step are replaced, never changed."""

    pages: list[list[int]]
    lengths: list[int]
    arrived: list[int]
    _rows: list[Int32] = field(default_factory=list)
    _of: list[list[int]] | None = None

    @property
    def rows(self) -> list[Int32]:
        """``pages`` as arrays, made anew only when they have changed."""
        if self._of is not self.pages:
            self._of, self._rows = self.pages, [np.array(ids, np.int32) for ids in self.pages]
        return self._rows


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy on write, to be done before the step runs."""

    bucket: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Seal:
    """A full page to be sealed after the step has run; ``cold_pages`` in the order of ``plan.cold(fresh)``.

    ``position``: place of its first token in the sequence.
    """

    fresh: int
    page: int
    cold_pages: tuple[int, ...]
    position: int


@dataclass(frozen=True, slots=True)
class Ranking:
    """A ``choice`` to be made after the seals, among the tokens in ``pages``; ``targets``: new pages for each part."""

    choice: Choice
    pages: tuple[int, ...]
    targets: tuple[tuple[int, ...], ...]


@dataclass(eq=False, slots=True)
class PageMoves:
    """What a step does to the pages of one sequence beside writing new tokens.

    ``taken``: all pages that it took. ``before``: the table's pages if it is rolled back; ``after``: once it is
    committed.
    """

    taken: list[list[int]]
    before: list[list[int]]
    after: list[list[int]]
    copies: list[Copy] = field(default_factory=list)
    seals: list[Seal] = field(default_factory=list)
    rankings: list[Ranking] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Reservation:
    """Room for more ``tokens`` of one sequence (in each bucket). ``lengths``: of its table once it is committed;
    ``moves``: None where its pages stay what they are."""

    table: PageTable
    tokens: list[int]
    lengths: list[int]
    seal: bool
    moves: PageMoves | None = None


@dataclass(frozen=True, slots=True)
class Swapped:
    """A sequence outside the arena: the bytes of its pages (scores are in them), and its counts, for each bucket."""

    data: list[list[bytes]]
    lengths: list[int]
    arrived: list[int]


class PagePool(PageArena):
    """Pages of every bucket of ``layout`` in an arena of ``arena_bytes``, and the page tables of sequences."""

    def __init__(self, layout: CacheLayout, arena_bytes: int) -> None:
        super().__init__(layout.page_stride, arena_bytes)
        self.layout, self.plan = layout, layout.plan
        self._cold = [self.plan.cold(b) for b in range(len(self.strides))]
        self._fresh = [b for b, bucket in enumerate(self.plan.buckets) if bucket.source is None]
        self._one = [int(b in self._fresh) for b in range(len(self.strides))]  # a token for each fresh bucket

    def open(self) -> PageTable:
        return PageTable([[] for _ in self.strides], [0] * len(self.strides), [0] * len(self.strides))

    # -- how much --------------------------------------------------------------------------------------------------
    def worst_pages(self, tokens: int, prompt: int | None = None) -> list[int]:
        """Pages of each bucket that a sequence growing to ``tokens`` tokens can need at one time.

        ``prompt``: how many of them are its prompt (None: unknown, up to all). Where a plan ranks prompts, they are in
        fresh pages until they end.
        """
        grown, begun = self.grown_pages(tokens), self.prompt_pages(tokens if prompt is None else prompt)
        return [max(pair) for pair in zip(grown, begun, strict=True)]

    def grown_pages(self, tokens: int) -> list[int]:
        """What a decode of up to ``tokens`` tokens can need at one time, the step in which pages move included."""
        return [self._grown(b, tokens) for b in range(len(self.strides))]

    def _grown(self, b: int, tokens: int) -> int:
        p, cold = self.plan.page_tokens, self._cold[b]
        rule = self.plan.buckets[cold[0] if cold else b].tokens
        if cold and rule.kind == "share":
            most = len(cold) * (p - 1) + 1  # and then one of its tiers has a page
            return -(-min(tokens, most) // p) + (-(-(most - p) // p) if tokens >= p else 0)
        if cold:
            return -(-min(tokens, p) // p)
        if rule.kind == "budget" and tokens >= rule.budget + p:
            return 2 * rule.budget // p + 1
        return -(-tokens // p) if self.plan.buckets[b].source is None else self.layout.held(b, tokens) // p

    def prompt_pages(self, prompt: int) -> list[int]:
        """What a prompt of up to ``prompt`` tokens can need at one time, the step that ends it included."""
        return [self._begun(b, prompt) for b in range(len(self.strides))]

    def _begun(self, b: int, prompt: int) -> int:
        p, cold, held = self.plan.page_tokens, self._cold[b], self.layout.held(b, prompt)
        if not self.plan.ranked:
            hot = min(prompt, self.plan.prefill_chunk) if cold else prompt
            return prompt // p if self.plan.buckets[b].source is not None else -(-hot // p)
        rule = self.plan.buckets[cold[0] if cold else b].tokens
        cut = rule.kind == "budget" and prompt >= rule.budget + p  # some of its tokens leave
        if self.plan.buckets[b].source is not None:
            return prompt // p + rule.budget // p if cut else held // p
        if rule.kind == "share":  # what fills no page of a tier goes to new pages too
            return -(-prompt // p) + (-(-min(prompt, len(cold) * (p - 1)) // p) if prompt >= p else 0)
        return -(-prompt // p) + (rule.budget // p + (prompt > rule.budget + p) if cut and not cold else 0)

    def steady(self, table: PageTable) -> int:
        """Tokens, at least 1, that a decode adds up to the next time that tokens can move."""
        ends = range(1, self.plan.page_tokens + 1)
        return next(n for n in ends if any(self.layout.settles_at(b, table.arrived[b] + n) for b in self._fresh))

    # -- a step ----------------------------------------------------------------------------------------------------
    def reserve(self, table: PageTable, tokens: int | Sequence[int], seal: bool = False) -> Reservation:
        """Take every page that appending ``tokens`` tokens (to each fresh bucket, or a number for each bucket) can
        need; with ``seal`` also those that the buckets which get some seal full pages into and move tokens to.

        ``table.pages`` then includes the new pages of the fresh buckets. Raises OutOfPages; nothing was taken then.
        """
        if tokens == 1 and not self.plan.ranked and self._has_room(table, seal):
            lengths = list(map(add, table.lengths, self._one))
            return Reservation(table, self._one, lengths, seal)
        p, buckets = self.plan.page_tokens, range(len(self.strides))
        more = [tokens] * len(buckets) if isinstance(tokens, int) else list(tokens)
        fresh = [b for b in self._fresh if more[b]]
        more = [more[b] if b in fresh else 0 for b in buckets]
        lengths = [held + new for held, new in zip(table.lengths, more, strict=True)]
        counts = [-(-lengths[b] // p) - len(table.pages[b]) if b in fresh else 0 for b in buckets]
        shared = [b for b in fresh if self._writes_shared(table, b)]
        moves = {b: settle(self.layout, b, lengths, table.arrived[b] + more[b]) for b in fresh} if seal else {}
        try:
            taken = self.take(self._counts(counts, shared, moves))
        except OutOfPages:
            if all(self._writes_shared(table, b) for b in shared):
                raise
            return self.reserve(table, tokens, seal)  # who shared a page has given it up for this: no copy is needed
        spare = [iter(ids) for ids in taken]
        during = [ids + list(islice(spare[b], counts[b])) for b, ids in enumerate(table.pages)]
        done = PageMoves(taken, table.pages, during)
        for b in shared:
            place, target = table.lengths[b] // p, next(spare[b])
            done.copies.append(Copy(b, during[b][place], target))
            during[b][place] = target
        for b, move in moves.items():
            self._move(done, b, move, lengths, table.arrived[b] + more[b], spare)
        table.pages = during
        return Reservation(table, more, lengths, seal, done)

    def _has_room(self, table: PageTable, seal: bool) -> bool:
        """Whether one token more fills none of the pages that are there and are its own, and none waits to be sealed:
        most steps of a decode."""
        p = self.plan.page_tokens
        for b in self._fresh:
            place, used = divmod(table.lengths[b], p)
            if not 0 < used < p - 1 or (seal and place and self._cold[b]):
                return False
            if self._owners[b][table.pages[b][place]] > 1:
                return False
        return True

    def _writes_shared(self, table: PageTable, b: int) -> bool:
        place, within = divmod(table.lengths[b], self.plan.page_tokens)
        return within > 0 and self._owners[b][table.pages[b][place]] > 1

    def _counts(self, appended: list[int], shared: list[int], moves: Mapping[int, Moves]) -> list[int]:
        """Pages of each bucket: to append to, to copy to, to seal into and to move to."""
        counts = list(appended)
        for b in shared:
            counts[b] += 1
        for b, move in moves.items():
            for c in self._cold[b]:
                counts[c] += move.seals
            for choice in move.choices:
                for target, pages in pages_of(choice, self.plan.page_tokens):
                    counts[target] += pages
        return counts

    def _move(
        self, done: PageMoves, b: int, move: Moves, lengths: list[int], arrived: int, spare: list[Iterator[int]]
    ) -> None:
        """Give each move of fresh bucket ``b`` its pages; ``done.after`` and ``lengths`` become the table's.

        ``arrived``: tokens that have reached the bucket.
        """
        p, cold, first = self.plan.page_tokens, self._cold[b], arrived - lengths[b]
        if not move.seals and not move.choices:
            return
        done.after = [list(ids) for ids in done.after]
        sealed = {c: list(islice(spare[c], move.seals)) for c in cold}
        for i in range(move.seals):
            done.seals.append(Seal(b, done.after[b][i], tuple(sealed[c][i] for c in cold), first + i * p))
        del done.after[b][: move.seals]
        lengths[b] -= move.seals * p
        for c in cold:
            done.after[c] += sealed[c]
            lengths[c] += move.seals * p
        for choice in move.choices:
            source, targets = tuple(done.after[choice.bucket]), []
            done.after[choice.bucket], lengths[choice.bucket] = [], 0
            for (target, spans), (_, pages) in zip(choice.to, pages_of(choice, p), strict=True):
                targets.append(tuple(islice(spare[target], pages)))
                done.after[target] += targets[-1]
                lengths[target] += sum(stop - start for start, stop in spans)
            done.rankings.append(Ranking(choice, source, tuple(targets)))

    def commit(self, done: Reservation) -> None:
        """The step has run and its moves are done: the tokens are there."""
        table, moves = done.table, done.moves
        table.lengths, table.arrived = done.lengths, list(map(add, table.arrived, done.tokens))
        if moves is None:
            return
        table.pages = moves.after
        if moves.copies or moves.seals or moves.rankings:
            for b, after in enumerate(moves.after):
                for page in {*moves.before[b], *moves.taken[b]}.difference(after):
                    self._drop(b, page)

    def forgotten(self, done: Reservation, prompt_ended: bool) -> list[int]:
        """Buckets whose scores begin anew after a committed step: where rows count only until tokens can be ranked."""
        probe, found = self.plan.probe, []
        if probe is None or probe.accumulated or not done.seal:
            return found
        for b in self._fresh:
            if done.tokens[b] and (prompt_ended or done.table.arrived[b] % self.plan.page_tokens == 0):
                found += [b, *self._cold[b]]
        return found

    def rollback(self, done: Reservation) -> None:
        """The step did not happen: every page goes back, the table is what it was."""
        if done.moves:
            done.table.pages = done.moves.before
            self.drop(done.moves.taken)

    def fork(self, table: PageTable) -> PageTable:
        """A second sequence over the same pages; whoever writes to a shared page first gets its own copy.

        Raises KvlatheError where a token rule forbids it.
        """
        if not self.plan.sharable:
            raise KvlatheError(
                "this sequence cannot be forked",
                "its engine ranks tokens by what later ones attend, so two continuations keep different ones",
                "send the prompt again, or build without a token rule",
            )
        self.share(table.pages)
        return PageTable([list(ids) for ids in table.pages], list(table.lengths), list(table.arrived))

    def release(self, table: PageTable) -> None:
        """Give everything back. The table is empty and may be released again."""
        self.drop(table.pages)
        table.pages = [[] for _ in self.strides]
        table.lengths, table.arrived = [0] * len(self.strides), [0] * len(self.strides)

    def swap_out(self, table: PageTable, mover: PageMover) -> Swapped:
        """Move a sequence to host memory and release its pages."""
        data = [[mover.read_page(b, page) for page in ids] for b, ids in enumerate(table.pages)]
        swapped = Swapped(data, list(table.lengths), list(table.arrived))
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
        return PageTable(taken, list(swapped.lengths), list(swapped.arrived))
