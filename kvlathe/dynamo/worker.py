"""The engine as Dynamo's worker: what its runtime calls."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, Protocol

from kvlathe.base.errors import Busy, DeviceLost, EngineStopped, KvlatheError
from kvlathe.dynamo.asked import Asked, Fields, part_of
from kvlathe.dynamo.blocks import BlockEvents, Load, Publisher
from kvlathe.dynamo.decoding import Decoding
from kvlathe.dynamo.following import Context, Following
from kvlathe.dynamo.link import Link
from kvlathe.dynamo.prefilling import Prefilling
from kvlathe.dynamo.told import Chunk, Told, cut
from kvlathe.runtime.async_engine import AsyncEngine, Closing
from kvlathe.runtime.requests.request import OnDelta, Request

Mode = Literal["agg", "prefill", "decode"]
SNAPSHOT_SECONDS = 0.1
"""Seconds between two reports of the load."""

# Dynamo has no types to check against, and may be missing: not an import statement.
backend = importlib.import_module("dynamo.common.backend")
publisher = importlib.import_module("dynamo.common.backend.publisher")
exceptions = importlib.import_module("dynamo.llm.exceptions")


@dataclass(frozen=True, slots=True)
class Served:
    """``card``: the folder that frontends read (card.py)."""

    engine: AsyncEngine
    name: str
    card: Path
    mode: Mode
    drain_seconds: float


class KvlatheWorker(backend.LLMEngine):
    """One engine in one role."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._engine = served.engine
        self._llm = served.engine.llm
        self._following = Following(self._engine)
        self._prefilling: Prefilling | None = None
        self._decoding: Decoding | None = None
        self._load = Load(self._engine, self._block)
        self._snapshots: Snapshots | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def _block(self) -> int:
        """Tokens of a block that the router counts in."""
        prefixes = self._llm.engine.scheduler.prefixes
        return prefixes.block if prefixes else self._llm.plan.page_tokens

    # -- life --------------------------------------------------------------------------
    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> NoReturn:
        """Dynamo's own command line would call it. Ours is read in run.py, which makes
        the worker."""
        raise TypeError("KvlatheWorker is made by kvlathe dynamo")

    async def start(self, worker_id: int) -> object:
        mode = self._served.mode
        self._begin(self._report())
        if mode != "agg":
            link = Link(f"kvlathe-{worker_id:x}", self._llm.exchange.memory)
            if mode == "prefill":
                self._prefilling = Prefilling(self._engine, link)
                self._begin(self._prefilling.watch())
            else:
                self._decoding = Decoding(self._engine, link, self._following)
        limits = self._llm.limits
        registration = backend.LlmRegistration(
            context_length=limits.max_seq_len,
            kv_cache_block_size=self._block,
            total_kv_blocks=self._load.total,
            max_num_seqs=limits.max_batch_size,
            max_num_batched_tokens=limits.max_num_tokens,
        )
        return backend.EngineConfig(
            model=str(self._served.card),
            served_model_name=self._served.name,
            llm=registration,
        )

    async def is_quiescent(self) -> bool:
        """Asked of a prefill worker that stops: whether nobody needs its pages."""
        return self._prefilling is None or self._prefilling.idle

    async def cleanup(self) -> None:
        for task in self._tasks:
            task.cancel()
        prefixes = self._llm.engine.scheduler.prefixes
        if prefixes:
            prefixes.observer = None
        if self._prefilling:
            await asyncio.to_thread(self._prefilling.close)
            self._prefilling = None
        if self._decoding:
            await self._decoding.settle(self._served.drain_seconds)
        await asyncio.to_thread(self._engine.close, self._served.drain_seconds)

    def _begin(self, work: Coroutine[object, object, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    # -- for the router ----------------------------------------------------------------
    async def kv_event_sources(self) -> list[object]:
        if self._llm.engine.scheduler.prefixes is None:
            return []
        return [publisher.PushSource(on_ready=self._observe)]

    def _observe(self, events: Publisher) -> None:
        prefixes = self._llm.engine.scheduler.prefixes
        if prefixes:
            prefixes.observer = BlockEvents(events)

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots  # in a thread of Dynamo's own

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(SNAPSHOT_SECONDS)
            if self._snapshots is None:
                continue
            used, total = self._load.used, self._load.total
            snapshot = publisher.ComponentSnapshot(
                kv_used_blocks=used,
                kv_total_blocks=total,
                gpu_cache_usage=used / total,
                dp_rank=0,
                kv_cache_hit_rate=self._load.hit_rate,
            )
            self._snapshots.publish(0, snapshot)

    # -- requests ----------------------------------------------------------------------
    async def generate(
        self, request: Fields, context: Context
    ) -> AsyncGenerator[Chunk, None]:
        """Answer one request of a frontend, in its chunks."""
        try:
            asked = Asked.of(request, self._llm.limits.max_seq_len)
            async with aclosing(self._chunks(asked, request, context)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except Exception as error:
            raise translate(error) from error

    async def abort(self, context: Context) -> None:
        self._following.abort(context)

    async def _chunks(
        self, asked: Asked, request: Fields, context: Context
    ) -> AsyncGenerator[Chunk, None]:
        handed = part_of(part_of(request, "prefill_result"), "disaggregated_params")
        if self._prefilling:
            yield await self._prefilling.chunk(asked)
            return
        if handed and "ended" in handed:
            yield cut(dict(part_of(handed, "ended")), asked.params.max_new_tokens)
            return
        arrival = None
        if handed and self._decoding:
            arrival = await self._decoding.fetch(asked, handed)
        if arrival is not None and self._decoding:
            chunks = self._decoding.chunks(asked, arrival, context)
        else:
            chunks = self._answer(asked, context)
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def _answer(
        self, asked: Asked, context: Context
    ) -> AsyncGenerator[Chunk, None]:
        """Computed here as a whole."""
        told = Told(len(asked.tokens), asked.params.logprobs is not None)

        async def begin(on_delta: OnDelta) -> Request:
            tokens, params = [asked.tokens], asked.params
            return self._engine.submit(tokens, params, on_delta, tenant=asked.tenant)

        async for delta in self._following.follow(context, begin):
            yield told.chunk(delta)


class Snapshots(Protocol):
    """Dynamo's SnapshotPublisher, as far as we use it."""

    def publish(self, rank: int, snapshot: object) -> None: ...


def translate(error: Exception) -> Exception:
    """The error as Dynamo's frontends understand it. Requests of a worker that ends go
    to another one; a refusal of a request goes back to its client."""
    if isinstance(error, Closing | EngineStopped | DeviceLost):
        return exceptions.EngineShutdown(str(error))
    if isinstance(error, Busy):
        return exceptions.WorkerUnavailable(str(error))
    if isinstance(error, KvlatheError):
        return exceptions.InvalidArgument(str(error))
    return error
