"""Exchange: pages leave an engine and enter another one of the same build.

    source   export_prefix, export_sequence, prefill -> Departure: a parcel, and its pages held
    between  packed bytes; or page by page, from pool to pool, with addresses (``pieces``)
    target   expect -> Arrival: pages of this pool; fill them; adopt_prefix, adopt_sequence

Nothing is copied between where two pools can be reached: a departure's pages stay where
they are and what they are until it is closed, and an arrival's are those that the
sequence runs on. Callers are in any thread; what touches the pool runs in the engine's.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence as Items
from functools import partial
from threading import Event

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.layout import CacheLayout
from kvlathe.runtime.cache.hot_rows import HotRows
from kvlathe.runtime.cache.page_table import Pages, PageTable
from kvlathe.runtime.cache.parcel import (
    Base,
    Origin,
    PageList,
    Parcel,
    Running,
    StateBytes,
    heard,
    history_of,
    unpack,
)
from kvlathe.runtime.cache.prefix import PrefixCache
from kvlathe.runtime.requests.arriving import check_buckets, check_parcel, rows_of
from kvlathe.runtime.requests.engine_thread import EngineThread
from kvlathe.runtime.requests.held_pages import (
    Arrival,
    Departure,
    Digests,
    Hold,
    memory_of,
)
from kvlathe.runtime.requests.request import OnDelta, Request
from kvlathe.runtime.requests.running import resumed, running_of
from kvlathe.runtime.requests.sequences import SequenceFactory
from kvlathe.runtime.scheduling.engine import Engine
from kvlathe.runtime.scheduling.sequence import Sequence
from kvlathe.runtime.sessions.protocols import Region


class Exchange:
    """The exchange of sequences with one engine, which ``origin`` names."""

    def __init__(
        self,
        engine: Engine,
        thread: EngineThread,
        factory: SequenceFactory,
        origin: Origin,
    ) -> None:
        self.origin = origin
        self._engine, self._thread, self._factory = engine, thread, factory
        self._pool = engine.pool
        self._layout: CacheLayout = engine.pool.layout
        self._rows = HotRows(self._layout)

    @property
    def memory(self) -> Region:
        """The pool, to be registered once: page i of bucket b begins at i times the
        layout's ``page_stride[b]``. Raises KvlatheError where it has no address."""
        return memory_of(self._engine).region

    # -- pages leave -------------------------------------------------------------------
    def export_prefix(self, tokens: Items[int], salt: bytes = b"") -> Departure:
        """The longest prefix of ``tokens`` that is cached for the tenant ``salt``.
        Raises KvlatheError where there is none."""
        hold, cached = self._thread.call(partial(self._known, tokens, salt))
        return self._departure(hold, list(tokens[:cached]), cached, None)

    def export_sequence(
        self, sequence: Sequence, whole: bool = False
    ) -> Departure | None:
        """A submitted sequence, which ends here as ``moved``; None where it has ended
        before. ``whole``: a page that is filled in part goes as the others do, for who
        reads pages by address; else the rows of its tokens are in the description.
        Raises KvlatheError where nothing of it is cached yet."""
        _refuse_adapter(sequence)
        held = self._thread.call(partial(self._hold, sequence))
        if held is None:
            return None
        hold, running = held
        return self._departure(hold, sequence.tokens, sequence.cached, running, whole)

    def prefill(self, sequence: Sequence, whole: bool = False) -> Departure | None:
        """Run a new sequence until its first token is there, and export it, ``whole``
        as in export_sequence. None where that ended it. Raises what ended it before its
        answer was whole."""
        _refuse_adapter(sequence)
        begun = Event()
        request = self._thread.submit([sequence], lambda _: begun.set())
        try:
            while not begun.wait(1.0) and self._thread.alive:
                continue
            departure = self.export_sequence(sequence, whole)
        except BaseException:
            self._thread.end(request)
            raise
        if departure is None:
            request.raise_failure()
        return departure

    def _known(self, tokens: Items[int], salt: bytes) -> tuple[Hold, int]:
        table, cached = self.prefixes.longest(tokens, salt)
        if not cached:
            raise KvlatheError(
                "no prefix of these tokens can be exported",
                "none is cached: it was not computed here, or given up for others",
                "compute it first",
            )
        return Hold(self._engine, table), cached

    def _hold(self, sequence: Sequence) -> tuple[Hold, Running] | None:
        """In the engine's thread: end the sequence here, and keep its pages."""
        self._thread.settle()
        if sequence.finish_reason:
            return None
        self._engine.scheduler.bring_back(sequence)
        if not sequence.cached:
            raise KvlatheError(
                "this sequence cannot be exported",
                "nothing of it is cached yet: it waits, or its prompt is between layers",
                "send its prompt, or ask again later",
            )
        table = sequence.table
        self._pool.share(table.pages)
        pages: Pages = [list(ids) for ids in table.pages]
        counts = list(table.lengths), list(table.arrived)
        held = PageTable(pages, *counts, table.base, table.state)
        running = running_of(sequence)
        self._thread.move_out(sequence)
        return Hold(self._engine, held), running

    def _departure(
        self,
        hold: Hold,
        tokens: list[int],
        cached: int,
        running: Running | None,
        whole: bool = False,
    ) -> Departure:
        table = hold.table
        cuts = [0] * len(table.lengths) if whole else self._cuts(table.lengths)
        ids: list[tuple[int, ...]] = []
        for pages, cut in zip(table.pages, cuts, strict=True):
            full = pages[:-1] if cut else pages
            ids.append(tuple(full))

        sizes: list[tuple[int, ...]] = []
        for full, stride in zip(ids, self._layout.page_stride, strict=True):
            sizes.append((stride,) * len(full))

        def describe(digests: Digests) -> Parcel:
            return Parcel(
                listed=PageList(self.origin, tuple(sizes), digests),
                ids=tuple(ids),
                history=history_of(tokens),
                cached=cached,
                lengths=tuple(table.lengths),
                arrived=tuple(table.arrived),
                rows=self._thread.call(partial(self._last_rows, table, cuts)),
                base=_base_of(table),
                running=running,
                state=self._thread.call(partial(self._state_of, table)),
            )

        return Departure(self._engine, self._thread, hold, describe, ids)

    def _cuts(self, lengths: Items[int]) -> list[int]:
        """Tokens of each bucket that travel as rows, unless their pages go whole."""
        return [self._rows.cut(b, length) for b, length in enumerate(lengths)]

    def _cuts_of(self, parcel: Parcel) -> list[int]:
        """Tokens of each bucket that came as rows. Raises KvlatheError for a parcel of
        other buckets."""
        check_buckets(self._layout, parcel)
        cuts = zip(self._cuts(parcel.lengths), parcel.rows, strict=True)
        return [cut if rows else 0 for cut, rows in cuts]

    def _state_of(self, table: PageTable) -> StateBytes | None:
        if table.state is None:
            return None
        return StateBytes.of(self._engine.session.read_state(table.state))

    def _last_rows(self, table: PageTable, cuts: Items[int]) -> tuple[str, ...]:
        rows: list[str] = []
        for bucket, cut in enumerate(cuts):
            text = b""
            if cut:
                page = self._engine.session.read_page(bucket, table.pages[bucket][-1])
                text = base64.b64encode(self._rows.take(bucket, page, cut))
            rows.append(text.decode())
        return tuple(rows)

    # -- pages arrive ------------------------------------------------------------------
    def expect(self, parcel: Parcel) -> Arrival:
        """Take pages for a parcel. Raises KvlatheError for one of another build or that
        is no page table of this plan, OutOfPages where the pool has no room just
        now."""
        self.origin.check(parcel.listed.origin)
        check_parcel(self._layout, parcel, self._cuts_of(parcel))
        hold = self._thread.call(partial(self._room, parcel))
        return Arrival(self._engine, self._thread, parcel, hold)

    def _room(self, parcel: Parcel) -> Hold:
        pages = self._pool.take(self._layout.pages_of(parcel.lengths, parcel.arrived))
        table = PageTable(pages, list(parcel.lengths), list(parcel.arrived))
        return Hold(self._engine, table)

    def unpack(self, data: bytes | memoryview) -> Arrival:
        """``expect`` what was packed, and fill it. Raises KvlatheError as that and for
        bytes that were damaged."""
        text, body = unpack(data)
        arrival = self.expect(heard(Parcel, text))
        try:
            arrival.fill(body)
        except BaseException:
            arrival.close()
            raise
        return arrival

    def adopt_prefix(self, arrival: Arrival, salt: bytes = b"") -> int:
        """Let requests of the tenant ``salt`` that begin with these tokens go on from
        here; how many tokens that is. The arrival is closed."""
        if arrival.parcel.running is not None:
            arrival.close()
            fact, reason = (
                "no prefix can be adopted from this parcel",
                "it is a sequence",
            )
            raise KvlatheError(fact, reason, "adopt it as one")
        with arrival:
            return self._thread.call(partial(self._adopt_prefix, arrival, salt))

    def adopt_sequence(
        self, arrival: Arrival, salt: bytes = b"", on_delta: OnDelta | None = None
    ) -> Request:
        """The request of the sequence, which goes on from here. ``on_delta`` as in
        EngineThread.submit; it is told of what is new. The arrival is closed."""
        with arrival:
            sequence = resumed(self._factory, arrival.parcel, salt)
            self._thread.call(partial(self._adopt_sequence, arrival, sequence))
            try:
                return self._thread.submit([sequence], on_delta)
            except BaseException:
                self._pool.release(sequence.table)  # the engine has stopped
                raise

    def _adopt_prefix(self, arrival: Arrival, salt: bytes) -> int:
        parcel, prefixes = arrival.parcel, self.prefixes
        table = self._whole(arrival, salt)
        try:
            if table.base is not None:
                self._pool.share(table.base.pages)
                prefixes.replace(table.base)
            prefixes.add(table, parcel.tokens, salt)
        finally:
            self._pool.release(table)
        return parcel.cached

    def _adopt_sequence(self, arrival: Arrival, sequence: Sequence) -> None:
        sequence.table = self._whole(arrival, sequence.salt)

    def _whole(self, arrival: Arrival, salt: bytes) -> PageTable:
        """In the engine's thread: the table of an arrival, with the rows of its last
        pages."""
        parcel = arrival.parcel
        for bucket, cut in enumerate(self._cuts_of(parcel)):
            if cut:
                page = self._rows.page(bucket, rows_of(parcel, bucket), cut)
                self._engine.session.write_page(bucket, arrival.last_page(bucket), page)
        table = arrival.take()
        base = parcel.base
        if base is not None:
            pages: Pages = []
            for ids, count in zip(table.pages, base.pages, strict=True):
                pages.append(ids[:count])
            table.base = self.prefixes.compacted_of(
                parcel.tokens[: base.cached], salt, base.share, pages, base.lengths
            )
        return table

    @property
    def prefixes(self) -> PrefixCache:
        """Raises KvlatheError where none are kept."""
        found = self._engine.scheduler.prefixes
        if found is None:
            raise KvlatheError(
                "this engine keeps no prefixes",
                "it was loaded without sharing",
                "load it with share_prefixes",
            )
        return found


def _base_of(table: PageTable) -> Base | None:
    base = table.base
    if base is None:
        return None
    counts = tuple(len(ids) for ids in base.pages)
    return Base(base.cached, base.share, tuple(base.lengths), counts)


def _refuse_adapter(sequence: Sequence) -> None:
    """Raises KvlatheError for a sequence that another engine could not go on with."""
    if sequence.adapter is not None:
        raise KvlatheError(
            "this sequence stays in its engine",
            f"its pages were computed with the adapter {sequence.adapter.name}, and a "
            "parcel names none",
            "send the prompt to the other engine, and the adapter's name with it",
        )
