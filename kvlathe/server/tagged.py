"""Tool calls whose arguments stand between tags, one after the other: GLM 4.5 and Qwen 3
Coder write them. What a value is, only the tool's schema says: strings stand as they
are, and all else is JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from kvlathe.runtime.text.structure import NAME, Calls, Structure, kinds_of
from kvlathe.runtime.text.tokenizer import Tokenizer
from kvlathe.server.conventions import MOST_CALLS
from kvlathe.server.fields import Json
from kvlathe.server.pieces import Piece, beginning_of
from kvlathe.server.tools import new_call_id

Schemas = Mapping[str, Json | bool]
"""Tool -> JSON schema of its arguments."""
STRING = "string"
BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class TaggedConvention:
    """A call is BEGIN, the name between ``opens`` and ``closes``, the arguments,
    ``tail`` and END. An argument is KEY between ``key`` and ``keyed``, and its value
    between ``value`` and ``after``. ``shows``: what a template writes that has this
    convention.
    """

    shows: str
    opens: str
    closes: str
    key: str
    keyed: str
    value: str
    after: str
    tail: str

    def new_id(self, name: str, number: int) -> str:
        return new_call_id()

    def structure(
        self, tools: Schemas, several: bool, tokenizer: Tokenizer
    ) -> Structure:
        """As ``Calling.structure``: the arguments that a schema names, in its order."""
        texts = (BEGIN, END, self.opens, self.key, self.value, self.after, self.tail)
        calls = Calls(
            begin="",
            head=f"{BEGIN}{self.opens}{NAME}{self.closes}",
            tail=f"{self.tail}{END}",
            between="\n",
            end="",
            most=MOST_CALLS if several else 1,
            special=tokenizer.specials_in(*texts),
            tags=(self.key, f"{self.keyed}{self.value}", self.after),
        )
        return Structure.calls(calls, tools)


GLM = TaggedConvention(
    shows="<arg_key>",
    opens="",
    closes="\n",
    key="<arg_key>",
    keyed="</arg_key>\n",
    value="<arg_value>",
    after="</arg_value>\n",
    tail="",
)
QWEN_CODER = TaggedConvention(
    shows="<parameter=",
    opens="\n<function=",
    closes=">\n",
    key="<parameter=",
    keyed=">",
    value="\n",
    after="\n</parameter>\n",
    tail="</function>\n",
)
TAGGED = (GLM, QWEN_CODER)


@lru_cache(8)
def patterns(convention: TaggedConvention) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """The beginning of a call, and one argument. Blanks between tags say nothing, but
    that a value may stand on lines of its own."""

    def tag(text: str) -> str:
        return re.escape(text.strip())

    own = convention
    name = rf"\s*{tag(own.opens)}\s*([\w.-]{{1,64}})\s*{tag(own.closes)}"
    lines = r"\n?" if not own.value.strip() else rf"\s*{tag(own.value)}"
    ends = r"\n?" if not own.value.strip() else ""
    argument = rf"\s*{tag(own.key)}([^<>\n]+){tag(own.keyed)}{lines}(.*?){ends}{tag(own.after)}"
    return re.compile(name), re.compile(argument, re.DOTALL)


def call_of(
    convention: TaggedConvention, body: str, tools: Schemas
) -> tuple[str, str] | None:
    """Name and arguments of what stands between BEGIN and END; None where it is no
    call."""
    begins, argument = patterns(convention)
    head = begins.match(body)
    if not head:
        return None
    found: Json = {}
    place = head.end()
    schema = tools.get(head[1])
    while one := argument.match(body, place):
        found[one[1]] = value_of(one[2], schema, one[1])
        place = one.end()
    if body[place:].strip() != convention.tail.strip():
        return None
    return head[1], json.dumps(found, ensure_ascii=False)


def value_of(text: str, schema: Json | bool | None, key: str) -> object:
    """The value of an argument, by its schema. A text that is no JSON is a string."""
    named = schema.get("properties") if isinstance(schema, dict) else None
    kinds = kinds_of(cast("Json", named).get(key)) if isinstance(named, dict) else set()
    if STRING in kinds and not ("null" in kinds and text == "null"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


class TaggedParser:
    """Parser of one answer (``pieces.Reader``, without thoughts). A call comes when it
    is whole; what looks like one and is none comes out as text at the end."""

    def __init__(self, convention: TaggedConvention, tools: Schemas) -> None:
        self._convention, self._tools = convention, tools
        self._held = ""
        self._tried = 0  # characters in which no whole call was found
        self._spoke = False
        self.calls = 0

    @property
    def unfinished(self) -> str:
        return ""

    def push(self, text: str) -> list[Piece]:
        self._held += text
        found: list[Piece] = []
        while self._step(found):
            pass
        return found

    def close(self) -> list[Piece]:
        """End of the text."""
        found = self.push("")
        while self._held.startswith(BEGIN):  # no call, but there may be one behind it
            found.append(Piece(BEGIN))
            self._held, self._tried, self._spoke = self._held[len(BEGIN) :], 0, False
            found += self.push("")
        rest, self._held = self._held, ""
        return [*found, Piece(rest)] if rest else found

    def _step(self, found: list[Piece]) -> bool:
        if not self._held.startswith(BEGIN):
            return self._text(found)
        start = max(len(BEGIN), self._tried - len(END))
        place = self._held.find(END, start)
        while place >= 0:
            body = self._held[len(BEGIN) : place]
            if call := call_of(self._convention, body, self._tools):
                found.append(Piece(index=self.calls, name=call[0]))
                found.append(Piece(index=self.calls, arguments=call[1]))
                self.calls += 1
                self._held, self._tried = self._held[place + len(END) :], 0
                self._spoke = True
                return True
            place = self._held.find(END, place + 1)
        self._tried = len(self._held)
        return False

    def _text(self, found: list[Piece]) -> bool:
        """Text up to the next mark. True where there is one."""
        before, begun, rest = self._held.partition(BEGIN)
        keep = 0 if begun else beginning_of(BEGIN, self._held)
        before, kept = before[: len(before) - keep], before[len(before) - keep :]
        if self._spoke:  # blanks behind a call
            before = before.lstrip()
        if before:
            found.append(Piece(before))
            self._spoke = False
        self._held, self._tried = (begun + rest if begun else kept), 0
        return bool(begun)
