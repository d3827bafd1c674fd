"""Structure: the form that an answer must have, as data. guide.py says which tokens it
leaves at each place."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import cast

from kvlathe.base.errors import KvlatheError

NAME = "NAME"
"""Stands for the name of a tool in ``Calls.head``."""
KINDS = ("json_schema", "regex", "grammar", "calls", "thoughts")
MOST_CHARACTERS = {
    "json_schema": 1 << 16,
    "regex": 1 << 12,
    "grammar": 1 << 13,
    "calls": 1 << 16,
    "thoughts": 1 << 17,
}
"""Most characters of each kind's text: compiling a longer one could take seconds."""
MOST_LINES = 400
"""Most lines of a grammar: rules that name each other are followed recursively."""
MOST_PATTERNS = 1 << 12
"""Characters of all regular expressions of a JSON schema."""
MOST_MULTIPLES = 20_000
"""The sum of all multipleOf of a JSON schema, in units of their last digit: each is an
automaton of so many states."""
MOST_COMMON = 100_000
"""Their least common multiple, in units of the finest: where several hold for one
number, one automaton counts all."""
MOST_DIGITS = 300
"""Most digits of a number: JSON numbers are read into types that hold no more."""
ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Calls:
    """The form in which a model writes 1 to ``most`` calls of tools.

    ``begin`` comes first, then each call: its arguments as JSON between ``head``, in
    which NAME stands for its name, and ``tail``. ``between`` stands from one call to the
    next, and ``end`` after the last. ``special``: tokens (name -> id) that these texts
    may have. ``tags``: where arguments are no JSON object, what stands before each's
    name, between that and a string, between that and any other value, and behind it.
    """

    begin: str
    head: str
    tail: str
    between: str
    end: str
    most: int
    special: dict[str, int] = field(default_factory=dict)
    tags: tuple[str, str, str, str] | None = None


@dataclass(frozen=True, slots=True)
class ThoughtForm:
    """The form in which a model thinks before it answers.

    Thoughts stand between ``begin`` and ``end``, and ``after`` stands between them and
    the answer; ``instead``: what stands before an answer without thoughts. ``inside``:
    the prompt ends inside of them; None: the answer may begin them; False: it has none.
    ``budget``: most tokens of thoughts, after which ``end`` is written for the model.
    """

    begin: str
    end: str
    after: str = ""
    instead: str = ""
    inside: bool | None = None
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class Structure:
    """The pattern that an answer must follow. A request names it as
    ``SamplingParams(structure=...)``.

    >>> Structure.choice(["yes", "no"])
    Structure(kind='regex', text='yes|no')
    >>> Structure.json({"type": "integer"})
    Structure(kind='json_schema', text='{"type": "integer"}')

    ``kind``: one of KINDS; ``text``: a JSON schema as JSON, a regular expression that
    the whole answer matches (Rust's syntax), a grammar (Lark's syntax), tools and how
    they are called, as ``Structure.calls`` writes it, or thoughts and what follows them.

    Raises KvlatheError for a text that is none, or so large that it could hold others
    up. What only compiling finds, the engine refuses.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            said = ", ".join(KINDS)
            raise refusal(
                f"structure kind is {self.kind!r:.60}", f"it is one of {said}"
            )
        most = MOST_CHARACTERS[self.kind]
        if not isinstance(self.text, str) or not self.text:
            raise refusal(f"the {self.said} is {self.text!r:.60}", "it must be a text")
        if len(self.text) > most:
            raise refusal(
                f"the {self.said} has {len(self.text):,} characters",
                f"at most {most:,} are taken",
                "make it smaller",
            )
        if self.kind == "json_schema":
            _check_schema(_parsed(self.text))
        if self.kind == "calls":
            _check_schema(_parsed(self.text))
        if self.kind == "grammar":
            _check_grammar(self.text)
        if self.kind == "thoughts":
            self._check_thoughts()

    def _check_thoughts(self) -> None:
        try:
            _ = self.thoughts
        except (ValueError, LookupError, TypeError) as error:
            raise refusal("the form of thoughts cannot be read", str(error)) from error

    @property
    def said(self) -> str:
        """The kind in words."""
        return {
            "json_schema": "JSON schema",
            "regex": "regular expression",
            "calls": "tools",
            "thoughts": "thinking",
        }.get(self.kind, self.kind)

    @classmethod
    def json(cls, schema: object = ANY_OBJECT) -> Structure:
        """JSON that ``schema`` (a dict, a bool, or JSON text) describes; by default any
        object."""
        if isinstance(schema, str):
            return cls("json_schema", schema)
        try:
            return cls("json_schema", json.dumps(schema, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise refusal("the JSON schema cannot be read", str(error)) from error

    @classmethod
    def calls(cls, calls: Calls, tools: Mapping[str, object]) -> Structure:
        """Calls of ``tools`` (name -> JSON schema of its arguments)."""
        said = {"calls": dataclasses.asdict(calls), "tools": dict(tools)}
        return cls("calls", json.dumps(said))

    @classmethod
    def after_thoughts(cls, form: ThoughtForm, then: Structure | None) -> Structure:
        """Thoughts, and behind them ``then``; None: any text."""
        inner = None if then is None else {"kind": then.kind, "text": then.text}
        said = {"form": dataclasses.asdict(form), "then": inner}
        return cls("thoughts", json.dumps(said))

    @property
    def thoughts(self) -> tuple[ThoughtForm, Structure | None]:
        """The form and the structure that ``after_thoughts`` was given."""
        said = json.loads(self.text)
        inner = said["then"]
        return ThoughtForm(**said["form"]), Structure(**inner) if inner else None

    @classmethod
    def regex(cls, pattern: str) -> Structure:
        """A text that matches ``pattern`` as a whole."""
        return cls("regex", pattern)

    @classmethod
    def grammar(cls, text: str) -> Structure:
        """A text of the language whose Lark grammar ``text`` is."""
        return cls("grammar", text)

    @classmethod
    def choice(cls, options: Sequence[str]) -> Structure:
        """One of ``options``."""
        texts = [option for option in options if isinstance(option, str) and option]
        if not texts or len(texts) < len(options):
            raise refusal("the choices are none", "they must be texts, none empty")
        return cls("regex", "|".join(map(literal, texts)))


KINDS_OF: dict[type, str] = {
    str: "string",
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}
"""Python's types of JSON values -> a schema's."""


def kinds_of(schema: object) -> set[str]:
    """The types that a JSON schema may have, where it says so: string, null, ..."""
    if not isinstance(schema, dict):
        return set()
    said = cast("dict[str, object]", schema)
    kind = said.get("type")
    found = {kind} if isinstance(kind, str) else set[str]()
    if isinstance(kind, list):
        found |= {*map(str, cast("list[object]", kind))}
    values = said.get("enum", [said["const"]] if "const" in said else [])
    if not found and isinstance(values, list):
        found |= {KINDS_OF[type(one)] for one in cast("list[object]", values)}
    for key in ("anyOf", "oneOf", "allOf"):
        inner = said.get(key)
        for one in cast("list[object]", inner) if isinstance(inner, list) else ():
            found |= kinds_of(one)
    return found


def literal(text: str) -> str:
    """A regular expression of Rust's syntax that matches ``text`` alone."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)


