"""Chat answers whose text is read: thoughts, and calls of tools."""

from __future__ import annotations

import codecs
import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from kvlathe.runtime.requests.request import Delta
from kvlathe.runtime.text.tokenizer import Tokenizer
from kvlathe.server.choices import Chat
from kvlathe.server.fields import Json
from kvlathe.server.named_parser import NamedParser
from kvlathe.server.pieces import Piece, Reader
from kvlathe.server.reasoning import Thoughts
from kvlathe.server.tagged_parser import TaggedParser
from kvlathe.server.tool_parser import ToolParser


class TextReader:
    """Reader of thoughts, where there are any, and of the text behind them
    (``pieces.Reader``)."""

    def __init__(
        self,
        thoughts: Thoughts | None,
        parser: ToolParser | NamedParser | TaggedParser | None,
    ) -> None:
        self._thoughts, self._parser = thoughts, parser

    @property
    def thinks(self) -> bool:
        return self._thoughts is not None and self._thoughts.inside

    @property
    def calls(self) -> int:
        return self._parser.calls if self._parser else 0

    @property
    def unfinished(self) -> str:
        return self._parser.unfinished if self._parser else ""

    def push(self, text: str) -> list[Piece]:
        thought = ""
        if self._thoughts is not None:
            thought, text = self._thoughts.push(text)
        return self._found(thought, text)

    def close(self) -> list[Piece]:
        found: list[Piece] = []
        if self._thoughts is not None:
            found = self._found(*self._thoughts.close())
        return found + self._parser.close() if self._parser else found

    def _found(self, thought: str, text: str) -> list[Piece]:
        found = [Piece(thought=thought)] if thought else []
        if text and self._parser:
            return found + self._parser.push(text)
        return [*found, Piece(text)] if text else found


@dataclass(frozen=True, slots=True)
class Reading:
    """The way in which a model's answers are read. ``reader`` makes a reader of one
    answer; ``new_id``: the id of a call; ``thinks``: whether there may be thoughts."""

    reader: Callable[[], Reader]
    new_id: Callable[[str, int], str]
    thinks: bool


class ThoughtCount:
    """Count of the tokens of one answer's thoughts. It reads token by token: pieces of a
    text may hold several."""

    def __init__(self, reader: Reader, tokenizer: Tokenizer) -> None:
        self._reader, self._tokenizer = reader, tokenizer
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> bool:
        """Whether a token is one of thoughts, or ends them."""
        before = self._reader.thinks
        self._reader.push(self._characters.decode(self._tokenizer.piece(token)))
        return before or self._reader.thinks


class ReadChat(Chat):
    """Chats whose answers are read."""

    def __init__(self, tokenizer: Tokenizer, reports: bool, reading: Reading) -> None:
        super().__init__(tokenizer, reports)
        self._reading = reading
        self.thinks = reading.thinks
        self._readers: dict[int, Reader] = {}
        self._counts: dict[int, ThoughtCount] = {}

    def thought_tokens(self, delta: Delta) -> int:
        """Tokens of a delta that are thoughts."""
        if not self.thinks:
            return 0
        if delta.index not in self._counts:
            own = ThoughtCount(self._reading.reader(), self.tokenizer)
            self._counts[delta.index] = own
        return sum(map(self._counts[delta.index].add, delta.token_ids))

    def choice(self, delta: Delta) -> Json:
        pieces = self._pieces(delta)
        reader = self._readers[delta.index]
        cut = reader.unfinished
        if delta.finish_reason == "stop" and cut:  # it never became a call
            pieces = [piece for piece in pieces if piece.index != reader.calls]
            pieces.append(Piece(cut))
        text = "".join(piece.text for piece in pieces)
        thought = "".join(piece.thought for piece in pieces)
        calls = self._calls(pieces)
        message: Json = {"role": "assistant", "content": text or None}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            for call in calls:
                del call["index"]
            message["tool_calls"] = calls
        else:
            message["content"] = text
        return self._said("message", message, delta)

    def chunks(self, delta: Delta) -> list[Json]:
        pieces = self._pieces(delta)
        *before, last = [self._addition(run) for run in runs(pieces)] or [{}]
        if not last and not delta.logprobs and not delta.finish_reason:
            return []
        # What a delta reports belongs to all that it says: it comes with the last.
        silent = dataclasses.replace(
            delta, logprobs=(), finish_reason=None, stop=None, prompt_logprobs=()
        )
        said = [self._said("delta", one, silent) for one in before]
        return [*said, self._said("delta", last, delta)]

    def cut_call(self, index: int) -> str:
        return self._readers[index].unfinished if index in self._readers else ""

    def _addition(self, run: list[Piece]) -> Json:
        """A run of pieces of one kind, as a chat's delta."""
        if run[0].index >= 0:
            return {"tool_calls": self._calls(run)}
        if run[0].thought:
            return {"reasoning_content": "".join(piece.thought for piece in run)}
        return {"content": "".join(piece.text for piece in run)}

    def _pieces(self, delta: Delta) -> list[Piece]:
        """Pieces that a delta adds to those before it."""
        if delta.index not in self._readers:
            self._readers[delta.index] = self._reading.reader()
        reader = self._readers[delta.index]
        pieces = reader.push(delta.text)
        return pieces + reader.close() if delta.finish_reason else pieces

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
                own = piece.id or self._reading.new_id(piece.name, piece.index)
                entry |= {"id": own, "type": "function"}
                entry["function"] = {"name": piece.name, "arguments": ""}
            entry["function"]["arguments"] += piece.arguments
        return [*found.values()]

    def _said(self, name: str, value: Json, delta: Delta) -> Json:
        found = self._with(name, value, delta)
        reader = self._readers[delta.index]
        whole = reader.calls and (name == "message" or not reader.unfinished)
        if delta.finish_reason == "stop" and whole:
            found["finish_reason"] = "tool_calls"
        return found


def runs(pieces: list[Piece]) -> list[list[Piece]]:
    """Pieces of one kind that follow each other, in order: what an answer says may go
    from a call to text and back within one delta."""
    by_kind = itertools.groupby(
        pieces, key=lambda one: (one.index >= 0, one.thought != "")
    )
    return [[*run] for _, run in by_kind]
