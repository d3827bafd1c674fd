"""The paths of /v1/messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from kvlathe.server.answers import Answerer, Spent, event
from kvlathe.server.anthropic.answer import Writer
from kvlathe.server.anthropic.request import NAMES, MessagesRequest, PromptRequest
from kvlathe.server.errors import ApiError, renamed
from kvlathe.server.fields import Json
from kvlathe.server.jobs import Job
from kvlathe.server.replies import AnthropicMessage, TokenCount
from kvlathe.server.service import ERRORS, STREAM, Service, while_connected


async def events_of(
    answerer: Answerer, job: Job, tenant: str, writer: Writer, stream: bool
) -> AsyncGenerator[Json, None]:
    """Events of a message. A failure raises ApiError, but for one in the middle of a
    ``stream``."""
    spent, begun = Spent(job), False
    try:
        async with aclosing(answerer.pieces(job, tenant, spent)) as pieces:
            async for piece in pieces:
                if not begun:
                    for said in writer.begin(answerer.usage(job, spent)):
                        yield said
                begun = True
                for said in writer.add(piece):
                    yield said
        for said in writer.end(answerer.usage(job, spent)):
            yield said
    except ApiError as failure:
        if not (begun and stream):
            raise renamed(failure, NAMES) from failure
        for said in writer.fail(failure):
            yield said


def add_messages(app: FastAPI, service: Service) -> None:
    """The paths of Anthropic's API."""
    answerer = service.answerer

    @app.post(
        "/v1/messages",
        response_model=AnthropicMessage,
        responses={**ERRORS, **STREAM},
        tags=["Anthropic"],
    )
    async def messages(request: Request, body: MessagesRequest) -> Response:
        """Answer a conversation with content blocks."""
        service.check(body.model)
        try:
            job = await answerer.job(body.chat())
        except ApiError as refused:
            raise renamed(refused, NAMES) from refused
        writer, tenant = Writer(body.model), request.state.tenant
        events = events_of(answerer, job, tenant, writer, body.stream is True)

        async def lines() -> AsyncGenerator[str, None]:
            async with aclosing(events):
                async for said in events:
                    yield f"event: {said['type']}\n{event(said)}"

        async def whole() -> Json:
            async with aclosing(events):
                async for _ in events:
                    pass
            return writer.message

        if body.stream:
            return await service.stream(request, lines())
        return JSONResponse(await while_connected(request, whole()))

    @app.post(
        "/v1/messages/count_tokens",
        response_model=TokenCount,
        responses=ERRORS,
        tags=["Anthropic"],
    )
    async def count_tokens(body: PromptRequest) -> Response:
        """Tokens of the prompt that a request would have."""
        service.check(body.model)
        try:
            count = await asyncio.to_thread(answerer.chat_tokens, body.chat())
        except ApiError as refused:
            raise renamed(refused, NAMES) from refused
        return JSONResponse({"input_tokens": count})
