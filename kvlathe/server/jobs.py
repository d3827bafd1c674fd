"""Jobs from requests: texts to tokens, fields to sampling parameters. Tokenizing takes
a while, so all of this runs in a worker thread."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from opentelemetry.context import Context

from kvlathe.base.errors import KvlatheError
from kvlathe.runtime.async_engine import AsyncEngine
from kvlathe.runtime.text.guide import Compiled
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.server.call_form import CallForm, form_of
from kvlathe.server.choices import Chat, Completions, Echo, Kind
from kvlathe.server.conventions import HERMES, Calling
from kvlathe.server.errors import TOO_LONG, ApiError, refusal
from kvlathe.server.fields import Json
from kvlathe.server.harmony import name_thoughts, shown_by
from kvlathe.server.manner import (
    Manner,
    budget_of,
    calling_of,
    manner_of,
    template_values,
)
from kvlathe.server.messages import Message
from kvlathe.server.read_answers import ReadChat
from kvlathe.server.schema import (
    ChatRequest,
    CompletionRequest,
    PrefixRequest,
    TokenizeRequest,
)
from kvlathe.server.told_tools import in_words, takes_tools, told

DEVELOPER = "developer"
"""The role that the OpenAI API gives to what it called system before."""
DEFAULT_TOKENS = 16
"""max_tokens of a completion that gives none, as in the OpenAI API."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The trace that a request belongs to. In nanoseconds of Unix time: when it
    ``came``, and where time.perf_counter() was ``zero``. So no span ends before it
    begins where the clock is set back meanwhile."""

    context: Context
    came: int
    zero: int


@dataclass(slots=True)
class Job:
    """A request as the engine takes it. ``param``: the field that its prompts came
    in. ``compiled``: its structure, which is ready while somebody holds it.
    ``origin``: where requests are traced."""

    prompts: list[list[int]]
    params: SamplingParams
    n: int
    param: str
    kind: Kind
    seconds: float | None = None
    usage_chunk: bool = False
    usage_always: bool = False
    priority: int = 0
    compiled: Compiled | None = None
    origin: Origin | None = None
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        number = uuid.uuid4().hex
        self.id = f"{self.kind.prefix}-{number}"


class Jobs:
    """Makes jobs for one engine, served as ``model``, which answers with ``max_new_tokens`` at most."""

    def __init__(
        self, engine: AsyncEngine, model: str, max_new_tokens: int | None
    ) -> None:
        self.engine, self.llm = engine, engine.llm
        self.model = model
        self.max_new_tokens = max_new_tokens or self.llm.limits.max_seq_len
        self._call_forms: dict[str, CallForm] = {}  # of each template

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
        self._check_count(1, request.n or 1)
        text, manner = self._chat_text(request)
        prompt = self._encode(text, "messages", False)
        left = max(1, self.llm.most_tokens - len(prompt))
        params = self._params(
            request,
            request.max_completion_tokens
            or request.max_tokens
            or min(left, self.max_new_tokens),
            (request.top_logprobs or 0) if request.logprobs else None,
        )
        kind = Chat(self.llm.tokenizer, bool(request.logprobs))
        if not manner.plain:
            params = self._must_call(request, manner, params)
            if manner.names_tokens:
                params = dataclasses.replace(params, skip_special_tokens=False)
            reports = bool(request.logprobs)
            kind = ReadChat(self.llm.tokenizer, reports, manner.reading)
        return self._job(request, [prompt], params, request.n or 1, "messages", kind)

    def chat_tokens(self, request: ChatRequest) -> int:
        """Tokens of the prompt of a chat."""
        text, _ = self._chat_text(request)
        return len(self._encode(text, "messages", False))

    def _chat_text(self, request: ChatRequest) -> tuple[str, Manner]:
        """The prompt of a chat, and how its answer will be written. Raises ApiError."""
        calling, tokenizer = self._calling(request), self.llm.tokenizer
        tools = request.tools_for_template if calling else None
        template = tokenizer.template_for(tools) or ""
        manner = manner_of(template, tokenizer, calling, request.schemas)
        if request.reasoning_effort is None:
            values = dict(request.chat_template_kwargs or {})
        else:
            known = tokenizer.template_values(tools)
            values = template_values(request, known, manner.thinks)
        goes_on = request.continue_final_message is True
        asks = request.add_generation_prompt is not False
        if takes_tools(template):
            text = self._framed(request.messages, asks, tools, goes_on, values)
        else:
            text = self._in_words(request.messages, asks, tools, goes_on, values)
        if goes_on and manner.harmony:
            raise ApiError(
                400,
                "continue_final_message: this model's answers begin with a channel, and "
                "cannot go on in the middle of one; end the messages with the user's",
                "continue_final_message",
                "unsupported",
            )
        inside = None
        if manner.thinking:
            begun = request.messages[-1].spoken if goes_on else None
            inside = manner.thinking.open_at_end(text, begun)
        budget = budget_of(request, values)
        manner = dataclasses.replace(manner, inside=inside, budget=budget)
        if request.thinking_token_budget is not None and not manner.may_think:
            raise ApiError(
                400,
                "thinking_token_budget: this model does not think, or in a way that is "
                "not known",
                "thinking_token_budget",
                "unsupported",
            )
        return text, manner

    def _calling(self, request: ChatRequest) -> Calling | None:
        """The convention in which the model is to write calls; None where it is to make
        none. Raises ApiError where it cannot."""
        if not request.tools or request.tool_choice == "none":
            return None
        template = self.llm.tokenizer.template_for(request.tools) or ""
        if not takes_tools(template):
            return HERMES
        found = calling_of(template)
        if found is None:
            raise ApiError(
                422,
                "tools: this model's chat template has calls written in a way that is not "
                "known; start the server with another --chat-template",
                "tools",
                "tools",
            )
        return found

    def _must_call(
        self, request: ChatRequest, manner: Manner, params: SamplingParams
    ) -> SamplingParams:
        """The parameters, with the structure of calls where there must be one, and what
        comes before a structure in the model's manner."""
        called, calling = request.must_call, manner.calling
        if not called or calling is None:
            structure = manner.structure(params.structure, False)
            return dataclasses.replace(params, structure=structure)
        several = request.may_call_again
        if params.structure is not None:
            raise ApiError(
                400,
                "tool_choice: the answer cannot be a call and have a response_format",
                "tool_choice",
                "invalid_value",
            )
        try:
            structure = calling.structure(called, several, self.llm.tokenizer)
        except KvlatheError as error:
            raise refusal(error, "tools") from error
        structure = manner.structure(structure, True)
        # What may end a text would cut a call, which ends by itself.
        return dataclasses.replace(params, structure=structure, stop=(), stop_ids=())

    def prefix(self, request: PrefixRequest) -> list[int]:
        """The tokens of a prefix that is to be compacted."""
        if request.messages is not None:
            return self._encode(
                self._framed(request.messages, False), "messages", False
            )
        assert request.prompt is not None
        if isinstance(request.prompt, str):
            return self._encode(request.prompt, "prompt", True)
        return request.prompt

    def tokens(self, request: TokenizeRequest) -> list[int]:
        """The tokens of a text or a conversation."""
        if request.messages is not None:
            text = self._framed(
                request.messages, request.add_generation_prompt is not False
            )
            special = request.add_special_tokens is True
            return self._encode(text, "messages", special)
        assert request.prompt is not None
        special = request.add_special_tokens is not False
        return self._encode(request.prompt, "prompt", special)

    def text(self, tokens: list[int]) -> str:
        """The text of tokens, special ones by their names."""
        self._check_ids("tokens", tokens)
        return self.llm.tokenizer.decode(tokens, skip_special_tokens=False)

    def _framed(
        self,
        messages: list[Message],
        asks: bool,
        tools: list[Json] | None = None,
        goes_on: bool = False,
        values: Mapping[str, object] | None = None,
    ) -> str:
        """The text of a conversation; ``asks``: that an answer is to follow, which may
        call ``tools``; ``goes_on``: that it goes on with the last message. ``values``
        are the template's own."""
        framed = self.llm.tokenizer.chat_prompt
        template = self.llm.tokenizer.template_for(tools) or ""
        turns = self._call_form(template, tools, messages).turns(messages)
        if DEVELOPER not in template:
            for turn in turns:
                turn["role"] = {DEVELOPER: "system"}.get(turn["role"], turn["role"])
        if shown_by(template):
            for turn in turns:
                name_thoughts(turn)
        try:
            return framed(turns, asks, goes_on, tools=tools, **(values or {}))
        except KvlatheError as error:
            raise ApiError(
                422, f"messages: {error}", "messages", "chat_template"
            ) from error

    def _call_form(
        self, template: str, tools: list[Json] | None, messages: list[Message]
    ) -> CallForm:
        """The form in which the template takes calls, if there are any."""
        known = self._call_forms.get(template)
        if known is None and any(message.tool_calls for message in messages):
            framed = self.llm.tokenizer.chat_prompt
            known = form_of(lambda trial: framed(trial, tools=tools))
            if known is not None:  # else it may have been refused for want of time
                self._call_forms[template] = known
        return known or CallForm()

    def _in_words(
        self,
        messages: list[Message],
        asks: bool,
        tools: list[Json] | None,
        goes_on: bool,
        values: Mapping[str, object],
    ) -> str:
        """As ``_framed``, by a template that takes no tools. Some take no system message
        either: the user's then tells of them."""
        if not tools:
            template = self.llm.tokenizer.template_for(None) or ""
            turns = messages if "tool_calls" in template else in_words(messages)
            return self._framed(turns, asks, None, goes_on, values)
        try:
            turns = told(messages, tools, "system")
            return self._framed(turns, asks, None, goes_on, values)
        except ApiError:
            turns = told(messages, tools, "user")
            return self._framed(turns, asks, None, goes_on, values)

    def _echo(self, given: str | list[int], ids: list[int]) -> Echo:
        tokenizer = self.llm.tokenizer
        return (
            Echo(ids, given, tokenizer.starts(given))
            if isinstance(given, str)
            else Echo(ids, tokenizer.decode_whole(ids), None)
        )

    def _encode(self, text: str, param: str, special: bool) -> list[int]:
        try:
            most = self.llm.limits.max_input_len
            if (
                len(text) > most * self.llm.tokenizer.longest_token
            ):  # splitting megabytes would take seconds
                said = (
                    f"{param}: {len(text):,} characters are too long: this model's "
                    f"maximum input length is {most} tokens (--max-input-len)"
                )
                raise ApiError(400, said, param, TOO_LONG)
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
        """Check ids before anything is made of them: a body of a few megabytes can ask
        for millions."""
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
            if request.model != self.model:
                params = dataclasses.replace(params, adapter=request.model)
        except KvlatheError as error:
            raise refusal(error, None) from error
        self._check_ids("stop_token_ids", params.stop_ids)
        self._check_ids("logit_bias", (token for token, _ in params.logit_bias))
        return params

    def _check_structure(self, request: CompletionRequest | ChatRequest) -> None:
        """Read what the answer must look like."""
        try:
            request.structure()
        except KvlatheError as error:
            raise refusal(error, request.structure_param) from error

    def _job(
        self,
        request: CompletionRequest | ChatRequest,
        prompts: list[list[int]],
        params: SamplingParams,
        n: int,
        param: str,
        kind: Kind,
    ) -> Job:
        options = request.stream_options
        return Job(
            prompts,
            params,
            n,
            param,
            kind,
            request.deadline_seconds,
            bool(options and options.include_usage),
            bool(options and options.include_usage and options.continuous_usage_stats),
            request.priority or 0,
        )
