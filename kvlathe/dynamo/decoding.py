"""The decode worker's part: pages come from the prefill worker's pool into this one, and
the sequence goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from itertools import pairwise

from kvlathe.base.console import log
from kvlathe.base.errors import KvlatheError
from kvlathe.dynamo.asked import Asked
from kvlathe.dynamo.following import Context, Following
from kvlathe.dynamo.handoff import Handoff, asked_again, said_before
from kvlathe.dynamo.link import Link, failed
from kvlathe.dynamo.told import Chunk, Told, cut
from kvlathe.runtime.async_engine import AsyncEngine
from kvlathe.runtime.requests.held_pages import Arrival
from kvlathe.runtime.requests.request import OnDelta, Request

MOST_SECONDS = 30.0
"""That a request waits for its pages: a peer that takes longer is gone or stalls."""


class Decoding:
    """Of one worker."""

    def __init__(self, engine: AsyncEngine, link: Link, following: Following) -> None:
        self._exchange = engine.llm.exchange
        self._link, self._following = link, following
        self._late: set[asyncio.Task[None]] = set()

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
        times = [time.perf_counter()]
        parcel = asked_again(source.parcel, asked.params)
        arrival = await asyncio.to_thread(self._exchange.expect, parcel)
        reading: asyncio.Task[None] | None = None
        try:
            pieces = await asyncio.to_thread(arrival.pieces, source.region)
            times.append(time.perf_counter())
            reading = asyncio.create_task(self._link.read(source, pieces))
            await asyncio.wait([reading], timeout=MOST_SECONDS)
            if not reading.done():
                raise failed(source, f"not there after {MOST_SECONDS:g} s")
            reading.result()
            times.append(time.perf_counter())
            await asyncio.to_thread(arrival.check)
            times.append(time.perf_counter())
        except BaseException:
            await self._give_back(arrival, reading)
            raise
        parts: list[float] = []
        for before, after in pairwise(times):
            seconds = after - before
            parts.append(1e3 * seconds)
        size = f"{parcel.page_bytes:,}"
        log.info(
            "%s bytes of %d tokens came from %s in %d pieces:"
            " reserved in %.1f ms, read in %.1f, checked in %.1f",
            size,
            parcel.cached,
            source.agent,
            len(pieces),
            *parts,
        )
        return arrival

    async def _give_back(
        self, arrival: Arrival, reading: asyncio.Task[None] | None
    ) -> None:
        """The pages of an arrival that nobody waits for: at once, or as soon as nothing
        is written to them any more."""
        if reading is None or reading.done():
            await asyncio.to_thread(arrival.close)
            return
        log.warning("pages stay reserved: a transfer to them has not ended")
        late = asyncio.create_task(_close_after(arrival, reading))
        self._late.add(late)
        late.add_done_callback(self._late.discard)

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
    if not reading.cancelled():
        reading.exception()  # said where the request waited
    await asyncio.to_thread(arrival.close)
