"""Tool calls whose arguments stand between tags, one after the other: GLM 4.5, Qwen 3
Coder, Seed-OSS and MiniMax M2 write them. What a value is, only the tool's schema says:
strings stand as they are, and all else is JSON."""

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
    ``after``. ``bare``: calls may come without ``begin``, which some models forget.
    ``shows``: what a template writes that has this convention, all of it.
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
        calls = Calls(
            begin="",
            head=f"{self.begin}{self.opens}{NAME}{self.closes}",
            tail=f"{self.tail}{self.end}",
            between="\n",
            end="",
            most=MOST_CALLS if several else 1,
            special=tokenizer.specials_in(*texts, self.after, self.tail),
            tags=(self.key, f"{self.keyed}{self.value}", self.after),
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
TAGGED = (GLM, SEED, QWEN_CODER, MINIMAX)


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
    return re.compile(name), re.compile(
        rf"\s*{tag(own.key)}([^<>\n]+?){tag(own.keyed)}{value}(.*?){lines}{ends}",
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
        key = one[1].strip()
        found[key] = value_of(one[2], tools.get(head[1]), key)
        place = one.end()
    if body[place:].strip():
        return None
    return head[1], json.dumps(found, ensure_ascii=False)


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
