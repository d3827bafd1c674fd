"""Requests of clients: the OpenAI API's completions and chat completions, with the
extensions that vLLM has too. replies.py has the answers.

Fields of the OpenAI API that would change the answer in a way an engine cannot are
refused unless they ask for nothing; those that change nothing about the text are
accepted and ignored; unknown ones are refused.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, cast

from pydantic import (
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.structure import Structure
from kvlathe.server.fields import (
    Ignored,
    Integer,
    Items,
    Json,
    Refused,
    Strict,
    TokenIds,
    interval_of,
    unsupported,
)
from kvlathe.server.formats import ResponseFormat, StructuredOutputs
from kvlathe.server.messages import Message
from kvlathe.server.tools import (
    MAX_TOOLS,
    NamedChoice,
    Tool,
    ToolChoice,
    must_call,
    names_of,
)

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_BIASES = 1024
MAX_PROMPTS = 1 << 14
TEMPLATE_FIELDS = (
    *("self", "messages", "tools", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "chat_template"),
)
"""Names of a template's values that a request gives elsewhere."""
TOKEN = re.compile("[0-9]{1,10}")
GUIDED = "guided_"
GUIDED_SAID = "Extension: older vLLM's name for structured_outputs."
STRUCTURES = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice"),
    "guided_grammar",
)
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(Strict):
    include_usage: bool | None = Field(
        None, description="One more chunk at the end, with usage and no choices."
    )
    continuous_usage_stats: bool | None = Field(
        None,
        description="Extension: with include_usage, usage so far in every chunk.",
    )
    include_obfuscation: bool | None = Field(None, description="Ignored.")


