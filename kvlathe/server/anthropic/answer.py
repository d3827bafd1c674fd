"""Answers of /v1/messages: the pieces of a chat's answer as content blocks, and as the
events of a stream. A whole answer is what its events add up to."""

from __future__ import annotations

import hashlib
import uuid

from kvlathe.server.anthropic.request import input_of
from kvlathe.server.errors import ApiError
from kvlathe.server.fields import Json

TEXT, THINKING, CALL = "text", "thinking", "tool_use"
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Writer:
    """Writer of one message (``written.Writer``). ``message``: as far as it has come."""

    def __init__(self, model: str) -> None:
        self.message: Json = {
            "id": f"msg_{uuid.uuid4().hex[:24]}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._blocks: list[Json] = self.message["content"]
        self._open: Json | None = None
        self._arguments = ""  # of the open call
        self._reason = "stop"
        self._stop: str | None = None

    def begin(self, usage: Json) -> list[Json]:
        """The first event."""
        begun = {"content": [], "usage": usage_of(usage)}
        return [{"type": "message_start", "message": self.message | begun}]

    def add(self, piece: Json, thoughts: int) -> list[Json]:
        """Events of a piece of a chat's choice; tokens of ``thoughts`` are not told
        apart."""
        delta, events = piece["delta"], list[Json]()
        self._reason = piece["finish_reason"] or self._reason
        self._stop = piece.get("stop_reason", self._stop)
        if thought := delta.get("reasoning_content"):
            events += self._text(THINKING, thought)
        if text := delta.get("content"):
            events += self._text(TEXT, text)
        for call in delta.get("tool_calls", ()):
            events += self._call(call)
        return events

    def end(self, usage: Json, cut: str) -> list[Json]:
        """The last events. ``cut``: the text of a call that was begun and not ended; a
        whole message has it as text, since nobody may act on it."""
        events = self._close()
        if cut and self._blocks and self._blocks[-1]["type"] == CALL:
            self._blocks[-1] = {"type": TEXT, TEXT: cut}
        said = {
            "stop_reason": "stop_sequence" if self._stop else REASONS[self._reason],
            "stop_sequence": self._stop,
        }
        self.message |= {**said, "usage": usage_of(usage)}
        delta = {"type": "message_delta", "delta": said, "usage": usage_of(usage)}
        return [*events, delta, {"type": "message_stop"}]

    def fail(self, error: ApiError) -> list[Json]:
        """The last event of a message that fails in its middle."""
        return [error.anthropic_body]

    # -- blocks ------------------------------------------------------------------------
    def _text(self, kind: str, text: str) -> list[Json]:
        events: list[Json] = []
        if self._open is None or self._open["type"] != kind:
            signed = {"signature": ""} if kind != TEXT else {}
            events += self._begin({"type": kind, kind: "", **signed})
        assert self._open is not None
        self._open[kind] += text
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _call(self, call: Json) -> list[Json]:
        function, events = call["function"], list[Json]()
        if "id" in call:
            named = {"id": call["id"], "name": function["name"]}
            events += self._begin({"type": CALL, **named, "input": {}})
        if not (arguments := function["arguments"]):
            return events
        self._arguments += arguments
        return [
            *events,
            self._delta({"type": "input_json_delta", "partial_json": arguments}),
        ]

    def _begin(self, block: Json) -> list[Json]:
        """Open a block, and close the one before it."""
        events = self._close()
        self._blocks.append(block)
        self._open = block
        said: Json = {"type": "content_block_start", "content_block": {**block}}
        return [*events, {**said, "index": len(self._blocks) - 1}]

    def _close(self) -> list[Json]:
        """Close the open block."""
        if self._open is None:
            return []
        block, events = self._open, list[Json]()
        if block["type"] == CALL:
            block["input"], self._arguments = input_of(self._arguments), ""
        if block["type"] == THINKING:
            block["signature"] = signature_of(block["thinking"])
            events.append(
                self._delta(
                    {"type": "signature_delta", "signature": block["signature"]}
                )
            )
        self._open = None
        return [*events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _delta(self, delta: Json) -> Json:
        return {
            "type": "content_block_delta",
            "index": len(self._blocks) - 1,
            "delta": delta,
        }


def signature_of(thinking: str) -> str:
    """A mark of thoughts, where clients want one. Nobody checks it."""
    return hashlib.sha256(thinking.encode(errors="replace")).hexdigest()


def usage_of(usage: Json) -> Json:
    """Tokens, as this API counts them, from those of a chat: what the prefix cache had
    is no input."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }
