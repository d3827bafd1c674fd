"""From requests to answers: text to tokens, deltas of the engine to responses, whole or
as a stream of events."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from kvlathe.base.errors import EngineStopped, KvlatheError
from kvlathe.base.memory import OutOfMemory
from kvlathe.runtime.async_engine import RETRY_SECONDS, AsyncEngine
from kvlathe.runtime.requests.request import Delta
from kvlathe.runtime.text.guide import StructureError
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.server.choices import Chat, Completions, Echo, Json, Kind
from kvlathe.server.errors import ApiError, refusal
from kvlathe.server.replies import Prefix
from kvlathe.server.schema import (
    ChatRequest,
    CompletionRequest,
    Message,
    PrefixRequest,
)

log = logging.getLogger("kvlathe")
DEFAULT_TOKENS = 16
"""Of a completion that does not say max_tokens, as the OpenAI API has it."""

ONCE = {"x-should-retry": "false"}
"""OpenAI's clients send a request again after a 408 unless they are told not to: its
time is over."""


AGAIN = {"Retry-After": str(RETRY_SECONDS)}


@dataclass(slots=True)
class Job:
    """A request as the engine takes it. ``param``: the field that its prompts came
    in."""

    prompts: list[list[int]]
    params: SamplingParams
    n: int
    param: str
    kind: Kind
    seconds: float | None = None
    usage_chunk: bool = False
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        number = uuid.uuid4().hex
        self.id = f"{self.kind.prefix}-{number}"


class Answerer:
    """Answers requests with one engine, under the served ``model`` name."""

    def __init__(
        self, engine: AsyncEngine, model: str, max_new_tokens: int | None = None
    ) -> None:
        self.engine, self.llm, self.model = engine, engine.llm, model
        self.max_new_tokens = max_new_tokens or self.llm.limits.max_seq_len
        self.fingerprint = f"fp_{self.llm.plan.digest[:12]}"
        self._structures = ThreadPoolExecutor(1, "kvlathe-structured")
        self._structured = 0

    async def job(self, request: CompletionRequest | ChatRequest) -> Job:
        """The request as the engine takes it, made in another thread: tokenizing takes
        a while. Compiling a structure may take longer, so that one thread makes all
        requests that have one."""
        chats = isinstance(request, ChatRequest)
        make = (
            partial(self.chat, request) if chats else partial(self.completion, request)
        )
        if not request.structure_param:
            return await asyncio.to_thread(make)
        if self._structured >= max(1, self.engine.max_waiting):
            said = "too many requests wait for their structures to be compiled"
            raise ApiError(429, said, code="queue_full", headers=AGAIN)
        self._structured += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._structures, make)
        finally:
            self._structured -= 1

    # -- requests to jobs --------------------------------------------------------------
    def completion(self, request: CompletionRequest) -> Job:
        self._check_count(len(request.prompts), request.n or 1)
        prompts = [
            self._encode(p, "prompt", True) if isinstance(p, str) else p
            for p in request.prompts
        ]
        tokens = (
            min(DEFAULT_TOKENS, self.max_new_tokens)
            if request.max_tokens is None
            else request.max_tokens
        )
        if not tokens and not request.echo:
            raise ApiError(
                400,
                "max_tokens: it may be 0 only with echo",
                "max_tokens",
                "invalid_value",
            )
        n, echo = request.n or 1, bool(request.echo)
        wanted = (
            (request.logprobs or 0)
            if echo and (request.logprobs is not None or not tokens)
            else None
        )
        params = self._params(request, tokens, request.logprobs, wanted)
        echoes = [*map(self._echo, request.prompts, prompts)] if echo else ()
        kind = Completions(self.llm.tokenizer, request.logprobs is not None, echoes, n)
        return self._job(request, prompts, params, n, "prompt", kind)

    def chat(self, request: ChatRequest) -> Job:
        text = self._framed(request.messages, True)
        self._check_count(1, request.n or 1)
        prompt = self._encode(text, "messages", False)
        left = max(1, self.llm.most_tokens - len(prompt))
        tokens = (
            request.max_completion_tokens
            or request.max_tokens
            or min(left, self.max_new_tokens)
        )
        params = self._params(
            request, tokens, (request.top_logprobs or 0) if request.logprobs else None
        )
        kind = Chat(self.llm.tokenizer, bool(request.logprobs))
        return self._job(request, [prompt], params, request.n or 1, "messages", kind)

    def prefix(self, request: PrefixRequest) -> list[int]:
        """The tokens of a prefix that is to be compacted."""
        if request.messages is not None:
            text = self._framed(request.messages, False)
            return self._encode(text, "messages", False)
        assert request.prompt is not None
        if isinstance(request.prompt, str):
            return self._encode(request.prompt, "prompt", True)
        return request.prompt

    def _framed(self, messages: list[Message], asks: bool) -> str:
        """The text of a conversation; ``asks``: that an answer is to follow."""
        turns = [message.for_template() for message in messages]
        try:
            return self.llm.tokenizer.chat_prompt(turns, asks)
        except KvlatheError as error:
            raise ApiError(
                422, f"messages: {error}", "messages", "chat_template"
            ) from error

    def _echo(self, given: str | list[int], ids: list[int]) -> Echo:
        tokenizer = self.llm.tokenizer
        return (
            Echo(ids, given, tokenizer.starts(given))
            if isinstance(given, str)
            else Echo(ids, tokenizer.decode(ids), None)
        )

    def _encode(self, text: str, param: str, special: bool) -> list[int]:
        try:
            most = self.llm.limits.max_input_len
            if (
                len(text) > most * self.llm.tokenizer.longest_token
            ):  # splitting megabytes would take seconds
                said = f"{param}: {len(text):,} characters are too long: this engine's max_input_len is {most}"
                raise ApiError(400, said, param, "context_length_exceeded")
            text.encode()  # JSON can spell halves of characters
            return self.llm.tokenizer.encode(text, add_special_tokens=special)
        except KvlatheError as error:  # an engine without tokenizer.json
            raise ApiError(422, f"{param}: {error}", param, "no_tokenizer") from error
        except UnicodeError as error:
            raise ApiError(
                400,
                f"{param}: it is not Unicode text ({error})",
                param,
                "invalid_value",
            ) from error

    def _check_count(self, prompts: int, n: int) -> None:
        """Before anything is made of them: a body of a few megabytes can ask for
        millions."""
        try:
            self.engine.check_count(prompts * n)
        except KvlatheError as error:
            raise refusal(error, "n" if n > 1 else "prompt") from error

    def _check_ids(self, param: str, ids: Iterable[int]) -> None:
        vocabulary = self.llm.plan.model.vocab_size
        if wrong := [token for token in ids if token >= vocabulary]:
            said = f"{param}: there is no token {wrong[0]}: the vocabulary has {vocabulary}"
            raise ApiError(400, said, param, "invalid_value")

    def _params(
        self,
        request: CompletionRequest | ChatRequest,
        tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        if tokens > self.max_new_tokens:
            param = (
                "max_completion_tokens"
                if getattr(request, "max_completion_tokens", None)
                else "max_tokens"
            )
            said = f"{param}: {tokens} is too much: this server answers with {self.max_new_tokens} tokens at most"
            raise ApiError(400, said, param, "invalid_value")
        self._check_structure(request)
        try:
            params = request.params(tokens, logprobs, prompt_logprobs)
        except KvlatheError as error:
            raise refusal(error, None) from error
        self._check_ids("stop_token_ids", params.stop_ids)
        self._check_ids("logit_bias", (token for token, _ in params.logit_bias))
        return params

    def _check_structure(self, request: CompletionRequest | ChatRequest) -> None:
        """Compile what the answer must look like, here and not where others wait."""
        param = request.structure_param
        try:
            structure = request.structure()
            if structure is not None:
                self.llm.compile(structure)
        except KvlatheError as error:
            raise refusal(error, param) from error

    def _job(
        self,
        request: CompletionRequest | ChatRequest,
        prompts: list[list[int]],
        params: SamplingParams,
        n: int,
        param: str,
        kind: Kind,
    ) -> Job:
        asked = bool(request.stream_options and request.stream_options.include_usage)
        return Job(prompts, params, n, param, kind, request.deadline_seconds, asked)

    # -- prefixes ----------------------------------------------------------------------
    async def compact(self, request: PrefixRequest, tenant: str) -> Json:
        """Compact a prefix for a tenant. Raises ApiError."""
        param = "prompt" if request.messages is None else "messages"
        tokens = await asyncio.to_thread(self.prefix, request)
        try:
            made = await self.engine.compact(tokens, request.keep, tenant)
        except KvlatheError as error:
            raise refusal(error, param) from error
        reply = Prefix(
            model=self.model,
            tokens=made.tokens,
            kept=made.kept,
            kv_bytes=made.bytes,
            kv_bytes_whole=made.whole_bytes,
            seconds=made.seconds,
        )
        return reply.model_dump()

    # -- jobs to answers ---------------------------------------------------------------
    async def whole(self, job: Job, tenant: str) -> Json:
        """The response of a request that does not stream. Raises ApiError."""
        parts: dict[int, list[Delta]] = {}
        async with aclosing(self._deltas(job, tenant)) as deltas:
            async for delta in deltas:
                if failure := failed(delta):
                    raise failure
                parts.setdefault(delta.index, []).append(delta)
        choices = [job.kind.choice(joined(parts[index])) for index in sorted(parts)]
        generated = sum(
            len(delta.token_ids) for deltas in parts.values() for delta in deltas
        )
        return {
            **self._head(job, job.kind.object),
            "choices": choices,
            "usage": usage(job, generated),
        }

    async def events(self, job: Job, tenant: str) -> AsyncGenerator[str, None]:
        """Server-sent events of a request that streams. What fails before the first one
        raises ApiError."""
        head, generated = self._head(job, job.kind.chunk_object), 0
        if job.usage_chunk:
            head["usage"] = None
        opened: set[int] = set()
        async with aclosing(self._deltas(job, tenant)) as deltas:
            async for delta in deltas:
                generated += len(delta.token_ids)
                if failure := failed(delta):
                    if not opened:
                        raise failure
                    yield event(failure.body)
                    break
                opening = (
                    None if delta.index in opened else job.kind.opening(delta.index)
                )
                opened.add(delta.index)
                if opening:
                    yield event({**head, "choices": [opening]})
                if (
                    delta.text
                    or delta.logprobs
                    or delta.prompt_logprobs
                    or delta.finish_reason
                ):
                    yield event({**head, "choices": [job.kind.chunk(delta)]})
            else:
                if job.usage_chunk:
                    yield event({**head, "choices": [], "usage": usage(job, generated)})
        yield "data: [DONE]\n\n"

    async def _deltas(self, job: Job, tenant: str) -> AsyncGenerator[Delta, None]:
        try:
            async with aclosing(
                self.engine.stream(job.prompts, job.params, job.n, tenant, job.seconds)
            ) as deltas:
                async for delta in deltas:
                    yield delta
        except KvlatheError as error:
            raise refusal(error, job.param) from error

    def _head(self, job: Job, kind: str) -> Json:
        return {
            "id": job.id,
            "object": kind,
            "created": job.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def failed(delta: Delta) -> ApiError | None:
    """The error that a delta is, if it is one."""
    if delta.finish_reason == "error":
        if isinstance(delta.error, OutOfMemory | StructureError):
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


def joined(deltas: list[Delta]) -> Delta:
    """All that was said of one choice."""
    return Delta(
        deltas[0].index,
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.token_ids),
        tuple(entry for delta in deltas for entry in delta.logprobs),
        deltas[0].prompt_logprobs,
        deltas[-1].finish_reason,
    )


def usage(job: Job, generated: int) -> Json:
    prompt = sum(map(len, job.prompts))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }


def event(data: Json) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
