"""The paths of /v1/responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from enum import Enum

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from kvlathe.server.answers import Spent, event
from kvlathe.server.errors import ApiError, renamed
from kvlathe.server.fields import Json
from kvlathe.server.jobs import Job
from kvlathe.server.replies import InputTokens, ItemList, ResponseObject
from kvlathe.server.responses.answer import Writer, new_id
from kvlathe.server.responses.items import ITEMS, Item
from kvlathe.server.responses.request import NAMES, PromptRequest, ResponsesRequest
from kvlathe.server.responses.store import Kept, Store
from kvlathe.server.service import ERRORS, STREAM, Service, while_connected

TAGS: list[str | Enum] = ["OpenAI"]


class Responses:
    """Responses of one service, and those that are kept."""

    def __init__(self, service: Service) -> None:
        self.service, self.store = service, Store()

    def items(self, request: PromptRequest, tenant: str) -> list[Json]:
        """The items of a conversation, those before the request among them. Raises
        ApiError where it goes on with a response that is not kept."""
        before: list[Json] = []
        if name := request.previous_response_id:
            kept = self.store.get(tenant, name)
            if kept is None:
                raise ApiError(
                    400,
                    f"Previous response with id '{name:.80}' not found: it was not "
                    "stored, or was forgotten since",
                    "previous_response_id",
                    "previous_response_not_found",
                )
            before = kept.conversation
        return [*before, *map(named, request.items)]

    async def events(
        self, job: Job, tenant: str, writer: Writer, stream: bool
    ) -> AsyncGenerator[Json, None]:
        """Events of a response. A failure raises ApiError, but for one in the middle of
        a ``stream``."""
        answerer, begun = self.service.answerer, False
        spent = Spent(job)
        try:
            async with aclosing(answerer.pieces(job, tenant, spent)) as pieces:
                async for piece in pieces:
                    if not begun:
                        for said in writer.begin():
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

    async def answer(
        self, request: Request, body: ResponsesRequest, items: list[Json]
    ) -> Response:
        tenant = request.state.tenant
        try:
            job = await self.service.answerer.job(body.chat(validated(items)))
        except ApiError as refused:
            raise renamed(refused, NAMES) from refused
        writer = Writer(body)

        async def kept() -> AsyncGenerator[Json, None]:
            whole = self.events(job, tenant, writer, body.stream is True)
            async with aclosing(whole) as events:
                async for said in events:
                    yield said
            if body.store is not False and writer.response["status"] != "failed":
                self.store.put(tenant, Kept.of(writer.response, items))

        async def lines() -> AsyncGenerator[str, None]:
            async with aclosing(kept()) as events:
                async for said in events:
                    yield f"event: {said['type']}\n{event(said)}"

        async def whole() -> Json:
            async with aclosing(kept()) as events:
                async for _ in events:
                    pass
            return writer.response

        if body.stream:
            return await self.service.stream(request, lines())
        return JSONResponse(await while_connected(request, whole()))

    def kept(self, tenant: str, name: str) -> Kept:
        """A response that is kept. Raises ApiError where there is none."""
        kept = self.store.get(tenant, name)
        if kept is None:
            raise self._missing(name)
        return kept

    def drop(self, tenant: str, name: str) -> None:
        """Forget a response. Raises ApiError where there is none."""
        if not self.store.drop(tenant, name):
            raise self._missing(name)

    def _missing(self, name: str) -> ApiError:
        said = f"Response with id '{name:.80}' not found"
        return ApiError(404, said, "response_id", "response_not_found")


def validated(items: list[Json]) -> Sequence[Item]:
    """Items that were checked before."""
    return ITEMS.validate_python(items)


def named(item: Json) -> Json:
    """An item with an id."""
    prefix = {"function_call": "fc", "function_call_output": "fco"}.get(item["type"])
    return item if item.get("id") else {**item, "id": new_id(prefix or "msg")}


def add_responses(app: FastAPI, service: Service) -> None:
    """The paths of responses."""
    responses = Responses(service)
    add_kept(app, responses)

    @app.post(
        "/v1/responses",
        response_model=ResponseObject,
        responses={**ERRORS, **STREAM},
        tags=TAGS,
    )
    async def create(request: Request, body: ResponsesRequest) -> Response:
        """Answer a conversation with items: thoughts, messages, calls of functions."""
        service.check(body.model)
        return await responses.answer(
            request, body, responses.items(body, request.state.tenant)
        )

    @app.post(
        "/v1/responses/input_tokens",
        response_model=InputTokens,
        responses=ERRORS,
        tags=TAGS,
    )
    async def input_tokens(request: Request, body: PromptRequest) -> Response:
        """Tokens of the prompt that a request would have."""
        service.check(body.model)
        items = responses.items(body, request.state.tenant)
        try:
            chat = body.chat(validated(items))
            count = await asyncio.to_thread(service.answerer.chat_tokens, chat)
        except ApiError as refused:
            raise renamed(refused, NAMES) from refused
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})


def add_kept(app: FastAPI, responses: Responses) -> None:
    """The paths of responses that are kept."""

    @app.get(
        "/v1/responses/{name}",
        response_model=ResponseObject,
        responses={404: ERRORS[404]},
        tags=TAGS,
    )
    async def retrieve(request: Request, name: str) -> Response:
        """A response that is kept."""
        return JSONResponse(responses.kept(request.state.tenant, name).response)

    @app.delete("/v1/responses/{name}", responses={404: ERRORS[404]}, tags=TAGS)
    async def delete(request: Request, name: str) -> Response:
        """Forget a response."""
        responses.drop(request.state.tenant, name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    @app.get(
        "/v1/responses/{name}/input_items",
        response_model=ItemList,
        responses={404: ERRORS[404]},
        tags=TAGS,
    )
    async def input_items(request: Request, name: str) -> Response:
        """The items before a response's output, newest first."""
        items = responses.kept(request.state.tenant, name).items[::-1]
        said: Json = {"object": "list", "data": items, "has_more": False}
        return JSONResponse(
            {**said, "first_id": items[0]["id"], "last_id": items[-1]["id"]}
        )
