"""The HTTP application: paths, and what each of them says."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

from fastapi import FastAPI, Query, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response
from opentelemetry.trace import TracerProvider
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvlathe.base.errors import KvlatheError
from kvlathe.base.package import __version__
from kvlathe.runtime.async_engine import AsyncEngine
from kvlathe.runtime.sleeping import SleepMode
from kvlathe.server.adapters import add_adapters
from kvlathe.server.answers import Answerer
from kvlathe.server.anthropic.paths import add_messages
from kvlathe.server.bodies import JsonRoute
from kvlathe.server.cache_view import CacheView, cache_view
from kvlathe.server.errors import ApiError, handle, refusal
from kvlathe.server.gate import BODY_SECONDS, KEYED, Gate, Methods
from kvlathe.server.metrics import Metrics
from kvlathe.server.pages import POLICY, chat_page, docs_page
from kvlathe.server.plan_view import PlanView, plan_view
from kvlathe.server.replies import (
    ChatCompletion,
    Completion,
    Health,
    IsSleeping,
    ModelCard,
    ModelList,
    Prefix,
    Text,
    TokenizerInfo,
    Tokens,
    Version,
)
from kvlathe.server.responses.paths import add_responses
from kvlathe.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PrefixRequest,
    TokenizeRequest,
)
from kvlathe.server.service import ERRORS, STREAM, Service, while_connected

MAX_BODY = 4 << 20


def create_app(
    engine: AsyncEngine,
    metrics: Metrics,
    model: str,
    keys: Sequence[str] = (),
    max_body: int = MAX_BODY,
    max_new_tokens: int | None = None,
    origins: Sequence[str] = (),
    body_seconds: float = BODY_SECONDS,
    hosts: Sequence[str] = (),
    keyed: Sequence[str] = KEYED,
    tracer_provider: TracerProvider | None = None,
    sleeps: bool = False,
    loads_adapters: bool = False,
) -> FastAPI:
    """The application that serves ``engine`` as ``model``. ``keys``: API keys; empty:
    none is asked for. ``origins``: web pages of these may call it (CORS), * is any.
    ``hosts`` and ``keyed``: as the gate has them. ``tracer_provider``: makes its spans;
    None: the process's, if it has one. ``sleeps``: clients may put the engine to
    sleep. ``loads_adapters``: they may load and unload LoRA adapters."""
    app = FastAPI(
        title="kvlathe",
        version=__version__,
        description="An OpenAI-compatible API to one engine.",
        docs_url=None,
        redoc_url=None,
        telemetry={"tracer_provider": tracer_provider},
    )
    app.router.route_class = JsonRoute
    app.add_middleware(
        Gate,
        keys=keys,
        max_body=max_body,
        failed=metrics.failed,
        body_seconds=body_seconds,
        hosts=hosts,
        keyed=keyed,
    )
    app.add_middleware(Methods, routes=app.routes)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    handle(app)
    answerer = Answerer(engine, model, max_new_tokens, tracer_provider)
    service = Service(engine, metrics, answerer)
    asked = (sleeps, add_sleep), (loads_adapters, add_adapters)
    for add in (*PATHS, *(add for wanted, add in asked if wanted)):
        add(app, service)
    return app


def add_sleep(app: FastAPI, service: Service) -> None:
    """The paths that put the engine to sleep and wake it, as vLLM has them."""
    llm = service.engine.llm

    async def done(work: Callable[[], None]) -> Response:
        try:
            await asyncio.to_thread(work)
        except KvlatheError as error:
            raise refusal(error, None) from error
        return Response()

    @app.post("/sleep", response_class=Response, responses=ERRORS, tags=["vLLM"])
    async def sleep(
        level: Annotated[int, Query(ge=1, le=2)] = 1, mode: SleepMode = "abort"
    ) -> Response:
        """Give the memory of weights and pages back. The weights are in the engine's
        folder, so both levels are one. Requests that come meanwhile wait; ``mode``:
        those that are here end, or go on afterwards."""
        return await done(partial(llm.sleep, mode))

    @app.post("/wake_up", response_class=Response, responses=ERRORS, tags=["vLLM"])
    async def wake_up(request: Request) -> Response:
        """Load the weights again and go on."""
        if "tags" in request.query_params:
            raise ApiError(
                400, "tags: weights and cache come back together; leave it out", "tags"
            )
        return await done(llm.wake_up)

    @app.get("/is_sleeping", responses={401: ERRORS[401]}, tags=["vLLM"])
    async def is_sleeping() -> IsSleeping:
        """Whether the engine sleeps."""
        return IsSleeping(is_sleeping=llm.is_sleeping)


def add_answers(app: FastAPI, service: Service) -> None:
    """The paths that compute."""
    answerer = service.answerer

    @app.post(
        "/v1/completions",
        response_model=Completion,
        responses={**ERRORS, **STREAM},
        tags=["OpenAI"],
    )
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continue each prompt."""
        service.check(body.model)
        job = await service.job(request, body)
        return await service.answer(request, job, body.stream)

    @app.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses={**ERRORS, **STREAM},
        tags=["OpenAI"],
    )
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation, framed by the checkpoint's own chat template."""
        service.check(body.model)
        job = await service.job(request, body)
        return await service.answer(request, job, body.stream)

    @app.post(
        "/v1/prefixes", response_model=Prefix, responses=ERRORS, tags=["prefixes"]
    )
    async def prefixes(request: Request, body: PrefixRequest) -> Response:
        """Compact a prefix that later requests begin with."""
        service.check(body.model)
        if body.model != answerer.model:
            said = "model: prefixes are compacted without adapters"
            raise ApiError(400, said, "model", "unsupported")
        made = answerer.compact(body, request.state.tenant)
        return JSONResponse(await while_connected(request, made))


