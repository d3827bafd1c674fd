"""Replies to clients: the OpenAI API's answers, for its description at /docs."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class CompletionTokensDetails(BaseModel):
    """Counts of tokens that the server guessed (docs/speculative.md), and of those that
    are thoughts."""

    accepted_prediction_tokens: int | None = Field(
        None, description="Guessed and right, so in the answer."
    )
    rejected_prediction_tokens: int | None = Field(
        None, description="Guessed and wrong; not in the answer."
    )
    reasoning_tokens: int | None = Field(
        None, description="Thoughts, where the model may think."
    )


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(description="Tokens that the prefix cache had.")


class Usage(BaseModel):
    """Tokens. A prompt with several choices counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = Field(
        None, description="Where the server speculates, or the model may think."
    )


FinishReason = Literal["stop", "length", "tool_calls"]
STOP_REASON = "Extension: the stop string that ended the text, where one did."


class CompletionLogprobs(BaseModel):
    """One entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None] = Field(
        description="Of the model before any sampling parameter."
    )
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(
        description="Where the token begins, in characters of the text."
    )


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | None = Field(None, description=STOP_REASON)


class Completion(BaseModel):
    """A completion, whole or as a chunk of a stream, whose texts add up."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(description="Unix seconds.")
    model: str
    system_fingerprint: str = Field(description="Of the compression plan.")
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Likely(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None = Field(
        description="UTF-8. Those of successive tokens make up the text."
    )


class TokenReport(Likely):
    top_logprobs: list[Likely]


class ChatLogprobs(BaseModel):
    content: list[TokenReport]


class FunctionCall(BaseModel):
    name: str
    arguments: str = Field(description="JSON, as the model wrote it.")


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Reply(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = Field(
        None, description="Extension: thoughts before the answer."
    )
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: Reply
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: str | None = Field(None, description=STOP_REASON)


class ChatCompletion(BaseModel):
    """Chunks of a stream have object chat.completion.chunk, and delta in place of
    message."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(description="Unix seconds.")
    model: str
    system_fingerprint: str = Field(description="Of the compression plan.")
    choices: list[ChatChoice]
    usage: Usage


class ResponseObject(BaseModel):
    """A response. Events of a stream have its parts, and the whole at the end."""

    id: str
    object: Literal["response"] = "response"
    created_at: int = Field(description="Unix seconds.")
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    output: list[dict[str, object]] = Field(
        description="Items: reasoning, message, function_call."
    )
    usage: dict[str, object] | None = None


class ItemList(BaseModel):
    object: Literal["list"] = "list"
    data: list[dict[str, object]]
    first_id: str
    last_id: str
    has_more: bool


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class AnthropicMessage(BaseModel):
    """An answer, as Anthropic's API has it."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, object]] = Field(
        description="Blocks: thinking, text, tool_use."
    )
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None = None
    usage: dict[str, object]


class TokenCount(BaseModel):
    input_tokens: int


class Prefix(BaseModel):
    """A prefix that was compacted. Later requests that begin with it use it."""

    object: Literal["prefix"] = "prefix"
    model: str
    tokens: int = Field(description="Of the prefix, as many as whole blocks hold.")
    kept: float = Field(description="Share of its KV pairs that stayed.")
    kv_bytes: int
    kv_bytes_whole: int = Field(description="Without compaction.")
    seconds: float


class Tokens(BaseModel):
    count: int
    max_model_len: int = Field(description="Tokens of prompt and answer together.")
    tokens: list[int]
    token_strs: list[str] | None = Field(description="Entries of the vocabulary.")


class TokenizerInfo(BaseModel):
    """Fields of a tokenizer_config.json, as far as they are known here. Other special tokens
    have their own names."""

    model_config = ConfigDict(extra="allow")

    eos_token: str | None = None
    bos_token: str | None = None
    chat_template: str | None = None
    model_max_length: int = Field(description="Tokens of prompt and answer together.")


class Text(BaseModel):
    prompt: str


class Version(BaseModel):
    version: str


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["kvlathe"] = "kvlathe"
    root: str = Field(description="The model that is served.")
    parent: str | None = Field(description="The same, for an adapter of it.")
    type: Literal["model"] = "model"
    display_name: str = Field(description="The id: Anthropic's API has this name.")
    created_at: str = Field(description="The same time, as Anthropic's API has it.")
    max_model_len: int = Field(description="Tokens of prompt and answer together.")
    kv_bytes_per_token: float
    kv_bytes_removed: float = Field(
        description="Share of the uncompressed cache's bytes, same number format."
    )


class ModelList(BaseModel):
    """All models, on one page: the API of Anthropic has pages."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    first_id: str
    last_id: str
    has_more: Literal[False] = False


class Health(BaseModel):
    status: Literal["ok", "sleeping", "draining", "stuck", "dead"]


class IsSleeping(BaseModel):
    """Whether the engine sleeps, as vLLM says it."""

    is_sleeping: bool
