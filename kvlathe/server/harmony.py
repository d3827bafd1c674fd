"""Harmony: the form in which gpt-oss answers. An answer is messages on channels, each
with a header:

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

Thoughts are on the channel analysis, calls are messages to functions, and the rest is
text. Source: OpenAI's harmony response format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvlathe.runtime.text.structure import NAME, Calls, Structure, ThoughtForm
from kvlathe.runtime.text.tokenizer import Tokenizer
from kvlathe.server.fields import Json
from kvlathe.server.pieces import Piece, StepReader, beginning_of, first_of
from kvlathe.server.tools import new_call_id, parse_arguments

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = (CHANNEL, MESSAGE, START, *ENDS)
SHOWS = (CHANNEL, MESSAGE)
RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)")
MOST_HEADER = 1024
"""Characters of a header: a longer one is none, and is text."""


ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{START}assistant{CHANNEL}final{MESSAGE}"
CALL = f"{START}assistant{CHANNEL}commentary to=functions."


def shown_by(template: str) -> bool:
    """Whether a template has this form."""
    return all(mark in template for mark in SHOWS)


def name_thoughts(turn: Json) -> None:
    """Give the thoughts of an earlier answer the name that templates of this form have
    for them: before a call, and where nothing else is said there."""
    thought = turn.pop("reasoning_content", None)
    if thought and turn.get("tool_calls") and not turn.get("content"):
        turn["thinking"] = thought


def form_before(after: str, budget: int | None) -> ThoughtForm:
    """The form of thoughts before a message that begins with ``after``; empty: before
    any. An answer without thoughts begins with that message, too."""
    instead = after.removeprefix(f"{START}assistant")
    return ThoughtForm(ANALYSIS, "<|end|>", after, instead, None, budget)


@dataclass(frozen=True, slots=True)
class HarmonyCalls:
    """Calls in Harmony's form (``conventions.Calling``): one in an answer, as the model
    waits for what it gives."""

    def new_id(self, name: str, number: int) -> str:
        return new_call_id()

    def structure(
        self, tools: Mapping[str, Json | bool], several: bool, tokenizer: Tokenizer
    ) -> Structure:
        """The structure of a call behind CALL."""
        head = f"{NAME} <|constrain|>json{MESSAGE}"
        specials = tokenizer.specials_in(head)
        return Structure.calls(Calls("", head, "", "", "", 1, specials), tools)


class HarmonyReader(StepReader):
    """Reader of one answer in Harmony's form (``pieces.Reader``)."""

    def __init__(self) -> None:
        super().__init__()
        self._header: str | None = ""  # None: inside of a message
        self._kind = ""
        self._call = False
        self._raw = ""  # of the call that is being read
        self._arguments = ""
        self._begun = False

    @property
    def thinks(self) -> bool:
        return self._header is None and self._kind == "analysis" and not self._call

    @property
    def unfinished(self) -> str:
        """The text of a call whose arguments have not ended."""
        return self._raw if self._call else ""

    def close(self) -> list[Piece]:
        """End of the text. What ends a message may be a token that ends the text, and is
        not seen."""
        found = self.push("")
        rest, self._held = self._held, ""
        if self._header is None:
            self._say(rest, found)
            if not (self._call and parse_arguments(self._arguments) is self._arguments):
                self._end()
        elif not self._begun and (said := self._header + rest):
            found.append(Piece(said))  # it has no form
        return found

    def _step(self, found: list[Piece]) -> bool:
        place, mark = first_of(MARKS, self._held)
        if not mark:
            keep = beginning_of(MARKS, self._held)
            said = self._held[: len(self._held) - keep]
            self._held = self._held[len(said) :]
            self._take(said, found)
            return False
        self._take(self._held[:place], found)
        self._held = self._held[place + len(mark) :]
        if self._header is None:
            if mark in ENDS or mark == START:
                self._end()
            elif mark == CHANNEL:  # a header without an end before it
                self._end()
                self._header = CHANNEL
            return True
        if mark == MESSAGE:
            self._open(found)
        elif mark == START:
            self._header = ""
        else:
            self._header += mark
        return True

    def _take(self, text: str, found: list[Piece]) -> None:
        """Text of a header or of a message."""
        if self._header is None:
            self._say(text, found)
            return
        self._header += text
        if len(self._header) > MOST_HEADER:
            found.append(Piece(self._header))
            self._header, self._kind, self._begun = None, "", True

    def _open(self, found: list[Piece]) -> None:
        """A header has ended: a message begins."""
        header, self._header = self._header or "", None
        self._begun = True
        channel = header.rpartition(CHANNEL)[2].split("<|")[0].split()
        self._kind = channel[0] if channel else ""
        recipient = RECIPIENT.search(header)
        self._call = recipient is not None
        if recipient is not None:
            found.append(Piece(index=self.calls, name=recipient[1]))
            self._raw = f"{header}{MESSAGE}"

    def _say(self, text: str, found: list[Piece]) -> None:
        if not text:
            return
        if self._call:
            self._raw += text
            self._arguments += text
            found.append(Piece(index=self.calls, arguments=text))
        elif self._kind == "analysis":
            found.append(Piece(thought=text))
        else:
            found.append(Piece(text))

    def _end(self) -> None:
        """A message has ended."""
        self.calls += self._call
        self._call, self._raw, self._arguments = False, "", ""
        self._header, self._kind = "", ""