class SampledRequest(Strict):
    """Fields that both kinds of request have."""

    model: str = Field(description="The served model's name, as /v1/models lists it.")
    temperature: float | None = Field(
        None, ge=0, le=2, description="0 always takes the likeliest. Default: 1."
    )
    top_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Draw from the likeliest tokens of joint mass top_p; 0 takes the likeliest.",
    )
    n: Integer | None = Field(
        None, ge=1, le=MAX_CHOICES, description="Choices for each prompt. Default: 1."
    )
    stop: str | Items[str] | None = Field(
        None, description=f"Up to {MAX_STOPS} strings that end the text."
    )
    seed: Integer | None = Field(
        None,
        ge=-(2**63),
        lt=2**63,
        description="Same seed, same text; choice i adds i.",
    )
    presence_penalty: Annotated[float, interval_of("presence_penalty")] | None = Field(
        None
    )
    frequency_penalty: Annotated[float, interval_of("frequency_penalty")] | None = (
        Field(None)
    )
    logit_bias: dict[str, float] | None = Field(
        None, description="Token id -> what is added to its logit, +-100."
    )
    stream: bool | None = Field(
        None, description="Server-sent events, ended by data: [DONE]."
    )
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Ignored.")
    # Extensions, named as in vLLM.
    top_k: Integer | None = Field(
        None,
        ge=-1,
        lt=2**31,
        description="Extension: draw from the k likeliest only; 0 and -1 are off.",
    )
    min_p: Annotated[float, interval_of("min_p")] | None = Field(
        None,
        description="Extension: drop what is less likely than this share.",
    )
    repetition_penalty: Annotated[float, interval_of("repetition_penalty")] | None = (
        Field(None, description="Extension; counts the prompt too.")
    )
    ignore_eos: bool | None = Field(
        None, description="Extension: go on past the end-of-text token."
    )
    skip_special_tokens: bool | None = Field(
        None,
        description="Extension; false: the text has special tokens, but for its end.",
    )
    stop_token_ids: TokenIds | None = Field(
        None, max_length=MAX_STOPS, description="Extension."
    )
    min_tokens: Integer | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="Extension: tokens that come before the text may end.",
    )
    deadline_seconds: float | None = Field(
        None, gt=0, description="Extension: give up after so long, with 408."
    )
    response_format: ResponseFormat | None = Field(
        None,
        description="What the answer must look like: text, JSON, or JSON by a schema.",
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="Extension: one of json, regex, choice, grammar, json_object."
    )

    guided_json: Json | bool | str | None = Field(None, description=GUIDED_SAID)
    guided_regex: str | None = Field(None, description=GUIDED_SAID)
    guided_choice: Items[str] | None = Field(None, description=GUIDED_SAID)
    guided_grammar: str | None = Field(None, description=GUIDED_SAID)
    guided_decoding_backend: Ignored = None
    guided_whitespace_pattern: Refused = None
    priority: Integer | None = Field(
        None,
        ge=-(2**63),
        lt=2**63,
        description="Extension: of one key's requests that wait, lower ones go first. Default: 0.",
    )

    # vLLM's, which ask for what is done anyway, or are refused.
    use_beam_search: Literal[False] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    include_reasoning: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    prompt_logprobs: Refused = None
    allowed_token_ids: Refused = None
    bad_words: Refused = None
    truncate_prompt_tokens: Refused = None
    logits_processors: Refused = None
    kv_transfer_params: Refused = None
    request_id: Ignored = None

    @model_validator(mode="after")
    def _one_structure(self) -> SampledRequest:
        formats = self.response_format
        plain = formats is None or formats.type == "text"
        given = [name for name in STRUCTURES if getattr(self, name) is not None]
        if len(given) + (not plain) > 1:
            raise PydanticCustomError(
                "response_format",
                "give one of response_format, structured_outputs and guided_*",
            )
        return self

    @field_validator("stop")
    @classmethod
    def _stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > MAX_STOPS or not all(stops):
            raise PydanticCustomError(
                "stop",
                "at most {most} strings, none of them empty",
                {"most": MAX_STOPS},
            )
        return stop

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few_biases(cls, biases: object) -> object:
        if isinstance(biases, dict) and len(biases) > MAX_BIASES:
            raise PydanticCustomError(
                "logit_bias", "at most {most} token ids", {"most": MAX_BIASES}
            )
        return biases

    @field_validator("logit_bias")
    @classmethod
    def _biases(cls, biases: dict[str, float] | None) -> dict[str, float] | None:
        if not all(
            TOKEN.fullmatch(token) and abs(bias) <= 100
            for token, bias in (biases or {}).items()
        ):
            raise PydanticCustomError(
                "logit_bias", "token ids (decimal), each with a number from -100 to 100"
            )
        return biases

    @field_validator("stream_options")
    @classmethod
    def _of_a_stream(
        cls,
        options: StreamOptions | None,
        info: ValidationInfo,
    ) -> StreamOptions | None:
        if options and options.include_usage and not info.data.get("stream"):
            raise PydanticCustomError(
                "stream_options",
                "needs stream to be true; whole answers have usage anyway",
            )
        return options

    @property
    def structure_param(self) -> str | None:
        """The field that says what the answer must look like."""
        for name in (*STRUCTURES, "response_format"):
            if getattr(self, name) is not None:
                return name
        return None

    def structure(self) -> Structure | None:
        """The structure that the answer must have; None for any text. Raises
        KvlatheError for a structure that is none."""
        if self.structured_outputs is not None:
            return self.structured_outputs.structure()
        for name in STRUCTURES[1:]:
            if (value := getattr(self, name)) is not None:
                own = {name.removeprefix(GUIDED): value}
                return StructuredOutputs.model_validate(own).structure()
        return self.response_format.structure() if self.response_format else None

    def params(
        self,
        max_new_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """The request as the engine's SamplingParams."""
        temperature = 1.0 if self.temperature is None else self.temperature
        given: Json = {
            "temperature": 0.0 if self.top_p == 0 else temperature,
            "top_p": self.top_p or None,
            "top_k": max(0, self.top_k or 0),
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": tuple(
                (int(k), v) for k, v in (self.logit_bias or {}).items()
            ),
            "seed": None if self.seed is None else self.seed % 2**64,
            "stop": (self.stop,)
            if isinstance(self.stop, str)
            else tuple(self.stop or ()),
            "stop_ids": tuple(self.stop_token_ids or ()),
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "min_tokens": self.min_tokens,
            "max_new_tokens": max_new_tokens,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "structure": self.structure(),
        }
        return SamplingParams(
            **{name: value for name, value in given.items() if value is not None}
        )


