"""Requests to Anthropic's /v1/messages, and the chats that they are.

Blocks that an engine cannot read (images, documents) and tools of Anthropic's own are
refused; fields that say nothing about the text are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvlathe.server.errors import renamed, unfit
from kvlathe.server.fields import Ignored, Integer, Items, Json, Refused, Strict
from kvlathe.server.manner import SWITCHES
from kvlathe.server.schema import MAX_STOPS, ChatRequest, Effort
from kvlathe.server.tools import MAX_TOOLS, Name, parse_arguments

NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Field of a chat -> the same field here."""


class Loose(BaseModel):
    """Blocks have fields that say nothing about the text (cache_control)."""

    model_config = ConfigDict(extra="ignore", strict=True)


class TextBlock(Loose):
    type: Literal["text"]
    text: str


class ThinkingBlock(Loose):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description="Not checked.")


class HiddenThinkingBlock(Loose):
    """Thoughts that another server encrypted: nobody here can read them."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Loose):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Json


class ToolResultBlock(Loose):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[TextBlock] | None = None
    is_error: bool | None = None

    @property
    def text(self) -> str:
        """The output of the tool. Templates have no place for the news that it failed."""
        said = text_of(self.content or "")
        return f"Error: {said}" if self.is_error else said


def kind_of(block: object) -> object:
    if isinstance(block, dict):
        return cast("Json", block).get("type")
    return getattr(block, "type", None)


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[HiddenThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(
        kind_of,
        custom_error_type="block",
        custom_error_message="its type must be text, thinking, redacted_thinking, "
        "tool_use or tool_result",
    ),
]


class Turn(Loose):
    role: Literal["user", "assistant", "system"]
    content: str | Items[Block]

    @property
    def blocks(self) -> list[Block]:
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content


class CustomTool(Loose):
    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: Json = Field(description="A JSON schema.")


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError(
                "tool_choice", "it has a name where its type is tool, and only there"
            )
        return self


class JsonFormat(Strict):
    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(Strict):
    format: JsonFormat | None = None
    effort: Effort | None = None


class Thinking(Strict):
    """Thoughts before the answer. Without this field there are none, where the model can
    leave them."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Integer | None = Field(None, ge=1, lt=2**31)
    display: Ignored = None


class PromptRequest(Strict):
    """The fields that the prompt depends on: POST /v1/messages/count_tokens."""

    model: str = Field(description="The served model's name, as /v1/models lists it.")
    messages: Items[Turn] = Field(
        min_length=1, description="An assistant's turn at the end is gone on with."
    )
    system: str | Items[TextBlock] | None = None
    tools: Items[CustomTool] | None = Field(
        None, max_length=MAX_TOOLS, description="Tools that the client runs."
    )
    tool_choice: ToolChoice | None = Field(
        None, description="auto (the default), any, tool with its name, or none."
    )
    thinking: Thinking | None = None
    output_config: OutputConfig | None = Field(
        None,
        description="format: JSON by a schema; effort: how much to think, where `thinking` allows it.",
    )
    # Refused unless they ask for nothing.
    container: Refused = None
    mcp_servers: Refused = None
    # They say nothing about the text.
    cache_control: Ignored = None
    context_management: Ignored = None

    def chat(self) -> ChatRequest:
        """The chat that it is. Raises ApiError."""
        fields = self._fields()
        try:
            chat = ChatRequest.model_validate(fields)
        except ValidationError as error:
            raise renamed(unfit(error, fields), NAMES) from error
        return chat if self.thinking else chat.without_insisting()

    def _fields(self) -> Json:
        turns = turns_of(self.messages)
        if self.system:
            turns.insert(0, {"role": "system", "content": text_of(self.system)})
        said: Json = {"model": self.model, "messages": turns}
        last = turns[-1]
        if last["role"] == "assistant" and not last.get("tool_calls"):
            said |= {"add_generation_prompt": False, "continue_final_message": True}
        if self.tools:
            said["tools"] = [function_of(tool) for tool in self.tools]
        if choice := self.tool_choice:
            said["tool_choice"] = chosen(choice)
            said["parallel_tool_calls"] = choice.disable_parallel_tool_use is not True
        if self.output_config and (form := self.output_config.format):
            named = {"name": "output", "schema": form.schema_}
            said["response_format"] = {"type": "json_schema", "json_schema": named}
        return said | self._thinking()

    def _thinking(self) -> Json:
        """The fields of a chat that say how much the model may think."""
        effort = self.output_config.effort if self.output_config else None
        if self.thinking is None or self.thinking.type == "disabled":
            return {"reasoning_effort": "none"}
        said: Json = {"thinking_token_budget": self.thinking.budget_tokens}
        if effort is not None:
            return said | {"reasoning_effort": effort}
        # Some templates think only where they are told to; others do not ask.
        return said | {"chat_template_kwargs": dict.fromkeys(SWITCHES, True)}


