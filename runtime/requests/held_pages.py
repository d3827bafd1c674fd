"""Pages that are held between two pools: a Departure's stay until they were read, an
Arrival's wait to be filled. What touches the pool runs in the engine's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

from kvlathe.base.closing import ClosesAtExit
from kvlathe.base.errors import EngineStopped, KvlatheError
from kvlathe.plan.page_digest import digest_of_sums, page_digest
from kvlathe.runtime.cache.page_table import Pages, PageTable
from kvlathe.runtime.cache.parcel import Parcel, damaged, pack
from kvlathe.runtime.requests.engine_thread import EngineThread
from kvlathe.runtime.scheduling.engine import Engine
from kvlathe.runtime.sessions.protocols import Int64, Region, Session

BATCH = 1 << 26
"""Bytes that are read or written between two steps: others wait for them."""
Place = tuple[int, int, int]
"""A page: its bucket, its place in the list, its id in the pool."""
Digests = tuple[tuple[str, ...], ...]
"""Digests of each bucket's pages."""


@dataclass(frozen=True, slots=True)
class Piece:
    """``size`` adjacent bytes, here and there: one entry of a transfer list."""

    source: int
    target: int
    size: int


class Hold:
    """Pages of ``table`` that no running sequence has. While they are held, who finds
    no page waits for them. Made and used in the engine's thread."""

    def __init__(self, engine: Engine, table: PageTable) -> None:
        self.table = table
        self._pool = engine.pool
        self._borrowed = ExitStack()
        self._borrowed.enter_context(engine.scheduler.borrowed_pages())

    def take(self) -> PageTable:
        """The table, which is the caller's now."""
        table = self.table
        self.table = self._pool.open()
        return table

    def leave(self) -> None:
        """Keep the pages for who knows how long: nobody is to wait for them."""
        self._borrowed.close()

    def close(self) -> None:
        """Give the pages back; nobody waits for them any more."""
        self._pool.release(self.table)
        self._borrowed.close()


class HeldPages(ClosesAtExit):
    """Pages of a ``hold``, which are nobody else's to write until ``close``."""

    def __init__(self, engine: Engine, thread: EngineThread, hold: Hold) -> None:
        self._engine, self._thread, self._hold = engine, thread, hold
        self.parcel: Parcel

    def _places(self, ids: Items[Items[int]]) -> Iterator[list[Place]]:
        """Batches of pages that are moved between two steps."""
        batch: list[Place] = []
        size = 0
        for bucket, of_bucket in enumerate(ids):
            for place, page in enumerate(of_bucket):
                batch.append((bucket, place, page))
                size += self._engine.pool.strides[bucket]
                if size >= BATCH:
                    yield batch
                    batch, size = [], 0
        yield batch

    def _read(self, ids: Items[Items[int]]) -> Iterator[tuple[int, bytes]]:
        """The bytes of pages, each with its bucket."""
        read = self._engine.session.read_page

        def read_all(batch: list[Place]) -> list[tuple[int, bytes]]:
            return [(bucket, read(bucket, page)) for bucket, _, page in batch]

        for batch in self._places(ids):
            yield from self._thread.call(partial(read_all, batch))

    def _digests(self, ids: Items[Items[int]]) -> Digests:
        """Digests of pages, once what was asked of them so far is done. Where the
        session sums pages itself, their bytes stay where they are."""
        session = self._engine.session
        found: list[list[str]] = [[] for _ in ids]
        if "page_sums" not in session.capabilities:
            for bucket, page in self._read(ids):
                found[bucket].append(page_digest(page))
            return tuple(map(tuple, found))
        sums = self._thread.call(partial(_sums_of, session, ids))
        for of_bucket, arrived in zip(found, sums, strict=True):
            of_bucket += map(digest_of_sums, arrived())
        return tuple(map(tuple, found))

    def close(self) -> None:
        """Give the pages back. Harmless after a first time, and once the engine is
        closed."""
        with suppress(EngineStopped):
            self._thread.call(self._hold.close)


