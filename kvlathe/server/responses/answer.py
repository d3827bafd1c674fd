"""Answers of /v1/responses: the pieces of a chat's answer as items, and as the events of
a stream. A whole answer is what its events add up to."""

from __future__ import annotations

import time
import uuid

from kvlathe.server.errors import ApiError
from kvlathe.server.fields import Json
from kvlathe.server.responses.request import ResponsesRequest

MESSAGE, REASONING, CALL = "message", "reasoning", "function_call"
PREFIXES = {MESSAGE: "msg", REASONING: "rs", CALL: "fc"}
PARTS = {MESSAGE: "output_text", REASONING: "reasoning_text"}
"""Item -> its part, which events are named after."""
ERRORS = {429: "rate_limit_exceeded"}


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


class Writer:
    """Writer of one response (``written.Writer``). ``response``: as far as it has
    come."""

    def __init__(self, request: ResponsesRequest) -> None:
        self.response = head_of(request)
        self._reports = request.logprobs
        self._output: list[Json] = self.response["output"]
        self._open: Json | None = None
        self._events = 0
        self._thoughts = 0  # tokens that were reported and are none of the text
        self._logprobs: list[Json] = []  # of text that has not come
        self._ended: str | None = None

    def begin(self, usage: Json) -> list[Json]:
        """The first events."""
        return [
            self._event("response.created", response=snapshot(self.response)),
            self._event("response.in_progress", response=snapshot(self.response)),
        ]

    def add(self, piece: Json, thoughts: int) -> list[Json]:
        """Events of a piece of a chat's choice. ``thoughts``: tokens so far that are
        thoughts or end them: they come first, and their reports are not the text's."""
        delta, reports = piece["delta"], piece["logprobs"]
        if reports:
            self._logprobs += reports["content"][thoughts - self._thoughts :]
            self._thoughts = thoughts
        self._ended = piece["finish_reason"] or self._ended
        events: list[Json] = []
        if not {"reasoning_content", "tool_calls"}.isdisjoint(delta):
            self._logprobs = []  # they are not of text
        if thought := delta.get("reasoning_content"):
            events += self._text(REASONING, thought)
        if text := delta.get("content"):
            events += self._text(MESSAGE, text)
        for call in delta.get("tool_calls", ()):
            events += self._call(call)
        return events

    def end(self, usage: Json, cut: str) -> list[Json]:
        """The last events. ``cut``: the text of a call that was begun and not ended."""
        events: list[Json] = []
        if not self._output:
            events += self._begin(MESSAGE, content=[])
        long = self._ended == "length"
        status = "incomplete" if long or cut else "completed"
        events += self._close(status)
        self.response |= {
            "status": status,
            "usage": usage_of(usage),
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if long else None,
        }
        return [*events, self._event(f"response.{status}", response=self.response)]

    def fail(self, error: ApiError) -> list[Json]:
        """The last event of a response that fails in its middle."""
        self.response["status"] = "failed"
        self.response["error"] = {
            "code": ERRORS.get(error.status_code, "server_error"),
            "message": error.detail,
        }
        return [self._event("response.failed", response=self.response)]

    # -- items -------------------------------------------------------------------------
    def _text(self, kind: str, text: str) -> list[Json]:
        events = [] if self._of(kind) else self._begin(kind, content=[])
        item = self._item
        part, logprobs = item["content"][0], list[Json]()
        if kind == MESSAGE:
            logprobs, self._logprobs = self._logprobs, []
        part["text"] += text
        if "logprobs" in part:
            part["logprobs"] += logprobs
        said: Json = {"delta": text} | self._place | {"content_index": 0}
        if kind == MESSAGE:
            said["logprobs"] = logprobs if self._reports else []
        return [*events, self._event(f"response.{PARTS[kind]}.delta", **said)]

    def _call(self, call: Json) -> list[Json]:
        function, events = call["function"], list[Json]()
        if "id" in call:
            events += self._begin(
                CALL, call_id=call["id"], name=function["name"], arguments=""
            )
        if not (arguments := function["arguments"]):
            return events
        self._item["arguments"] += arguments
        return [
            *events,
            self._event(
                "response.function_call_arguments.delta",
                delta=arguments,
                **self._place,
            ),
        ]

    def _begin(self, kind: str, **fields: object) -> list[Json]:
        """Open an item, and close the one before it."""
        events = self._close("completed")
        item: Json = {"id": new_id(PREFIXES[kind]), "type": kind, **fields}
        item["status"] = "in_progress"
        if kind == MESSAGE:
            item["role"] = "assistant"
        if kind == REASONING:
            item["summary"] = []
        self._output.append(item)
        self._open = item
        place = self._place["output_index"]
        events.append(
            self._event(
                "response.output_item.added", output_index=place, item=snapshot(item)
            )
        )
        if kind in PARTS:
            part: Json = {"type": PARTS[kind], "text": ""}
            if kind == MESSAGE:
                part |= {"annotations": [], "logprobs": []}
            item["content"].append(part)
            events.append(
                self._event(
                    "response.content_part.added",
                    **self._place | {"content_index": 0, "part": snapshot(part)},
                )
            )
        return events

    def _close(self, status: str) -> list[Json]:
        """Close the open item."""
        if self._open is None:
            return []
        item, events = self._open, list[Json]()
        item["status"] = status
        kind, place = item["type"], self._place
        if kind in PARTS:
            part = item["content"][0]
            said = place | {"content_index": 0, "text": part["text"]}
            if kind == MESSAGE:
                said["logprobs"] = part["logprobs"]
            events.append(self._event(f"response.{PARTS[kind]}.done", **said))
            events.append(
                self._event(
                    "response.content_part.done",
                    **place | {"content_index": 0, "part": part},
                )
            )
        else:
            said = place | {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._event("response.function_call_arguments.done", **said))
        index = place["output_index"]
        events.append(
            self._event("response.output_item.done", output_index=index, item=item)
        )
        self._open = None
        return events

    @property
    def _item(self) -> Json:
        assert self._open is not None
        return self._open

    def _of(self, kind: str) -> bool:
        """Whether the open item is of a kind."""
        return self._open is not None and self._open["type"] == kind

    @property
    def _place(self) -> Json:
        """The open item, as events name it."""
        return {"item_id": self._item["id"], "output_index": len(self._output) - 1}

    def _event(self, kind: str, **fields: object) -> Json:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **fields}


def snapshot(said: Json) -> Json:
    """A copy that later text does not reach."""
    return {
        key: [*value] if isinstance(value, list) else value
        for key, value in said.items()
    }


def usage_of(usage: Json) -> Json:
    """Tokens, as this API counts them, from those of a chat."""
    details = usage.get("completion_tokens_details") or {}
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": details.get("reasoning_tokens", 0)
        },
        "total_tokens": usage["total_tokens"],
    }


def head_of(request: ResponsesRequest) -> Json:
    """A response that has no output yet: what was asked, said back."""
    said = request.model_dump(
        by_alias=True, exclude_none=True, include={"text", "tools", "tool_choice"}
    )
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {
            "effort": request.reasoning.effort if request.reasoning else None,
            "summary": None,
        },
        "store": request.store is not False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": {"type": "text"}, **said.get("text", {})},
        "tool_choice": said.get("tool_choice", "auto"),
        "tools": said.get("tools", []),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "usage": None,
    }
