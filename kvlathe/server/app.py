"""The HTTP application: paths, and what each of them says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvlathe import __version__
from kvlathe.runtime.async_engine import AsyncEngine
from kvlathe.server.answers import Answerer, Job
from kvlathe.server.errors import ApiError, ErrorResponse, handle
from kvlathe.server.gate import Gate
from kvlathe.server.metrics import Metrics
from kvlathe.server.schema import (
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    Health,
    ModelCard,
    ModelList,
)

FAILURES: dict[int | str, dict[str, Any]] = {
    400: {"description": "A field is wrong; `param` names it."},
    401: {"description": "No API key, or an unknown one."},
    404: {"description": "No such model."},
    408: {"description": "`deadline_seconds` passed."},
    413: {"description": "The body is too large."},
    422: {"description": "This engine cannot do it: no tokenizer, no chat template, or the template refused."},
    429: {"description": "The queue is full; `Retry-After` says when to come back."},
    500: {"description": "The engine failed on this request."},
    503: {"description": "The server is shutting down."},
}
ERRORS = {status: said | {"model": ErrorResponse} for status, said in FAILURES.items()}
EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
STREAM = {200: {"content": {"text/event-stream": {"schema": EVENT | {"description": "`data`: a chunk, or [DONE]"}}}}}
UNBUFFERED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Of streams. nginx would collect them otherwise."""

MAX_BODY = 4 << 20
T = TypeVar("T")


def create_app(
    engine: AsyncEngine,
    metrics: Metrics,
    model: str,
    keys: Sequence[str] = (),
    max_body: int = MAX_BODY,
    max_new_tokens: int | None = None,
) -> FastAPI:
    """The application that serves ``engine`` as ``model``. ``keys``: API keys; empty: none is asked for."""
    app = FastAPI(title="kvlathe", version=__version__, description="An OpenAI-compatible API to one engine.")
    app.add_middleware(Gate, keys=keys, max_body=max_body, failed=metrics.failed)
    handle(app)
    answerer, started = Answerer(engine, model, max_new_tokens), int(time.time())

    def check(name: str) -> None:
        if name != model:
            said = f"The model `{name}` does not exist: this server has `{model}`"
            raise ApiError(404, said, "model", "model_not_found")

    async def answer(request: Request, job: Job, stream: bool | None) -> Response:
        tenant = request.state.tenant
        if not stream:
            return JSONResponse(await while_connected(request, answerer.whole(job, tenant)))
        events = answerer.events(job, tenant)
        # What is refused is refused with a status, before the stream begins.
        first = await while_connected(request, anext(events))

        async def rest() -> AsyncGenerator[str, None]:
            try:
                yield first
                async for event in events:
                    yield event
            finally:
                await events.aclose()

        return StreamingResponse(rest(), media_type="text/event-stream", headers=UNBUFFERED)

    @app.post("/v1/completions", response_model=Completion, responses={**ERRORS, **STREAM}, tags=["OpenAI"])
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continue each prompt."""
        check(body.model)
        return await answer(request, await asyncio.to_thread(answerer.completion, body), body.stream)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses={**ERRORS, **STREAM}, tags=["OpenAI"])
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation, framed by the checkpoint's own chat template."""
        check(body.model)
        return await answer(request, await asyncio.to_thread(answerer.chat, body), body.stream)

    @app.get("/v1/models", responses={401: ERRORS[401]}, tags=["OpenAI"])
    async def models() -> ModelList:
        """The one model that is served."""
        return ModelList(data=[card()])

    @app.get("/v1/models/{name:path}", responses={401: ERRORS[401], 404: ERRORS[404]}, tags=["OpenAI"])
    async def model_named(name: str) -> ModelCard:
        """The same by its name."""
        check(name)
        return card()

    @app.get("/health", responses={503: {"model": Health}}, tags=["operations"])
    async def health() -> Health:
        """200 while requests are taken; 503 while draining, or if the engine's thread has died."""
        status = "draining" if engine.draining else "ok" if engine.alive else "dead"
        body = Health(status=status)
        return body if status == "ok" else JSONResponse(body.model_dump(), 503)  # type: ignore[return-value]

    @app.get("/metrics", response_class=Response, tags=["operations"])
    async def prometheus() -> Response:
        """Prometheus metrics: vLLM's names with `kvlathe_` in front."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    def card() -> ModelCard:
        manifest = engine.llm.manifest
        return ModelCard(
            id=model,
            created=started,
            max_model_len=engine.llm.most_tokens,
            kv_bytes_per_token=manifest.kv_bytes.per_token if manifest else engine.llm.layout.bytes_per_token(),
            kv_bytes_removed=manifest.kv_bytes.removed if manifest else 0.0,
        )

    return app


async def while_connected(request: Request, answer: Awaitable[T]) -> T:
    """What ``answer`` comes to, given up as soon as the client has gone."""
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
