"""Conventions of tool calls: one record for each way in which the chat templates that
transformers ships write them. A template shows its own by its text."""

from __future__ import annotations

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

    def new_id(self) -> str:
        """The id of a call."""
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

    def new_id(self) -> str:
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
            begin=("" if self.bare else self.begin) + self.opens,
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
CONVENTIONS = (HERMES, MISTRAL, LLAMA)
OTHERS = ("<function=", "[ARGS]")
"""Marks of templates whose calls are no JSON objects."""


def convention_of(template: str) -> Convention | None:
    """The convention of a template's model; None where it takes no tools, or calls them
    in a way that is not known."""
    if "tools" not in template or any(other in template for other in OTHERS):
        return None
    escaped = template.replace('\\"', '"')
    found = [one for one in CONVENTIONS if one.shows in escaped]
    return found[0] if found else None