def refusal(fact: str, reason: str, remedy: str = "correct it") -> KvlatheError:
    return KvlatheError(fact, reason, remedy)


def _parsed(text: str) -> dict[str, object] | bool:
    """The schema. Raises KvlatheError for what is no JSON, or no schema."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refusal("the JSON schema is no JSON", str(error)) from error
    if not isinstance(schema, dict | bool):
        raise refusal("the JSON schema is no schema", "one is an object, true or false")
    return schema


def _check_schema(schema: object) -> None:
    """Raises KvlatheError for what compiles into automata without bound."""
    patterns, multiples = 0, list[Decimal]()
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += value.values()
            patterns += _pattern_size(value)
            multiples += _multiple(value.get("multipleOf"))
        elif isinstance(value, int) and abs(value) >= 10**MOST_DIGITS:
            fact = f"the JSON schema has a number of over {MOST_DIGITS} digits"
            raise refusal(fact, "it is beyond what JSON readers hold")
    if patterns > MOST_PATTERNS:
        fact = f"the JSON schema's patterns have {patterns:,} characters"
        raise refusal(fact, f"at most {MOST_PATTERNS:,} are taken", "make them shorter")
    _check_multiples(multiples)


def _check_multiples(multiples: Sequence[Decimal]) -> None:
    """An automaton counts a multipleOf: it has as many states as that has units of the
    last digit. Those of schemas that must hold together are counted at once, up to
    their least common multiple."""
    places = [max(0, -int(each.as_tuple().exponent)) for each in multiples]
    own = [int(each.scaleb(n)) for each, n in zip(multiples, places, strict=True)]
    finest = max(places, default=0)
    together = [int(each.scaleb(finest)) for each in multiples]
    if sum(own) > MOST_MULTIPLES or math.lcm(*together) > MOST_COMMON:
        reason = (
            f"they add up to more than {MOST_MULTIPLES:,} units of their last digit, "
            f"or have a common multiple above {MOST_COMMON:,}"
        )
        raise refusal(
            "the JSON schema's multipleOf are too large",
            reason,
            "leave multipleOf out, or round it",
        )


def _pattern_size(schema: dict[str, object]) -> int:
    """Characters of the regular expressions of one schema."""
    own = schema.get("pattern")
    size = len(own) if isinstance(own, str) else 0
    named = schema.get("patternProperties")
    if isinstance(named, dict):
        size += sum(map(len, named))
    return size


def _multiple(value: object) -> list[Decimal]:
    """The number that ``multipleOf`` gives, rounded as it is counted; nothing where it
    is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value:
        return []
    return [Decimal(f"{min(abs(value), 1e9):.12f}").normalize()]


def _check_grammar(text: str) -> None:
    lines = text.count("\n") + 1
    if lines > MOST_LINES:
        raise refusal(
            f"the grammar has {lines:,} lines",
            f"at most {MOST_LINES} are taken",
            "make it smaller",
        )
    if "%json" in text:
        raise refusal(
            "the grammar has %json",
            "schemas are checked apart",
            "give the schema alone, as json_schema",
        )
