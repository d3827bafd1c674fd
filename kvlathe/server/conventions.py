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


def short_id() -> str:
    alphabet = string.ascii_letters + string.digits
    return "".join(secrets.choice(alphabet) for _ in range(SHORT))


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
    ``bare``: ``begin`` may be missing where the answer begins with a call. ``also``:
    other marks that some models of this convention begin calls with. ``silent``: marks
    that say nothing, behind which a bare call may begin. ``shows``: what a template
    writes that has this convention.
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
    also: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    most: int = MOST_CALLS

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that begin calls."""
        own = () if self.silent else ((self.begin or self.before).strip(),)
        return (*own, *self.also)

    @property
    def closing(self) -> str:
        """The mark behind a call, or behind the list of all, without JSON's own."""
        return self.after.strip() or self.end.strip().removeprefix("]")

    def new_id(self, name: str, number: int) -> str:
        return short_id() if self.shows == MISTRAL.shows else new_call_id()

    def structure(
        self, tools: Mapping[str, Json | bool], several: bool, tokenizer: Tokenizer
    ) -> Structure:
        """The structure of an answer that must call one of ``tools`` (name -> JSON
        schema); ``several``: any number of times. Raises KvlatheError."""
        calls = Calls(
            begin=("" if self.bare and not self.silent else self.begin) + self.opens,
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
    shows='"parameters": ', begin="<|python_tag|>", key="parameters", bare=True, most=1
)
GRANITE = Convention(
    shows="<|tool_call|>",
    begin="<|tool_call|>",
    opens="[",
    between=", ",
    end="]",
    also=("<tool_call>",),  # Granite 3.1, whatever its template says
)
PHI = Convention(
    shows="functools[", begin="functools", opens="[", between=", ", end="]"
)
LLAMA_4 = Convention(
    shows="<|python_start|>",
    begin="<|python_start|><|python_end|>",
    key="parameters",
    bare=True,
    silent=("<|python_start|>", "<|python_end|>"),
)
"""Text stands between these marks, and calls behind them."""
HUNYUAN = Convention(
    shows="<tool_calls>[",
    begin="<tool_calls>",
    opens="[",
    between=", ",
    end="]</tool_calls>",
)
NEMOTRON = Convention(
    shows="<TOOLCALL>[", begin="<TOOLCALL>", opens="[", between=", ", end="]</TOOLCALL>"
)
CONVENTIONS = (HUNYUAN, NEMOTRON, HERMES, MISTRAL, GRANITE, PHI, LLAMA_4, LLAMA)


@dataclass(frozen=True, slots=True)
class NamedConvention:
    """A call whose name stands before its arguments, which are JSON.

    ``begin`` and ``end`` stand around all calls, ``opens`` and ``after`` around each,
    ``between`` from one to the next, ``prefix`` before the name and ``separator``
    between that and the arguments. ``counted``: a name ends with a colon and the call's
    number, and is the call's id. ``id_mark`` may stand between a name and the call's id;
    ``short``: ids have SHORT letters and digits. ``begin`` may be empty. ``shows``: what
    a template writes that has this convention, all of it.
    """

    shows: tuple[str, ...]
    begin: str
    opens: str
    separator: str
    after: str
    end: str
    between: str = ""
    prefix: str = ""
    counted: bool = False
    id_mark: str = ""
    short: bool = False

    def new_id(self, name: str, number: int) -> str:
        if self.short:
            return short_id()
        return f"{self.prefix}{name}:{number}" if self.counted else new_call_id()

    def name_of(self, said: str) -> tuple[str, str]:
        """The name in what stands for it, and the call's id; empty where the model gave
        it none."""
        name, _, own = said.partition(self.id_mark) if self.id_mark else (said, "", "")
        name = name.strip()
        plain = name.removeprefix(self.prefix)
        own = own.strip() if own.strip().isalnum() else ""
        return (COUNT.sub("", plain), name) if self.counted else (plain, own)

    def structure(
        self, tools: Mapping[str, Json | bool], several: bool, tokenizer: Tokenizer
    ) -> Structure:
        """As ``Calling.structure``; one call where they are counted."""
        number = ":0" if self.counted else ""
        texts = (self.begin, self.opens, self.separator, self.after, self.end)
        calls = Calls(
            begin=self.begin,
            head=f"{self.opens}{self.prefix}{NAME}{number}{self.separator}",
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
    opens="<|tool_call_begin|>",
    prefix="functions.",
    separator="<|tool_call_argument_begin|>",
    after="<|tool_call_end|>",
    end="<|tool_calls_section_end|>",
    counted=True,
)
MISTRAL_NAMED = NamedConvention(
    shows=("[TOOL_CALLS]", "[ARGS]"),
    begin="",
    opens="[TOOL_CALLS]",
    separator="[ARGS]",
    after="",
    end="",
    id_mark="[CALL_ID]",
    short=True,
)
"""Newer models of Mistral."""
NAMED = (DEEPSEEK_R1, DEEPSEEK, KIMI, MISTRAL_NAMED)
OTHERS = (
    *("<function=", "<function_call>", "<atem:", "]<]"),
    *("<|START_ACTION|>", '"tool_name"'),
)
"""Marks of templates whose calls are written in another way."""


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
