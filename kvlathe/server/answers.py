"""Path from requests to answers: text to tokens, deltas of the engine to responses,
whole or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from opentelemetry.trace import TracerProvider

from kvlathe.base.errors import Asleep, EngineStopped, KvlatheError
from kvlathe.base.memory import OutOfMemory
from kvlathe.runtime.async_engine import AsyncEngine
from kvlathe.runtime.requests.request import Delta
from kvlathe.runtime.text.guide import Compiled, StructureError
from kvlathe.server.choices import Json
from kvlathe.server.errors import AGAIN, ApiError, refusal
from kvlathe.server.jobs import Job, Jobs
from kvlathe.server.replies import Prefix
from kvlathe.server.schema import (
    ChatRequest,
    CompletionRequest,
    PrefixRequest,
)
from kvlathe.server.tracing import Spans
from kvlathe.server.turns import Turns

log = logging.getLogger("kvlathe")
ONCE = {"x-should-retry": "false"}
"""OpenAI's clients send a request again after a 408 unless they are told not to: its
time is over."""


@dataclass(slots=True)
class Spent:
    """Tokens of a request's choices, ``n`` for each of its prompts. ``guesses``: of each
    choice, those that were guessed and those that were right; ``reused``: of each
    prompt, those that the prefix cache had; ``thoughts``: those before the answers."""

    job: Job
    generated: int = 0
    thoughts: int = 0
    reused: dict[int, int] = field(default_factory=dict)
    guesses: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, delta: Delta) -> None:
        self.generated += len(delta.token_ids)
        self.guesses[delta.index] = (delta.drafted, delta.accepted)
        self.thoughts += self.job.kind.thought_tokens(delta)
        prompt = delta.index // self.job.n
        self.reused[prompt] = max(delta.reused, self.reused.get(prompt, 0))

    @property
    def details(self) -> Json:
        drafted = sum(drafted for drafted, _ in self.guesses.values())
        accepted = sum(accepted for _, accepted in self.guesses.values())
        return {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        }


class Answerer(Jobs):
    """Answers requests with one engine, under the served ``model`` name."""

    def __init__(
        self,
        engine: AsyncEngine,
        model: str,
        max_new_tokens: int | None = None,
        tracer_provider: TracerProvider | None = None,
    ) -> None:
        super().__init__(engine, model, max_new_tokens)
        self.spans = Spans(model, tracer_provider)
        self.fingerprint = f"fp_{self.llm.plan.digest[:12]}"
        # Requests of each client that wait for their structures.
        self._compiling: Counter[str] = Counter()
        self.turns = Turns(max_waiting=engine.max_waiting)

    async def job(
        self, request: CompletionRequest | ChatRequest, client: str = ""
    ) -> Job:
        """The request as the engine takes it, made in another thread: tokenizing takes
        a while. Compiling a structure may take longer: clients take turns at that, and
        one that is compiled already waits for nobody."""
        chats = isinstance(request, ChatRequest)
        work = (
            partial(self.chat, request) if chats else partial(self.completion, request)
        )
        job = await self.turns.run(client, work)
        if job.params.structure is None:
            return job
        try:
            if ready := self.llm.ready(job.params.structure, client):
                job.compiled = await self._waited(ready, client)
        except KvlatheError as error:
            raise refusal(error, request.structure_param) from error
        return job

    async def _waited(self, ready: Future[Compiled], client: str) -> Compiled:
        """The result of ``ready``. Raises ApiError where too many requests of the
        client wait."""
        if ready.done():
            return ready.result()
        if self._compiling[client] >= max(1, self.engine.max_waiting):
            ready.cancel()
            raise ApiError(
                429,
                "too many requests wait for their structures to be compiled",
                code="queue_full",
                headers=AGAIN,
            )
        self._compiling[client] += 1
        try:
            return await asyncio.wrap_future(ready)
        finally:
            self._compiling[client] -= 1
            if not self._compiling[client]:
                del self._compiling[client]

    # -- prefixes ----------------------------------------------------------------------
    async def compact(self, request: PrefixRequest, tenant: str) -> Json:
        """Compact a prefix for a tenant. Raises ApiError."""
        param = "prompt" if request.messages is None else "messages"
        tokens = await self.turns.run(tenant, partial(self.prefix, request))
        try:
            made = await self.engine.compact(tokens, request.keep, tenant)
        except KvlatheError as error:
            raise refusal(error, param) from error
        return Prefix(
            model=self.model,
            tokens=made.tokens,
            kept=made.kept,
            kv_bytes=made.bytes,
            kv_bytes_whole=made.whole_bytes,
            seconds=made.seconds,
        ).model_dump()

    # -- jobs to answers ---------------------------------------------------------------
    async def whole(self, job: Job, tenant: str) -> Json:
        """The response of a request that does not stream. Raises ApiError."""
        parts: dict[int, list[Delta]] = {}
        async with aclosing(self._deltas(job, tenant)) as deltas:
            async for delta in deltas:
                if failure := error_of(delta):
                    raise failure
                parts.setdefault(delta.index, []).append(delta)
        choices = [job.kind.choice(join(parts[index])) for index in sorted(parts)]
        spent = Spent(job)
        for said in parts.values():
            for delta in said:
                spent.add(delta)
        return {
            **self._head(job, job.kind.object),
            "choices": choices,
            "usage": self.usage(job, spent),
        }

    async def events(self, job: Job, tenant: str) -> AsyncGenerator[str, None]:
        """Server-sent events of a request that streams. What fails before the first one
        raises ApiError."""
        head, spent = self._head(job, job.kind.chunk_object), Spent(job)
        if job.usage_chunk:
            head["usage"] = None
        chunks, begun = Chunks(head), False
        try:
            async with aclosing(self.pieces(job, tenant, spent)) as pieces:
                async for piece in pieces:
                    begun = True
                    usage = self.usage(job, spent) if job.usage_always else None
                    yield chunks.of(piece, usage)
            if job.usage_chunk:
                yield event({**head, "choices": [], "usage": self.usage(job, spent)})
        except ApiError as failure:
            if not begun:
                raise
            yield event(failure.body)
        yield "data: [DONE]\n\n"

    async def pieces(
        self, job: Job, tenant: str, spent: Spent
    ) -> AsyncGenerator[Json, None]:
        """Pieces of the choices, as ``job.kind`` writes them, and their tokens into
        ``spent``. Raises ApiError where the request fails."""
        opened: set[int] = set()
        async with aclosing(self._deltas(job, tenant)) as deltas:
            async for delta in deltas:
                spent.add(delta)
                if failure := error_of(delta):
                    raise failure
                if delta.index not in opened:
                    opened.add(delta.index)
                    if opening := job.kind.opening(delta.index):
                        yield opening
                if says(delta):
                    for chunk in job.kind.chunks(delta):
                        yield chunk

    async def _deltas(self, job: Job, tenant: str) -> AsyncGenerator[Delta, None]:
        stream = self.engine.stream(
            job.prompts, job.params, job.n, tenant, job.seconds, job.priority
        )
        with self.spans.of(job) as recorder:
            try:
                async with aclosing(stream) as deltas:
                    async for delta in deltas:
                        if recorder is not None:
                            recorder.add(delta)
                        yield delta
            except KvlatheError as error:
                raise refusal(error, job.param) from error

    def usage(self, job: Job, spent: Spent) -> Json:
        """Tokens of a request, as the OpenAI API counts them."""
        prompt = sum(map(len, job.prompts))
        said: Json = {
            "prompt_tokens": prompt,
            "completion_tokens": spent.generated,
            "total_tokens": prompt + spent.generated,
            "prompt_tokens_details": {"cached_tokens": sum(spent.reused.values())},
        }
        details: Json = {}
        if self.llm.engine.scheduler.speculation.drafter is not None:
            details |= spent.details
        if job.kind.thinks:
            details["reasoning_tokens"] = spent.thoughts
        if details:
            said["completion_tokens_details"] = details
        return said

    def _head(self, job: Job, kind: str) -> Json:
        return {
            "id": job.id,
            "object": kind,
            "created": job.created,
            "model": job.params.adapter or self.model,
            "system_fingerprint": self.fingerprint,
        }


def says(delta: Delta) -> bool:
    """Whether there is anything in it for a client."""
    return bool(
        delta.text or delta.logprobs or delta.prompt_logprobs or delta.finish_reason
    )


def error_of(delta: Delta) -> ApiError | None:
    """The error that a delta is, if it is one."""
    if delta.finish_reason == "error":
        if isinstance(delta.error, StructureError):  # the request's own fault
            log.info("a request was refused: %s", delta.error)
            return refusal(delta.error, None)
        if isinstance(delta.error, Asleep):
            return refusal(delta.error, None)
        if isinstance(delta.error, OutOfMemory):
            log.error("a request was refused: %s", delta.error)
            return refusal(delta.error, None)
        kind, then = type(delta.error).__name__, "others go on"
        if isinstance(delta.error, EngineStopped):  # the engine's thread has said why
            log.error("a request failed: %s", delta.error)
            then = "the server stops"
        else:
            log.error("a request failed", exc_info=delta.error)
        said = f"the engine failed while it computed this request ({kind}); {then}"
        return ApiError(500, said, code="engine_error")
    if delta.finish_reason == "timeout":
        said = "deadline_seconds: the answer was not ready in time"
        return ApiError(408, said, "deadline_seconds", "deadline", ONCE)
    if delta.finish_reason == "cancelled":
        return ApiError(
            503,
            "the server shut down before the answer was ready",
            code="shutting_down",
        )
    return None


def join(deltas: list[Delta]) -> Delta:
    """All that was said of one choice."""
    return Delta(
        deltas[0].index,
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.token_ids),
        tuple(entry for delta in deltas for entry in delta.logprobs),
        deltas[0].prompt_logprobs,
        deltas[-1].finish_reason,
        stop=deltas[-1].stop,
    )


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(data: Json) -> str:
    return f"data: {_encode(data)}\n\n"


class Chunks:
    """Events of one stream, whose ``head`` is written once."""

    def __init__(self, head: Json) -> None:
        self._head = head
        self._begin = f'data: {_encode(head)[:-1]},"choices":['

    def of(self, choice: Json, usage: Json | None = None) -> str:
        """The head with one choice, and the usage so far where it is asked for."""
        if usage is not None:
            return event({**self._head, "choices": [choice], "usage": usage})
        return f"{self._begin}{_encode(choice)}]}}\n\n"
