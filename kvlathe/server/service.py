"""Service: the objects that all paths answer from, and what their answers share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from ipaddress import IPv6Address, IPv6Network
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from kvlathe.runtime.async_engine import AsyncEngine
from kvlathe.server.answers import Answerer
from kvlathe.server.errors import ApiError, ErrorResponse
from kvlathe.server.jobs import Job
from kvlathe.server.metrics import Metrics
from kvlathe.server.replies import ModelCard
from kvlathe.server.schema import ChatRequest, CompletionRequest

FAILURES: dict[int | str, dict[str, Any]] = {
    400: {"description": "A field is wrong; `param` names it."},
    401: {"description": "No API key, or an unknown one."},
    404: {"description": "No such model."},
    408: {"description": "`deadline_seconds` passed, or the body never ended."},
    413: {"description": "The body is too large."},
    422: {
        "description": "This engine cannot do it: no tokenizer, no chat template, or the template refused."
    },
    429: {"description": "The queue is full; `Retry-After` says when to come back."},
    500: {"description": "The engine failed on this request."},
    503: {"description": "The server is shutting down, or has no room just now."},
}
ERRORS = {status: said | {"model": ErrorResponse} for status, said in FAILURES.items()}
EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}},
}
STREAM = {
    200: {
        "content": {
            "text/event-stream": {
                "schema": EVENT | {"description": "`data`: a chunk, or [DONE]"}
            }
        }
    }
}
UNBUFFERED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Headers of streams. Without them nginx would collect the pieces."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Service:
    """The objects that all paths answer from. ``started``: Unix seconds."""

    engine: AsyncEngine
    metrics: Metrics
    answerer: Answerer
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def models(self) -> list[str]:
        """The names that requests may give: the model's, and those of its adapters."""
        loaded = self.engine.llm.adapters.loaded
        return [self.answerer.model, *(one.name for one in loaded)]

    def check(self, name: str, param: str = "model") -> None:
        """Raises ApiError where another model is asked for."""
        names = self.models
        if name not in names:
            there = ", ".join(f"`{one}`" for one in names)
            raise ApiError(
                404,
                f"The model `{name:.80}` does not exist: this server has {there}",
                param,
                "model_not_found",
            )

    def card(self, name: str) -> ModelCard:
        """The model that is served, or an adapter of it."""
        model = self.answerer.model
        llm = self.engine.llm
        bytes_of = llm.manifest.kv_bytes if llm.manifest else None
        per_token = bytes_of.per_token if bytes_of else llm.layout.bytes_per_token()
        return ModelCard(
            id=name,
            root=model,
            parent=None if name == model else model,
            created=self.started,
            display_name=name,
            created_at=f"{datetime.fromtimestamp(self.started, UTC):%Y-%m-%dT%H:%M:%SZ}",
            max_model_len=llm.most_tokens,
            kv_bytes_per_token=per_token,
            kv_bytes_removed=bytes_of.removed if bytes_of else 0.0,
        )

    async def job(self, request: Request, body: CompletionRequest | ChatRequest) -> Job:
        """The request as the engine takes it. Raises ApiError."""
        origin = self.answerer.spans.origin(request.headers)
        work = self.answerer.job(body, client_of(request))
        job = await while_connected(request, work)
        job.origin = origin
        return job

    async def prepared(self, request: Request, work: Callable[[], T]) -> T:
        """The result of ``work``, once it is the client's turn. It leaves its line where
        the client leaves."""
        turn = self.answerer.turns.run(client_of(request), work)
        return await while_connected(request, turn)

    async def answer(self, request: Request, job: Job, stream: bool | None) -> Response:
        """The whole answer, or a stream of events."""
        tenant = request.state.tenant
        if not stream:
            whole = self.answerer.whole(job, tenant)
            return JSONResponse(await while_connected(request, whole))
        return await self.stream(request, self.answerer.events(job, tenant))

    async def stream(
        self, request: Request, events: AsyncGenerator[str, None]
    ) -> Response:
        """A stream of events."""
        # What is refused is refused with a status, before the stream begins.
        first = await while_connected(request, anext(events))

        async def rest() -> AsyncGenerator[str, None]:
            try:
                yield first
                async for event in events:
                    yield event
            finally:
                await events.aclose()

        return StreamingResponse(
            rest(), media_type="text/event-stream", headers=UNBUFFERED
        )


def client_of(request: Request) -> str:
    """Clients take turns at what is computed before their prompts: by their key, or
    where nobody needs one, by their address: of IPv6 by its first 64 bits, since one
    machine has all the others."""
    host = request.client.host if request.client else ""
    return request.state.tenant or network_of(host)


def network_of(host: str) -> str:
    """The network that one client has.

    >>> network_of("2001:db8::7"), network_of("::ffff:192.0.2.1"), network_of("a")
    ('2001:db8::/64', '192.0.2.1', 'a')
    """
    try:
        address = IPv6Address(host)
    except ValueError:
        return host
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(IPv6Network((int(address), 64), strict=False))


async def while_connected(request: Request, answer: Awaitable[T]) -> T:
    """Await ``answer``; cancel it as soon as the client has gone."""
    work = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ApiError(499, "the client has gone")
        return work.result()
    finally:
        for task in (work, gone):
            task.cancel()
        with suppress(asyncio.CancelledError, ApiError):
            await work


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