class CompletionRequest(SampledRequest):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[Items[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[
            Items[Annotated[TokenIds, Field(min_length=1)]],
            Field(min_length=1, max_length=MAX_PROMPTS),
        ]
    ) = Field(
        description="A text, a list of token ids, or a list of either; several prompts are answered together."
    )
    max_tokens: Integer | None = Field(
        None, ge=0, lt=2**31, description="Default: 16. 0 only with echo."
    )
    logprobs: Integer | None = Field(
        None, ge=0, le=20, description="Report the so many likeliest beside each token."
    )
    echo: bool | None = Field(
        None,
        description="Begin with the prompt; with logprobs, those of its tokens too.",
    )
    best_of: Integer | None = Field(None, description="Refused unless it equals n.")
    suffix: Refused = Field(None, description="Refused unless empty.")

    @field_validator("best_of")
    @classmethod
    def _best_of(cls, value: int | None, info: ValidationInfo) -> int | None:
        return unsupported(None if value == (info.data.get("n") or 1) else value)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry for each prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [cast("list[int]", self.prompt)]
        return cast("list[str] | list[list[int]]", self.prompt)


class TokenizeRequest(Strict):
    """POST /tokenize, as vLLM has it."""

    model: str | None = Field(None, description="The served model's name.")
    prompt: str | None = None
    messages: Annotated[Items[Message], Field(min_length=1)] | None = Field(
        None, description="A conversation, as the chat template frames it."
    )
    add_special_tokens: bool | None = Field(
        None, description="Default: true for a prompt, false for messages."
    )
    add_generation_prompt: bool | None = Field(None, description="Default: true.")
    return_token_strs: bool | None = Field(None, description="Default: false.")

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("one", "give one of prompt and messages")
        return self


class DetokenizeRequest(Strict):
    """POST /detokenize, as vLLM has it."""

    model: str | None = Field(None, description="The served model's name.")
    tokens: TokenIds


class PrefixRequest(Strict):
    """POST /v1/prefixes."""

    model: str = Field(description="The served model's name, as /v1/models lists it.")
    prompt: str | Annotated[TokenIds, Field(min_length=1)] | None = Field(
        None, description="What completions will begin with: a text, or token ids."
    )
    messages: Annotated[Items[Message], Field(min_length=1)] | None = Field(
        None, description="What chats will begin with."
    )
    keep: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of KV pairs that stay. Default: the plan's.",
    )

    @model_validator(mode="after")
    def _one(self) -> PrefixRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("one", "give one of prompt and messages")
        return self