class Departure(HeldPages):
    """A ``parcel``, and its pages in the pool. They stay what they are until ``close``
    says that they have arrived."""

    def __init__(
        self,
        engine: Engine,
        thread: EngineThread,
        hold: Hold,
        describe: Callable[[Digests], Parcel],
        ids: Items[Items[int]],
    ) -> None:
        super().__init__(engine, thread, hold)
        try:
            self.parcel = describe(self._digests(ids))
        except BaseException:
            self.close()
            raise

    def packed(self) -> bytes:
        """Description, pages and state in one piece."""
        pages = [page for _, page in self._read(self.parcel.ids)]
        if self.parcel.state is not None:
            pages.append(self._thread.call(self._state))
        return b"".join(pack(self.parcel.to_json(), [pages]))

    def _state(self) -> bytes:
        return self._engine.session.read_state(self._hold.table.state)


class Arrival(HeldPages):
    """Pages of this pool for a ``parcel`` that is on its way: ``ids``, of each bucket,
    in its order. ``close`` gives them back, unless they were adopted."""

    def __init__(
        self, engine: Engine, thread: EngineThread, parcel: Parcel, hold: Hold
    ) -> None:
        super().__init__(engine, thread, hold)
        self.parcel = parcel
        full: Pages = []
        for own, theirs in zip(hold.table.pages, parcel.ids, strict=True):
            full.append(own[: len(theirs)])
        self.ids = full

    def pieces(self, source: Region) -> list[Piece]:
        """Ranges to read from the pool ``source`` that the pages left, and where to
        write it: pages that are adjacent in both pools are one piece. Waits until no
        step that still runs writes to these pages: who had them before may have just
        ended. Raises KvlatheError where this pool's memory has no address."""
        memory = memory_of(self._engine)
        self._thread.call(memory.mark)()
        here = memory.region.address
        strides = self._engine.pool.strides
        found: list[Piece] = []
        for b, (theirs, own) in enumerate(zip(self.parcel.ids, self.ids, strict=True)):
            for left, page in zip(theirs, own, strict=True):
                begin = source.address + left * strides[b]
                piece = Piece(begin, here + page * strides[b], strides[b])
                if found and _adjacent(found[-1], piece):
                    whole = found[-1].size + piece.size
                    piece = Piece(found[-1].source, found[-1].target, whole)
                    found.pop()
                found.append(piece)
        return found

    def fill(self, body: memoryview) -> None:
        """Write the bytes behind a packed description. Raises KvlatheError for a page
        that is not what was listed; nothing is adopted then."""
        pages, state = self.parcel.split(body)
        write = self._engine.session.write_page

        def write_all(batch: list[Place]) -> None:
            for bucket, place, page in batch:
                write(bucket, page, bytes(pages[bucket][place]))

        for batch in self._places(self.ids):
            self._thread.call(partial(write_all, batch))
        if state:
            self._hold.table.state = self._engine.session.write_state(state)

    def check(self) -> None:
        """After bytes came by address: raises KvlatheError for a page that is not what
        was listed."""
        for bucket, digests in enumerate(self._digests(self.ids)):
            for place, digest in enumerate(digests):
                self.parcel.listed.check(bucket, place, digest)

    def last_page(self, bucket: int) -> int:
        """Its page for the rows of a bucket."""
        return self._hold.table.pages[bucket][-1]

    def leave(self) -> None:
        """Nobody is to wait for these pages: when they come back is not known. Harmless
        once the engine is closed."""
        with suppress(EngineStopped):
            self._thread.call(self._hold.leave)

    def take(self) -> PageTable:
        """In the engine's thread: the table, which is the caller's now. Whom it gives
        pages to waits in line before ``close``. Raises KvlatheError where a state has
        not come."""
        if self.parcel.state is not None and self._hold.table.state is None:
            raise damaged("its state has not come: it goes packed")
        return self._hold.take()


def _sums_of(session: Session, ids: Items[Items[int]]) -> list[Callable[[], Int64]]:
    """Functions that wait for the row sums of each bucket's pages."""
    return [session.row_sums(bucket, pages) for bucket, pages in enumerate(ids)]


def memory_of(engine: Engine) -> Session:
    """The session, which says where its pool is. Raises KvlatheError where it does
    not, and where that is not all of a sequence."""
    session = engine.session
    if any(engine.pool.plan.model.states):
        raise KvlatheError(
            "pages cannot go by address",
            "some of the engine's layers keep a state, which is in no page",
            "send them packed, or send the prompt to the other engine",
        )
    if "pool_memory" in session.capabilities:
        return session
    raise KvlatheError(
        "pages cannot go by address",
        f"{type(session).__name__} does not say where its pool is",
        "send them packed",
    )


def _adjacent(before: Piece, after: Piece) -> bool:
    source = before.source + before.size == after.source
    return source and before.target + before.size == after.target
