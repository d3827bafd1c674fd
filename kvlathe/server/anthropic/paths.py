"""The paths of /v1/messages."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from kvlathe.server.anthropic.answer import Writer
from kvlathe.server.anthropic.request import NAMES, MessagesRequest, PromptRequest
from kvlathe.server.errors import ApiError, renamed
from kvlathe.server.replies import AnthropicMessage, TokenCount
from kvlathe.server.service import ERRORS, STREAM, Service
from kvlathe.server.written import answer, events_of


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
            job = await service.job(request, body.chat())
        except ApiError as refused:
            raise renamed(refused, NAMES) from refused
        writer, stream = Writer(body.model), body.stream is True
        tenant = request.state.tenant
        events = events_of(service, job, tenant, writer, NAMES, stream)
        return await answer(service, request, events, stream, lambda: writer.message)

    @app.post(
        "/v1/messages/count_tokens",
        response_model=TokenCount,
        responses=ERRORS,
        tags=["Anthropic"],
    )
    async def count_tokens(request: Request, body: PromptRequest) -> Response:
        """Tokens of the prompt that a request would have."""
        service.check(body.model)
        try:
            work = partial(answerer.chat_tokens, body.chat())
            count = await service.prepared(request, work)
        except ApiError as refused:
            raise renamed(refused, NAMES) from refused
        return JSONResponse({"input_tokens": count})
