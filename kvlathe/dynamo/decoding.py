"""The decode worker's part: pages come from the prefill worker's pool into this one,
and the sequence goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from itertools import pairwise

from kvlathe.base.console import log
from kvlathe.base.errors import KvlatheError
from kvlathe.dynamo.asked import Asked
from kvlathe.dynamo.following import Context, Following
from kvlathe.dynamo.handoff import Handoff, asked_again, said_before
from kvlathe.dynamo.link import Link, failure
from kvlathe.dynamo.told import Chunk, Told, cut
from kvlathe.runtime.async_engine import AsyncEngine
from kvlathe.runtime.cache.parcel import Parcel
from kvlathe.runtime.requests.held_pages import Arrival
from kvlathe.runtime.requests.request import OnDelta, Request

MOST_SECONDS = 30.0
"""Seconds that a request waits for its pages: a peer that takes longer is gone or
stalls."""


class Decoding:
    """Decode side of one worker: it fetches pages from prefill workers and goes on."""

    def __init__(self, engine: AsyncEngine, link: Link, following: Following) -> None:
        self._exchange = engine.llm.exchange
        self._link, self._following = link, following
        self._late: dict[asyncio.Task[None], str] = {}
        """Transfers that nobody waits for, and the agents that they come from."""

    async def fetch(self, asked: Asked, fields: Mapping[str, object]) -> Arrival | None:
        """Pages of a handoff, here. None where they could not be had, which the log
        says: the prompt is computed here then. Raises KvlatheError for pages of another
        build."""
        source = Handoff.from_fields(fields)
        try:
            self._exchange.origin.check(source.parcel.listed.origin)
        except KvlatheError:
            self._link.release(source)
            raise
        try:
            return await self._fetch(asked, source)
        except KvlatheError as error:
            log.warning("a prompt is computed again: %s", error)
            return None

    async def _fetch(self, asked: Asked, source: Handoff) -> Arrival:
        if source.agent in self._late.values():
            raise failure(source, "an earlier transfer from there has not ended")
        times = [time.perf_counter()]
        parcel = asked_again(source.parcel, asked.params)
        arrival = await self._expect(parcel)
        reading: asyncio.Task[None] | None = None
        try:
            pieces = await asyncio.to_thread(arrival.pieces, source.region)
            times.append(time.perf_counter())
            reading = asyncio.create_task(self._link.read(source, pieces))
            await asyncio.wait([reading], timeout=MOST_SECONDS)
            if not reading.done():
                raise failure(source, f"not there after {MOST_SECONDS:g} s")
            reading.result()
            times.append(time.perf_counter())
            await asyncio.to_thread(arrival.check)
            times.append(time.perf_counter())
        except BaseException:
            await self._give_back(source, arrival, reading)
            raise
        parts: list[float] = []
        for before, after in pairwise(times):
            seconds = after - before
            parts.append(1e3 * seconds)
        log.info(
            "%s bytes of %d tokens came from %s in %d pieces:"
            " reserved in %.1f ms, read in %.1f, checked in %.1f",
            f"{parcel.page_bytes:,}",
            parcel.cached,
            source.agent,
            len(pieces),
            *parts,
        )
        return arrival

    async def _expect(self, parcel: Parcel) -> Arrival:
        """Reserve pages for a parcel. Where the request is cancelled meanwhile, they
        are given back."""
        expecting = asyncio.create_task(
            asyncio.to_thread(self._exchange.expect, parcel)
        )
        try:
            return await asyncio.shield(expecting)
        except asyncio.CancelledError:
            expecting.add_done_callback(_close)
            raise

    async def _give_back(
        self, source: Handoff, arrival: Arrival, reading: asyncio.Task[None] | None
    ) -> None:
        """The pages of an arrival that nobody waits for: at once, or as soon as nothing
        is written to them any more."""
        if reading is None or reading.done():
            await asyncio.to_thread(arrival.close)
            return
        log.warning("pages stay reserved until a transfer from %s ends", source.agent)
        late = asyncio.create_task(_close_after(arrival, reading))
        self._late[late] = source.agent
        late.add_done_callback(self._late.pop)
        await asyncio.to_thread(arrival.leave)

    async def settle(self, seconds: float) -> None:
        """Wait for late transfers, at most so long: the pool is freed after this."""
        if self._late:
            await asyncio.wait(list(self._late), timeout=seconds)

    async def chunks(
        self, asked: Asked, arrival: Arrival, context: Context
    ) -> AsyncGenerator[Chunk, None]:
        """The answer, of which the other worker's token is the first."""
        told = Told(len(asked.tokens), asked.params.logprobs is not None)
        said = told.chunk(said_before(arrival.parcel))
        first = cut(said, asked.params.max_new_tokens)
        yield first
        if "finish_reason" in first:
            await asyncio.to_thread(arrival.close)
            return
        begin = partial(self._adopt, arrival, asked.tenant.encode())
        async for delta in self._following.follow(context, begin):
            yield told.chunk(delta)

    async def _adopt(self, arrival: Arrival, salt: bytes, on_delta: OnDelta) -> Request:
        adopt = self._exchange.adopt_sequence
        return await asyncio.to_thread(adopt, arrival, salt, on_delta)


async def _close_after(arrival: Arrival, reading: asyncio.Task[None]) -> None:
    await asyncio.wait([reading])
    ended = "cancelled" if reading.cancelled() else reading.exception() or "done"
    log.info("a late transfer has ended (%s), and its pages are given back", ended)
    await asyncio.to_thread(arrival.close)


def _close(expecting: asyncio.Task[Arrival]) -> None:
    """Nobody waits for these pages any more."""
    if not expecting.cancelled() and expecting.exception() is None:
        threading.Thread(target=expecting.result().close).start()