class MessagesRequest(PromptRequest):
    """POST /v1/messages."""

    max_tokens: Integer = Field(ge=1, lt=2**31)
    stop_sequences: Items[str] | None = Field(
        None, description=f"Up to {MAX_STOPS} strings that end the text."
    )
    stream: bool | None = Field(None, description="Server-sent events.")
    temperature: float | None = Field(None, ge=0, le=2, description="Default: 1.")
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: Integer | None = Field(None, ge=-1, lt=2**31)
    # They say nothing about the text.
    metadata: Ignored = None
    service_tier: Ignored = None
    inference_geo: Ignored = None

    @field_validator("stop_sequences")
    @classmethod
    def _stops(cls, stops: list[str] | None) -> list[str] | None:
        if stops and (len(stops) > MAX_STOPS or not all(stops)):
            raise PydanticCustomError(
                "stop_sequences",
                "at most {most} strings, none of them empty",
                {"most": MAX_STOPS},
            )
        return stops

    def _fields(self) -> Json:
        return {
            **super()._fields(),
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences or None,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }


def text_of(content: str | Sequence[TextBlock]) -> str:
    if isinstance(content, str):
        return content
    return "\n\n".join(block.text for block in content)


def turns_of(messages: Sequence[Turn]) -> list[Json]:
    """The messages of a chat. Turns of one role in a row are one, and results of tools
    are messages of their own."""
    turns: list[Json] = []
    for message in messages:
        for block in message.blocks:
            add_block(turns, message.role, block)
    return turns or [{"role": "user", "content": ""}]


def add_block(turns: list[Json], role: str, block: Block) -> None:
    if isinstance(block, HiddenThinkingBlock):
        return
    if isinstance(block, ToolResultBlock):
        said = {"role": "tool", "tool_call_id": block.tool_use_id}
        turns.append({**said, "content": block.text})
        return
    if not turns or turns[-1]["role"] != role:
        turns.append({"role": role, "content": ""})
    last = turns[-1]
    if isinstance(block, TextBlock):
        last["content"] = "\n\n".join(filter(None, [last["content"], block.text]))
    elif isinstance(block, ThinkingBlock):
        before = last.get("reasoning_content", "")
        last["reasoning_content"] = before + block.thinking
    else:
        function = {"name": block.name, "arguments": block.input}
        last.setdefault("tool_calls", []).append(
            {"id": block.id, "type": "function", "function": function}
        )


def function_of(tool: CustomTool) -> Json:
    """A tool as a chat has it."""
    said: Json = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        said["description"] = tool.description
    return {"type": "function", "function": said}


def chosen(choice: ToolChoice) -> Json | str:
    """A choice of tools as a chat says it."""
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"any": "required"}.get(choice.type, choice.type)


def input_of(arguments: str) -> Json:
    """The input of a call; empty where it was cut."""
    found = parse_arguments(arguments)
    return cast("Json", found) if isinstance(found, dict) else {}
