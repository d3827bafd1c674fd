"""Tool calls whose arguments stand between tags, one after the other: GLM 4.5, Qwen 3
Coder, Seed-OSS, MiniMax M2 and DeepSeek V3.2 write them. Strings stand as they are, and
all else is JSON. Only the tool's schema says which of them a value is, but for DeepSeek,
whose tags do."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn, cast

from kvlathe.runtime.text.structure import NAME, Calls, Structure, kinds_of
from kvlathe.runtime.text.tokenizer import Tokenizer
from kvlathe.server.conventions import MOST_CALLS
from kvlathe.server.fields import Json
from kvlathe.server.tools import new_call_id

Schemas = Mapping[str, Json | bool]
"""Tool -> JSON schema of its arguments."""
STRING = "string"
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
"""Python's names, too: Qwen 3 Coder's template writes those."""


@dataclass(frozen=True, slots=True)
class TaggedConvention:
    """``begin`` and ``end`` stand around calls. A call is its name between ``opens`` and
    ``closes``, its arguments, and ``tail``; where that is empty, ``end`` ends it. An
    argument is KEY between ``key`` and ``keyed``, and its value between ``value`` and
    ``after``. ``other`` stands in the place of ``keyed`` before a value that is no
    string; empty: nothing tells these. ``bare``: calls may come without ``begin``, which
    some models forget. ``shows``: what a template writes that has this convention, all
    of it.
    """

    shows: tuple[str, ...]
    begin: str
    end: str
    opens: str
    closes: str
    key: str
    keyed: str
    value: str
    after: str
    tail: str
    other: str = ""
    bare: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that begin calls."""
        return (self.begin, self.opens.strip()) if self.bare else (self.begin,)

    @property
    def closer(self) -> str:
        """The mark that ends a call."""
        return self.tail.strip() or self.end

    def new_id(self, name: str, number: int) -> str:
        return new_call_id()

    def structure(
        self, tools: Schemas, several: bool, tokenizer: Tokenizer
    ) -> Structure:
        """As ``Calling.structure``: the arguments that a schema names, in its order."""
        texts = (self.begin, self.end, self.opens, self.key, self.keyed, self.value)
        other = self.other or self.keyed
        calls = Calls(
            begin="",
            head=f"{self.begin}{self.opens}{NAME}{self.closes}",
            tail=f"{self.tail}{self.end}",
            between="\n",
            end="",
            most=MOST_CALLS if several else 1,
            special=tokenizer.specials_in(*texts, self.after, self.tail),
            tags=(
                self.key,
                f"{self.keyed}{self.value}",
                f"{other}{self.value}",
                self.after,
            ),
        )
        return Structure.calls(calls, tools)


GLM = TaggedConvention(
    shows=("<arg_key>", "<tool_call>"),
    begin="<tool_call>",
    end="</tool_call>",
    opens="",
    closes="\n",
    key="<arg_key>",
    keyed="</arg_key>\n",
    value="<arg_value>",
    after="</arg_value>\n",
    tail="",
)
QWEN_CODER = TaggedConvention(
    shows=("<parameter=", "<tool_call>"),
    begin="<tool_call>",
    end="</tool_call>",
    opens="\n<function=",
    closes=">\n",
    key="<parameter=",
    keyed=">",
    value="\n",
    after="\n</parameter>\n",
    tail="</function>\n",
    bare=True,
)
SEED = TaggedConvention(
    shows=("<parameter=", "<seed:tool_call>"),
    begin="<seed:tool_call>",
    end="</seed:tool_call>",
    opens="\n<function=",
    closes=">\n",
    key="<parameter=",
    keyed=">",
    value="",
    after="</parameter>\n",
    tail="</function>\n",
    bare=True,
)
MINIMAX = TaggedConvention(
    shows=("<minimax:tool_call>", "<invoke name="),
    begin="<minimax:tool_call>",
    end="</minimax:tool_call>",
    opens='\n<invoke name="',
    closes='">\n',
    key='<parameter name="',
    keyed='">',
    value="",
    after="</parameter>\n",
    tail="</invoke>\n",
)
DSML = "\N{FULLWIDTH VERTICAL LINE}DSML\N{FULLWIDTH VERTICAL LINE}"


