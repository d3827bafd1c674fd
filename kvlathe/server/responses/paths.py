"""The paths of /v1/responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from enum import Enum
from functools import partial
from typing import Annotated, Literal

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response

from kvlathe.server.errors import TOO_LONG, ApiError, renamed
from kvlathe.server.fields import Json
from kvlathe.server.replies import InputTokens, ItemList, ResponseObject
from kvlathe.server.responses.answer import PREFIXES, Writer, new_id
from kvlathe.server.responses.items import ITEMS
from kvlathe.server.responses.request import NAMES, PromptRequest, ResponsesRequest
from kvlathe.server.responses.store import MOST_CONVERSATION, Kept, Store
from kvlathe.server.schema import ChatRequest
from kvlathe.server.service import ERRORS, STREAM, Service
from kvlathe.server.written import answer, events_of

TAGS: list[str | Enum] = ["OpenAI"]


class Responses:
    """Responses of one service, and those that are kept."""

    def __init__(self, service: Service) -> None:
        self.service, self.store = service, Store()

    async def chat(
        self, request: Request, body: PromptRequest
    ) -> tuple[list[Json], ChatRequest]:
        """The items of a conversation, those before the request among them, and the chat
        that they are: read once it is the client's turn. Raises ApiError where it goes
        on with a response that is not kept."""
        before = None
        if name := body.previous_response_id:
            before = self.store.get(request.state.tenant, name)
            if before is None:
                raise ApiError(
                    400,
                    f"Previous response with id '{name:.80}' not found: it was not "
                    "stored, or was forgotten since",
                    "previous_response_id",
                    "previous_response_not_found",
                )
            if before.size > MOST_CONVERSATION:
                raise ApiError(
                    400,
                    f"the conversation has {before.size:,} bytes, and one with at most "
                    f"{MOST_CONVERSATION:,} may be gone on with: send what matters of it "
                    "as input",
                    "previous_response_id",
                    TOO_LONG,
                )

        def read() -> tuple[list[Json], ChatRequest]:
            items = [*(before.conversation if before else ()), *map(named, body.items)]
            return items, body.chat(ITEMS.validate_python(items))

        return await self.service.prepared(request, read)

    async def answer(self, request: Request, body: ResponsesRequest) -> Response:
        tenant = request.state.tenant
        try:
            items, chat = await self.chat(request, body)
            job = await self.service.job(request, chat)
        except ApiError as refused:
            raise renamed(refused, NAMES) from refused
        writer, stream = Writer(body), body.stream is True

        async def kept() -> AsyncGenerator[Json, None]:
            async with aclosing(
                events_of(self.service, job, tenant, writer, NAMES, stream)
            ) as events:
                async for said in events:
                    yield said
            if body.store is not False and writer.response["status"] != "failed":
                # A long conversation takes a while to be counted.
                made = await asyncio.to_thread(Kept.of, writer.response, items)
                self.store.put(tenant, made)

        return await answer(
            self.service, request, kept(), stream, lambda: writer.response
        )

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


def named(item: Json) -> Json:
    """An item with an id."""
    prefix = {**PREFIXES, "function_call_output": "fco"}[item["type"]]
    return item if item.get("id") else {**item, "id": new_id(prefix)}


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
        return await responses.answer(request, body)

    @app.post(
        "/v1/responses/input_tokens",
        response_model=InputTokens,
        responses=ERRORS,
        tags=TAGS,
    )
    async def input_tokens(request: Request, body: PromptRequest) -> Response:
        """Tokens of the prompt that a request would have."""
        service.check(body.model)
        try:
            _, chat = await responses.chat(request, body)
            work = partial(service.answerer.chat_tokens, chat)
            count = await service.prepared(request, work)
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
    async def retrieve(request: Request, name: str, stream: bool = False) -> Response:
        """A response that is kept."""
        if stream:
            raise ApiError(
                400,
                "stream: a response that is kept has no events any more; leave it out",
                "stream",
                "unsupported",
            )
        kept = responses.kept(request.state.tenant, name)
        return Response(kept.response, media_type="application/json")

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
    async def input_items(
        request: Request,
        name: str,
        order: Literal["asc", "desc"] = "desc",
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: str | None = None,
    ) -> Response:
        """The items before a response's output. ``order``: "desc", the newest first;
        ``after``: the id of the item before the first."""
        items = responses.kept(request.state.tenant, name).items
        page = page_of(items if order == "asc" else items[::-1], limit, after)
        return Response(page, media_type="application/json")


def page_of(items: Sequence[tuple[str, bytes]], limit: int, after: str | None) -> bytes:
    """JSON of at most ``limit`` of the items (ids, and items as JSON), the first of them
    the one behind the item with the id ``after``. None is read: they may have megabytes.
    Raises ApiError where no item has that id."""
    ids = [one for one, _ in items]
    if after is not None and after not in ids:
        raise ApiError(
            404, f"after: there is no item '{after:.80}'", "after", "item_not_found"
        )
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + limit]
    rest = {
        "object": "list",
        "first_id": page[0][0] if page else None,
        "last_id": page[-1][0] if page else None,
        "has_more": len(items) > start + limit,
    }
    data = b", ".join(text for _, text in page)
    return b'{"data": [%b], %b' % (data, json.dumps(rest).encode()[1:])
