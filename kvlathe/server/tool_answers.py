"""Chat answers that may call tools."""

from __future__ import annotations

from kvlathe.runtime.requests.request import Delta
from kvlathe.runtime.text.tokenizer import Tokenizer
from kvlathe.server.choices import Chat
from kvlathe.server.conventions import Convention
from kvlathe.server.fields import Json
from kvlathe.server.tool_parser import Piece, ToolParser


class ToolChat(Chat):
    """Chats whose model writes calls by ``convention``."""

    def __init__(
        self, tokenizer: Tokenizer, reports: bool, convention: Convention
    ) -> None:
        super().__init__(tokenizer, reports)
        self._convention = convention
        self._parsers: dict[int, ToolParser] = {}

    def choice(self, delta: Delta) -> Json:
        pieces = self._pieces(delta)
        cut = self._parsers[delta.index].unfinished
        if delta.finish_reason == "stop" and cut:  # it never became a call
            last = self._parsers[delta.index].calls
            pieces = [piece for piece in pieces if piece.index != last]
            pieces.append(Piece(cut))
        text = "".join(piece.text for piece in pieces)
        calls = self._calls(pieces)
        message: Json = {"role": "assistant", "content": text or None}
        if calls:
            for call in calls:
                del call["index"]
            message["tool_calls"] = calls
        else:
            message["content"] = text
        return self._said("message", message, delta)

    def chunk(self, delta: Delta) -> Json | None:
        pieces = self._pieces(delta)
        text = "".join(piece.text for piece in pieces)
        said: Json = {"content": text} if text else {}
        if calls := self._calls(pieces):
            said["tool_calls"] = calls
        if not said and not delta.logprobs and not delta.finish_reason:
            return None
        return self._said("delta", said, delta)

    def _pieces(self, delta: Delta) -> list[Piece]:
        """Pieces that a delta adds to those before it."""
        parser = self._parsers.setdefault(delta.index, ToolParser(self._convention))
        pieces = parser.push(delta.text)
        return pieces + parser.close() if delta.finish_reason else pieces

    def _calls(self, pieces: list[Piece]) -> list[Json]:
        """One entry for each call that they add to."""
        found: dict[int, Json] = {}
        for piece in pieces:
            if piece.index < 0:
                continue
            entry = found.setdefault(
                piece.index, {"index": piece.index, "function": {"arguments": ""}}
            )
            if piece.name:
                entry |= {"id": self._convention.new_id(), "type": "function"}
                entry["function"] = {"name": piece.name, "arguments": ""}
            entry["function"]["arguments"] += piece.arguments
        return [*found.values()]

    def _said(self, name: str, value: Json, delta: Delta) -> Json:
        found = self._with(name, value, delta)
        parser = self._parsers[delta.index]
        whole = parser.calls and (name == "message" or not parser.unfinished)
        if delta.finish_reason == "stop" and whole:
            found["finish_reason"] = "tool_calls"
        return found
