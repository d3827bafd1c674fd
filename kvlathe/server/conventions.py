"""Conventions of tool calls: one record for each way in which the chat templates that
transformers ships write them. A template shows its own by its text."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvlathe.runtime.text.structure import NAME, Calls, Structure
from kvlathe.runtime.text.tokenizer import Tokenizer
from kvlathe.server.fields import Json
from kvlathe.server.tools import new_call_id

MOST_CALLS = 16
"""Most calls in one answer that must call: a small model would go on for ever."""
SHORT = 9
"""Characters of a call's id that Mistral's templates take."""


class Calling(Protocol):
    """A way in which a model writes calls."""

    def new_id(self, name: str, number: int) -> str:
        """The id of a call: of which function, and which of its answer."""
        ...

    def structure(
        self, tools: Mapping[str, Json | bool], several: bool, tokenizer: Tokenizer
    ) -> Structure:
        """The structure of an answer that must call one of ``tools`` (name -> JSON
        schema); ``several``: any number of times. Raises KvlatheError."""
        ...


@dataclass(frozen=True, slots=True)
class Convention:
    """A call is ``{"name": ..., KEY: {...}}``.

    ``begin`` and ``opens`` stand before calls and ``end`` after them; in between
    ``before`` and ``after`` stand around each, and ``between`` from one to the next.
    ``bare``: ``begin`` may be missing where the answer begins with a call. ``shows``:
    what a template writes that has this convention.
    """

    shows: str
    begin: str
    opens: str = ""
    key: str = "arguments"
    before: str = ""
    after: str = ""
    between: str = ""
    end: str = ""
    bare: bool = False
    most: int = MOST_CALLS

    def new_id(self, name: str, number: int) -> str:
        if self.shows == MISTRAL.shows:
            alphabet = string.ascii_letters + string.digits
            return "".join(secrets.choice(alphabet) for _ in range(SHORT))
        return new_call_id()

    def structure(
        self, tools: Mapping[str, Json | bool], several: bool, tokenizer: Tokenizer
    ) -> Structure:
        """The structure of an answer that must call one of ``tools`` (name -> JSON
        schema); ``several``: any number of times. Raises KvlatheError."""
        calls = Calls(
            begin=("" if self.bare and not self.after else self.begin) + self.opens,
            head=f'{self.before}{{"name": "{NAME}", "{self.key}": ',
            tail=f"}}{self.after}",
            between=self.between,
            end=self.end,
            most=self.most if several else 1,
            special=tokenizer.specials_in(
                self.begin, self.before, self.after, self.end
            ),
        )
        return Structure.calls(calls, tools)


HERMES = Convention(
    shows="<tool_call>",
    begin="",
    before="<tool_call>\n",
    after="\n</tool_call>",
    between="\n",
)
MISTRAL = Convention(
    shows="[TOOL_CALLS]", begin="[TOOL_CALLS]", opens="[", between=", ", end="]"
)
LLAMA = Convention(
    shows='"parameters"', begin="<|python_tag|>", key="parameters", bare=True, most=1
)
GRANITE = Convention(
    shows="<|tool_call|>", begin="<|tool_call|>", opens="[", between=", ", end="]"
)
PHI = Convention(
    shows="functools[", begin="functools", opens="[", between=", ", end="]"
)
LLAMA_4 = Convention(
    shows="<|python_start|>",
    begin="<|python_start|>",
    key="parameters",
    after="<|python_end|>",
    bare=True,
    most=1,
)
CONVENTIONS = (HERMES, MISTRAL, GRANITE, PHI, LLAMA_4, LLAMA)


@dataclass(frozen=True, slots=True)
class NamedConvention:
    """A call whose name stands before its arguments, which are JSON.

    ``begin`` and ``end`` stand around all calls, ``opens`` and ``after`` around each,
    ``between`` from one to the next, and ``separator`` between the name and the
    arguments. ``counted``: a name ends with a colon and the call's number, and so do
    ids. ``shows``: what a template writes that has this convention, all of it.
    """

    shows: tuple[str, ...]
    begin: str
    opens: str
    separator: str
    after: str
    end: str
    between: str = ""
    counted: bool = False

    def new_id(self, name: str, number: int) -> str:
        return f"functions.{name}:{number}" if self.counted else new_call_id()

    def plain(self, name: str) -> str:
        """A name without its number."""
        return COUNT.sub("", name) if self.counted else name

    def structure(
        self, tools: Mapping[str, Json | bool], several: bool, tokenizer: Tokenizer
    ) -> Structure:
        """As ``Calling.structure``; one call where they are counted."""
        number = ":0" if self.counted else ""
        texts = (self.begin, self.opens, self.separator, self.after, self.end)
        calls = Calls(
            begin=self.begin,
            head=f"{self.opens}{NAME}{number}{self.separator}",
            tail=self.after,
            between=self.between,
            end=self.end,
            most=MOST_CALLS if several and not self.counted else 1,
            special=tokenizer.specials_in(*texts),
        )
        return Structure.calls(calls, tools)


COUNT = re.compile(r":\d{1,9}\Z")


def deepseek(name: str) -> str:
    """One of DeepSeek's tokens: they have a bar and blanks of their own."""
    return "<\N{FULLWIDTH VERTICAL LINE}NAME\N{FULLWIDTH VERTICAL LINE}>".replace(
        "NAME", name.replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")
    )


_CALLS, _CALLS_END = deepseek("tool calls begin"), deepseek("tool calls end")
_CALL, _CALL_END = deepseek("tool call begin"), deepseek("tool call end")
_SEPARATOR = deepseek("tool sep")
DEEPSEEK_R1 = NamedConvention(
    shows=(_CALLS, _CALL, _SEPARATOR, "```json"),
    begin=_CALLS,
    opens=f"{_CALL}function{_SEPARATOR}",
    separator="\n```json\n",
    after=f"\n```{_CALL_END}",
    between="\n",
    end=_CALLS_END,
)
"""DeepSeek V3 and R1; V3.1 is the plain one."""
DEEPSEEK = NamedConvention(
    shows=(_CALLS, _CALL, _SEPARATOR),
    begin=_CALLS,
    opens=_CALL,
    separator=_SEPARATOR,
    after=_CALL_END,
    end=_CALLS_END,
)
KIMI = NamedConvention(
    shows=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    begin="<|tool_calls_section_begin|>",
    opens="<|tool_call_begin|>functions.",
    separator="<|tool_call_argument_begin|>",
    after="<|tool_call_end|>",
    end="<|tool_calls_section_end|>",
    counted=True,
)
NAMED = (DEEPSEEK_R1, DEEPSEEK, KIMI)
OTHERS = ("<function=", "[ARGS]")
"""Marks of templates whose calls are no JSON objects."""


def convention_of(template: str) -> Convention | NamedConvention | None:
    """The convention of a template's model; None where it takes no tools, or calls them
    in a way that is not known."""
    if "tools" not in template or any(other in template for other in OTHERS):
        return None
    for one in NAMED:
        if all(mark in template for mark in one.shows):
            return one
    escaped = template.replace('\\"', '"')
    found = [one for one in CONVENTIONS if one.shows in escaped]
    return found[0] if found else None