class ChatRequest(SampledRequest):
    """POST /v1/chat/completions."""

    messages: Items[Message] = Field(min_length=1)
    max_tokens: Integer | None = Field(
        None, ge=1, lt=2**31, description="Default: all that the engine's limits leave."
    )
    max_completion_tokens: Integer | None = Field(
        None, ge=1, lt=2**31, description="Goes before max_tokens."
    )
    logprobs: bool | None = None
    top_logprobs: Integer | None = Field(
        None, ge=0, le=20, description="Needs logprobs."
    )
    tools: Annotated[Items[Tool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="Functions that the answer may call."
    )
    tool_choice: ToolChoice | None = Field(
        None,
        description="none, auto (the default), required, a function's name, or allowed_tools.",
    )
    parallel_tool_calls: bool | None = Field(
        None, description="false: one call at most where there must be one."
    )
    chat_template_kwargs: Json | None = Field(
        None,
        description="Extension: values of the chat template's own, as enable_thinking.",
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="Extension; false: the prompt ends with the last message. Default: true.",
    )
    continue_final_message: bool | None = Field(
        None,
        description="Extension: go on with the last message's text; needs add_generation_prompt false.",
    )
    reasoning_effort: Effort | None = Field(
        None, description="How much the model may think; none: not at all."
    )
    thinking_token_budget: Integer | None = Field(
        None,
        ge=-1,
        lt=2**31,
        description="Extension: most tokens of thoughts, which are ended there; -1: any.",
    )
    # Refused unless they ask for nothing.
    functions: Refused = None
    function_call: Refused = None
    modalities: Refused = None
    audio: Refused = None
    prediction: Refused = None
    web_search_options: Refused = None
    chat_template: Refused = None
    documents: Refused = None
    mm_processor_kwargs: Refused = None
    verbosity: Literal["medium"] | None = Field(
        None, description="Others than medium, the API's default, are refused."
    )
    # They say nothing about the text.
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    moderation: Ignored = None

    _insists: bool = PrivateAttr(default=True)

    @property
    def insists(self) -> bool:
        """Whether an effort that would change nothing is refused."""
        return self._insists

    def without_insisting(self) -> ChatRequest:
        """The same, for an API in which that effort is the default."""
        self._insists = False
        return self

    @model_validator(mode="after")
    def _known_tools(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) < len(names):
            raise PydanticCustomError("tools", "two have the same name")
        wanted = names_of(self.tool_choice) or set()
        if (must_call(self.tool_choice) and not names) or not wanted <= {*names}:
            raise PydanticCustomError(
                "tool_choice",
                "it asks for a tool that tools does not have",
            )
        return self

    @model_validator(mode="after")
    def _one_end(self) -> ChatRequest:
        if self.continue_final_message and self.add_generation_prompt is not False:
            raise PydanticCustomError(
                "continue_final_message",
                "needs add_generation_prompt to be false",
            )
        return self

    @field_validator("thinking_token_budget")
    @classmethod
    def _no_budget(cls, budget: int | None) -> int | None:
        return None if budget == -1 else budget

    @field_validator("chat_template_kwargs")
    @classmethod
    def _own_values(cls, values: Json | None) -> Json | None:
        for name in values or {}:
            if name in TEMPLATE_FIELDS or not name.isidentifier():
                raise PydanticCustomError(
                    "chat_template_kwargs",
                    "{name} is no value of a template's own",
                    {"name": name[:60]},
                )
        return values

    @property
    def tools_for_template(self) -> list[Json]:
        """Tools as templates take them: where any answer is allowed, those that may be
        called."""
        tools = self.tools or []
        wanted = None if must_call(self.tool_choice) else names_of(self.tool_choice)
        if wanted is not None:
            tools = [tool for tool in tools if tool.function.name in wanted]
        return [tool.model_dump(exclude_none=True) for tool in tools]

    @property
    def schemas(self) -> dict[str, Json | bool]:
        """Tool -> schema of its arguments."""
        return {one.function.name: one.function.schema_ for one in self.tools or []}

    @property
    def must_call(self) -> dict[str, Json]:
        """The functions of which one must be called (name -> schema); empty where none
        must."""
        if not must_call(self.tool_choice):
            return {}
        wanted = names_of(self.tool_choice)
        functions = [tool.function for tool in self.tools or []]
        return {
            f.name: f.schema_ for f in functions if wanted is None or f.name in wanted
        }

    @property
    def may_call_again(self) -> bool:
        """Whether an answer that must call may have several calls. A function that is
        named is called once, as in vLLM: small models would go on until they are cut."""
        named = isinstance(self.tool_choice, NamedChoice)
        return self.parallel_tool_calls is not False and not named

    @property
    def structure_param(self) -> str | None:
        return "tools" if self.must_call else super().structure_param

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise PydanticCustomError("top_logprobs", "needs logprobs to be true")
        return value
