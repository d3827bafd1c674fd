"""Requests to /v1/responses, and the chats that they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from kvlathe.server.errors import renamed, unfit
from kvlathe.server.fields import Ignored, Integer, Items, Json, Refused, Strict
from kvlathe.server.formats import JsonSchema
from kvlathe.server.responses.items import Item, turns_of
from kvlathe.server.schema import ChatRequest, Effort
from kvlathe.server.tools import MAX_TOOLS, Function, Name

Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
LOGPROBS: Included = "message.output_text.logprobs"
"""The value of ``include`` that asks for log-probabilities."""
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Field of a chat -> the same field here."""


class FunctionTool(Function):
    type: Literal["function"]


class NamedFunction(Strict):
    type: Literal["function"]
    name: Name


class AllowedFunctions(Strict):
    """The only tools, of all, that may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[NamedFunction] = Field(min_length=1, max_length=MAX_TOOLS)


Choice = Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions


class Format(JsonSchema):
    """The form of a text: any, a JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]

    @model_validator(mode="after")
    def _has_a_schema(self) -> Format:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise PydanticCustomError(
                "schema", "schema belongs to the type json_schema"
            )
        return self

    @property
    def for_chat(self) -> Json:
        said: Json = {"type": self.type}
        if self.type == "json_schema":
            said["json_schema"] = {"name": self.name, "schema": self.schema_}
        return said


class TextOptions(Strict):
    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    effort: Effort | None = None
    summary: str | None = Field(None, description="Ignored: thoughts are given whole.")
    generate_summary: str | None = Field(None, description="Ignored.")


class StreamOptions(Strict):
    include_obfuscation: bool | None = Field(None, description="Ignored.")


class PromptRequest(Strict):
    """The fields that the prompt depends on: POST /v1/responses/input_tokens."""

    model: str = Field(description="The served model's name, as /v1/models lists it.")
    input: str | Items[Item] | None = Field(
        None,
        validate_default=True,
        description="A text, or items: messages, calls and their outputs.",
    )
    instructions: str | None = Field(
        None, description="What the system says; of this response alone."
    )
    previous_response_id: str | None = Field(
        None, description="The conversation of that response goes on."
    )
    tools: Items[FunctionTool] | None = Field(
        None, max_length=MAX_TOOLS, description="Functions that may be called."
    )
    tool_choice: Choice | None = Field(
        None,
        description="none, auto (the default), required, a function's name, or allowed_tools.",
    )
    parallel_tool_calls: bool | None = Field(
        None, description="false: one call at most where there must be one."
    )
    text: TextOptions | None = Field(None, description="What a text must look like.")
    truncation: Literal["disabled"] | None = Field(
        None, description="What is too long is refused."
    )
    reasoning: Reasoning | None = Field(
        None, description="effort: how much the model may think."
    )
    # Extensions, named as in vLLM.
    chat_template_kwargs: Json | None = Field(
        None, description="Extension: values of the chat template's own."
    )
    thinking_token_budget: Integer | None = Field(
        None,
        ge=-1,
        lt=2**31,
        description="Extension: most tokens of thoughts; -1: any.",
    )
    priority: Integer | None = Field(
        None, description="Extension: of one key's requests, lower ones go first."
    )
    conversation: Refused = None
    prompt: Refused = None

    @property
    def items(self) -> list[Json]:
        """The items that it adds, as JSON."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return [item.model_dump(exclude_none=True) for item in self.input or []]

    def chat(self, items: Sequence[Item]) -> ChatRequest:
        """The chat of a conversation's ``items``. Raises ApiError."""
        fields = self._fields(items)
        try:
            return ChatRequest.model_validate(fields)
        except ValidationError as error:
            raise renamed(unfit(error, fields), NAMES) from error

    def _fields(self, items: Sequence[Item]) -> Json:
        said: Json = {
            "model": self.model,
            "messages": turns_of(items, self.instructions),
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.chat_template_kwargs,
            "tool_choice": chosen(self.tool_choice),
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "thinking_token_budget": self.thinking_token_budget,
            "priority": self.priority,
        }
        if self.tools:
            own = [tool.model_dump(exclude={"type"}) for tool in self.tools]
            said["tools"] = [{"type": "function", "function": one} for one in own]
        if self.text and self.text.format:
            said["response_format"] = self.text.format.for_chat
        return said


class ResponsesRequest(PromptRequest):
    """POST /v1/responses."""

    max_output_tokens: Integer | None = Field(
        None, ge=1, lt=2**31, description="Default: all that the engine's limits leave."
    )
    temperature: float | None = Field(None, ge=0, le=2, description="Default: 1.")
    top_p: float | None = Field(None, ge=0, le=1)
    top_logprobs: Integer | None = Field(
        None, ge=0, le=20, description=f"Needs {LOGPROBS} in include."
    )
    include: Items[Included] | None = Field(
        None,
        description=f"{LOGPROBS}. Others say nothing: there are no built-in tools, and "
        "thoughts are given whole.",
    )
    store: bool | None = Field(
        None,
        description="false: the response is not kept. Others are kept for a while.",
    )
    stream: bool | None = Field(None, description="Server-sent events.")
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = Field(None, description="Given back as it is.")
    # Extensions, named as in vLLM.
    seed: Integer | None = Field(
        None, ge=-(2**63), lt=2**63, description="Extension: same seed, same text."
    )
    top_k: Integer | None = Field(None, ge=-1, lt=2**31, description="Extension.")
    deadline_seconds: float | None = Field(
        None, gt=0, description="Extension: give up after so long, with 408."
    )
    # Refused unless they ask for nothing.
    background: Literal[False] | None = None
    context_management: Refused = None
    # They say nothing about the text.
    user: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    max_tool_calls: Ignored = None
    moderation: Ignored = None

    @field_validator("input")
    @classmethod
    def _has_items(cls, given: str | list[Item] | None) -> str | list[Item] | None:
        if given is None or given == []:
            raise PydanticCustomError("input", "it has no items")
        return given

    @model_validator(mode="after")
    def _reports(self) -> ResponsesRequest:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError(
                "top_logprobs",
                "needs {name} in include",
                {"name": LOGPROBS},
            )
        return self

    @property
    def logprobs(self) -> bool:
        """Whether log-probabilities are asked for."""
        return LOGPROBS in (self.include or [])

    def _fields(self, items: Sequence[Item]) -> Json:
        return {
            **super()._fields(items),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs if self.logprobs else None,
            "deadline_seconds": self.deadline_seconds,
        }


def chosen(choice: Choice | None) -> Json | str | None:
    """A choice of tools as a chat says it."""
    if isinstance(choice, NamedFunction):
        return {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, AllowedFunctions):
        tools = [chosen(one) for one in choice.tools]
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.mode, "tools": tools},
        }
    return choice