def add_tokens(app: FastAPI, service: Service) -> None:
    """The paths from texts to tokens and back."""
    answerer, llm = service.answerer, service.engine.llm

    @app.post("/tokenize", response_model=Tokens, responses=ERRORS, tags=["vLLM"])
    async def tokenize(request: Request, body: TokenizeRequest) -> Response:
        """The tokens of a text, or of a conversation."""
        if body.model is not None:
            service.check(body.model)
        work = partial(answerer.tokens, body)
        ids = await service.prepared(request, work)
        names: list[str] | None = None
        if body.return_token_strs:
            names = [llm.tokenizer.backend.id_to_token(one) or "" for one in ids]
        said = Tokens(
            count=len(ids), max_model_len=llm.most_tokens, tokens=ids, token_strs=names
        )
        return JSONResponse(said.model_dump())

    @app.post("/detokenize", response_model=Text, responses=ERRORS, tags=["vLLM"])
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of tokens."""
        if body.model is not None:
            service.check(body.model)
        text = await asyncio.to_thread(answerer.text, body.tokens)
        return JSONResponse({"prompt": text})

    @app.get("/tokenizer_info", responses={401: ERRORS[401]}, tags=["vLLM"])
    async def tokenizer_info() -> TokenizerInfo:
        """Texts of special tokens, and the chat template: clients that count tokens of
        prompts by `/tokenize` ask for these."""
        tokenizer = llm.tokenizer
        named: dict[str, str] = {}
        for token in tokenizer.eos_ids[:1]:
            named["eos_token"] = tokenizer.backend.id_to_token(token) or ""
        named |= tokenizer.special
        template, most = tokenizer.chat_template, llm.most_tokens
        return TokenizerInfo(**named, chat_template=template, model_max_length=most)


def add_models(app: FastAPI, service: Service) -> None:
    """The paths that name the model."""

    @app.get("/v1/models", responses={401: ERRORS[401]}, tags=["OpenAI"])
    async def models() -> ModelList:
        """The model that is served, and the adapters that requests may name."""
        names = service.models
        cards = [service.card(name) for name in names]
        return ModelList(data=cards, first_id=names[0], last_id=names[-1])

    @app.get(
        "/v1/models/{name:path}",
        responses={401: ERRORS[401], 404: ERRORS[404]},
        tags=["OpenAI"],
    )
    async def model_named(name: str) -> ModelCard:
        """One of them by its name."""
        service.check(name)
        return service.card(name)


def add_health(app: FastAPI, service: Service) -> None:
    """The paths for who watches the server."""
    engine = service.engine

    @app.get(
        "/health",
        response_model=Health,
        responses={503: {"model": Health}},
        tags=["operations"],
    )
    async def health() -> Response:
        """200 while requests are taken; 503 while draining, while a step has not ended
        for minutes, or if the engine's thread has died."""
        status = "draining" if engine.draining else "ok" if engine.alive else "dead"
        if status != "dead" and engine.llm.thread.stuck:
            status = "stuck"
        code = 200 if status == "ok" else 503
        if status == "ok" and engine.llm.is_sleeping:
            status = "sleeping"  # requests are taken, and wait
        return JSONResponse(Health(status=status).model_dump(), code)

    @app.get("/ping", response_model=Health, tags=["vLLM"])
    @app.post("/ping", response_model=Health, tags=["vLLM"])
    async def ping() -> Response:
        """The same as /health."""
        return await health()

    @app.get("/version", tags=["vLLM"])
    async def version() -> Version:
        """The version of this program."""
        return Version(version=__version__)


def add_operations(app: FastAPI, service: Service) -> None:
    """The paths for who runs the server."""
    engine = service.engine

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        policy = {"Content-Security-Policy": POLICY}
        return HTMLResponse(chat_page(service.answerer.model), headers=policy)

    @app.get("/v1/cache", responses={401: ERRORS[401]}, tags=["operations"])
    async def cache() -> CacheView:
        """The contents of the KV cache's pages at the moment, by layer and head."""
        return cache_view(engine, service.answerer.model)

    known: list[PlanView] = []

    @app.get("/v1/plan", responses={401: ERRORS[401]}, tags=["operations"])
    async def plan() -> PlanView:
        """The plan: what it removes at which length, and what a full cache holds."""
        if not known:  # it never changes
            known.append(plan_view(engine.llm, service.answerer.model))
        return known[0]

    written = functools.cache(lambda: docs_page(app.openapi()))

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> str:
        return written()

    @app.get("/metrics", response_class=Response, tags=["operations"])
    async def prometheus() -> Response:
        """Prometheus metrics: vLLM's names with `kvlathe_` in front."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


PATHS = (
    add_answers,
    add_responses,
    add_messages,
    add_tokens,
    add_models,
    add_health,
    add_operations,
)
