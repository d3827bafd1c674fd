"""Answers of APIs that are written as typed events: the pieces of a chat's answer go
through a writer, and a whole answer is what its events add up to."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from kvlathe.server.answers import Spent, event
from kvlathe.server.errors import ApiError, renamed
from kvlathe.server.fields import Json
from kvlathe.server.jobs import Job
from kvlathe.server.service import Service, while_connected


class Writer(Protocol):
    """Writer of one answer in the words of its API: events, each with its ``type``."""

    def begin(self, usage: Json) -> list[Json]:
        """The first events. ``usage``: tokens so far, as a chat counts them."""
        ...

    def add(self, piece: Json, thoughts: int) -> list[Json]:
        """Events of a piece of a chat's choice. ``thoughts``: tokens so far that are
        thoughts or end them."""
        ...

    def end(self, usage: Json, cut: str) -> list[Json]:
        """The last events. ``cut``: the text of a call that was begun and not ended."""
        ...

    def fail(self, error: ApiError) -> list[Json]:
        """The last event of an answer that fails in its middle."""
        ...


async def events_of(
    service: Service,
    job: Job,
    tenant: str,
    writer: Writer,
    names: Mapping[str, str],
    stream: bool,
) -> AsyncGenerator[Json, None]:
    """Events of an answer. A failure raises ApiError, but for one in the middle of a
    ``stream``. ``names``: field of a chat -> the same field of this API."""
    answerer, begun, spent = service.answerer, False, Spent(job)
    try:
        async with aclosing(answerer.pieces(job, tenant, spent)) as pieces:
            async for piece in pieces:
                if not begun:
                    for said in writer.begin(answerer.usage(job, spent)):
                        yield said
                begun = True
                for said in writer.add(piece, spent.thoughts):
                    yield said
        for said in writer.end(answerer.usage(job, spent), job.kind.cut_call(0)):
            yield said
    except ApiError as failure:
        if not (begun and stream):
            raise renamed(failure, names) from failure
        for said in writer.fail(failure):
            yield said


async def answer(
    service: Service,
    request: Request,
    events: AsyncGenerator[Json, None],
    stream: bool,
    result: Callable[[], Json],
) -> Response:
    """The events as a stream; else ``result``, what they added up to."""

    async def lines() -> AsyncGenerator[str, None]:
        async with aclosing(events):
            async for said in events:
                yield f"event: {said['type']}\n{event(said)}"

    async def whole() -> Json:
        async with aclosing(events):
            async for _ in events:
                pass
        return result()

    if stream:
        return await service.stream(request, lines())
    return JSONResponse(await while_connected(request, whole()))