def dsml(section: str) -> TaggedConvention:
    """The convention of DeepSeek, from V3.2: versions differ by the section's name."""
    return TaggedConvention(
        shows=(DSML, f"{section}>"),
        begin=f"<{DSML}{section}>",
        end=f"</{DSML}{section}>",
        opens=f'\n<{DSML}invoke name="',
        closes='">\n',
        key=f'<{DSML}parameter name="',
        keyed='" string="true">',
        other='" string="false">',
        value="",
        after=f"</{DSML}parameter>\n",
        tail=f"</{DSML}invoke>\n",
    )


DEEPSEEK_V3_2, DEEPSEEK_V4 = dsml("function_calls"), dsml("tool_calls")
TAGGED = (GLM, SEED, QWEN_CODER, MINIMAX, DEEPSEEK_V3_2, DEEPSEEK_V4)


@lru_cache(8)
def patterns(convention: TaggedConvention) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """The beginning of a call, and one argument. Blanks between tags say nothing, but
    that a value may stand on lines of its own. A value ends with its tag, or, where the
    model forgot that, before the next argument's."""

    def tag(text: str) -> str:
        return re.escape(text.strip())

    own = convention
    name = rf"\s*{tag(own.opens)}\s*([\w.-]{{1,64}})\s*{tag(own.closes)}"
    lines = r"\n?" if own.value == "\n" else ""
    value = rf"\s*{tag(own.value)}" if tag(own.value) else lines
    ends = (
        tag(own.after)
        if tag(own.value)
        else rf"(?:{tag(own.after)}|(?={tag(own.key)}))"
    )
    keyed = tag(own.keyed) + (f"|{tag(own.other)}" if own.other else "")
    return re.compile(name), re.compile(
        rf"\s*{tag(own.key)}([^<>\n]+?)({keyed}){value}(.*?){lines}{ends}",
        re.DOTALL,
    )


def call_of(
    convention: TaggedConvention, body: str, tools: Schemas
) -> tuple[str, str] | None:
    """Name and arguments of a call whose end has been taken off; None where it is no
    call."""
    begins, argument = patterns(convention)
    head = begins.match(body)
    if not head:
        return None
    found: Json = {}
    place = head.end()
    while one := argument.match(body, place):
        key, place = one[1].strip(), one.end()
        if convention.other:
            found[key] = parsed(one[3]) if one[2] == convention.other else one[3]
        else:
            found[key] = value_of(one[3], tools.get(head[1]), key)
    if body[place:].strip():
        return None
    try:
        return head[1], json.dumps(found, ensure_ascii=False)
    except RecursionError:  # a level more than its reader took
        return None


def value_of(text: str, schema: Json | bool | None, key: str) -> object:
    """The value of an argument, by its schema: the first of vLLM's order (null, numbers,
    booleans, objects, lists, strings) that the schema allows and the text is. Where the
    schema says nothing, a text that is no JSON is a string."""
    named = schema.get("properties") if isinstance(schema, dict) else None
    kinds = kinds_of(cast("Json", named).get(key)) if isinstance(named, dict) else set()
    value, said = parsed(text), text.strip().lower()
    if "null" in kinds and (said == "null" or (said == "none" and STRING not in kinds)):
        return None
    if any(kind in kinds for kind in KINDS.get(type(value), ())):
        return value
    if "boolean" in kinds and said in BOOLEANS:
        return BOOLEANS[said]
    return text if STRING in kinds else value


KINDS: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    dict: ("object",),
    list: ("array",),
}
"""Python's types of JSON values that may be told from a string -> types of a schema."""


def parsed(text: str) -> object:
    """The JSON value of a text; the text itself where it is none, or a number that JSON
    cannot hold."""

    def no_number(said: str) -> NoReturn:
        raise ValueError(f"{said} is no JSON")

    def finite(said: str) -> float:
        number = float(said)
        return number if math.isfinite(number) else no_number(said)

    try:
        return json.loads(text, parse_constant=no_number, parse_float=finite)
    except (ValueError, RecursionError):
        return text
