"""The prefill worker's part: a prompt up to its first token, and pages that are held
until the decode worker has read them."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from uuid import uuid4

from kvlathe.base.console import log
from kvlathe.dynamo.asked import Asked
from kvlathe.dynamo.handoff import Handoff
from kvlathe.dynamo.link import Link
from kvlathe.dynamo.told import Chunk, Told
from kvlathe.runtime.async_engine import AsyncEngine
from kvlathe.runtime.requests.held_pages import Departure
from kvlathe.runtime.requests.request import Delta
from kvlathe.runtime.scheduling.sequence import Sequence

LEASE_SECONDS = 60.0
"""Seconds after which pages that nobody has read are given back."""
WATCH_SECONDS = 0.01
SPARE = 256
"""Tokens that a sequence might get before its pages leave."""


@dataclass(frozen=True, slots=True)
class Held:
    departure: Departure
    until: float


class Prefilling:
    """Prefill side of one worker. ``handed``: bytes of pages that were offered so
    far."""

    def __init__(self, engine: AsyncEngine, link: Link) -> None:
        self._engine, self._link = engine, link
        self._held: dict[str, Held] = {}
        self.handed = 0
        most = engine.max_waiting + engine.llm.limits.max_batch_size
        self._threads = ThreadPoolExecutor(most, "kvlathe-prefill")

    @property
    def idle(self) -> bool:
        """Whether no pages wait to be read."""
        return not self._held

    async def chunk(self, asked: Asked) -> Chunk:
        """The only chunk: the first token, and the handoff or the answer that ended
        with it. Raises what the engine refuses."""
        llm = self._engine.llm
        self._engine.check_count(1)
        room = llm.limits.max_seq_len - len(asked.tokens)
        # Its pages leave as soon as the first token is there; until then the engine
        # goes on, so more tokens must be allowed than were asked for.
        most = max(1, min(SPARE, room))
        params = dataclasses.replace(asked.params, max_new_tokens=most)
        sequence = llm.sequence(asked.tokens, params)
        sequence.salt = asked.tenant.encode()
        begun = time.perf_counter()
        future = self._threads.submit(llm.exchange.prefill, sequence, True)
        try:
            departure = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_close)
            raise
        told = Told(len(asked.tokens), params.logprobs is not None)
        chunk = told.chunk(_first(sequence))
        handed: dict[str, object] = {"ended": dict(chunk)}
        if departure is not None:
            handed = self._hold(departure).to_fields()
            seconds = time.perf_counter() - begun
            log.info(
                "%d tokens are held after %.1f ms", len(asked.tokens), 1e3 * seconds
            )
        return chunk | {"disaggregated_params": handed}

    def _hold(self, departure: Departure) -> Handoff:
        name, link = uuid4().hex, self._link
        self._held[name] = Held(departure, time.monotonic() + LEASE_SECONDS)
        self.handed += departure.parcel.page_bytes
        region = link.region
        return Handoff(
            name=name,
            agent=link.name,
            metadata=link.metadata,
            address=region.address,
            size=region.size,
            device=region.device,
            parcel=departure.parcel,
        )

    async def watch(self) -> None:
        """Give pages back that were read, or waited too long. Runs until cancelled."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            over = self._link.released()
            now = time.monotonic()
            for name, held in self._held.items():
                if held.until < now:
                    log.warning("pages that nobody has read are given back")
                    over.append(name)
            for name in over:
                held = self._held.pop(name, None)
                if held is not None:
                    await asyncio.to_thread(held.departure.close)

    def close(self) -> None:
        for held in self._held.values():
            held.departure.close()
        self._held.clear()
        self._threads.shutdown(wait=False)


def _first(sequence: Sequence) -> Delta:
    """The delta of all that a sequence has said when it leaves."""
    reason = sequence.finish_reason
    return Delta(
        index=0,
        text="",
        token_ids=tuple(sequence.answer),
        logprobs=tuple(sequence.logprobs),
        prompt_logprobs=tuple(sequence.prompt_logprobs),
        finish_reason="length" if reason == "moved" else reason,
        error=sequence.error,
    )


def _close(future: Future[Departure | None]) -> None:
    """Nobody waits for these pages any more."""
    departure = None if future.exception() else future.result()
    if departure is not None:
        departure.close()
