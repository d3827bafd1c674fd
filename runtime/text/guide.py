"""Guides: which tokens an answer's structure leaves at each place, by llguidance.

llguidance is a parser in Rust that walks the vocabulary as a trie. It compiles most
schemas in milliseconds and makes a mask in some ten microseconds, and it needs no other
package. What of its work it does not bound, structure.py and trials.py do.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, TypedDict, cast
from weakref import WeakValueDictionary

import numpy as np

from kvlathe.base.errors import KvlatheError
from kvlathe.base.extras import pip_install
from kvlathe.base.panics import PANIC, refuse_fault
from kvlathe.runtime.text.compile_queue import CompileQueue, stopped
from kvlathe.runtime.text.masks import Guide, Masks, StructureError, no_bits
from kvlathe.runtime.text.schema_numbers import BOUNDS, bound, check_exact, spelled
from kvlathe.runtime.text.structure import NAME, Calls, Structure, kinds_of
from kvlathe.runtime.text.thoughts import LeastTokens, ThoughtGuide, ThoughtTokens
from kvlathe.runtime.text.tokenizer import Tokenizer
from kvlathe.runtime.text.trials import QUICK, SLOW, STACK, TOO_LARGE, TOO_SLOW, Trials
from kvlathe.runtime.text.walked import walked_tokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

log = logging.getLogger("kvlathe")
SPACE = r" |\n(  ){0,8}"
"""White space between two parts of JSON, at most once: a small model could go on with
blanks for ever. Eight levels of two blanks, or four of four."""
SETTINGS: JsonCompileOptions = {"whitespace_pattern": SPACE, "coerce_one_of": True}
"""Settings of the schema compiler. It reads oneOf as anyOf: an answer then fits at
least one of them."""
FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4"),
        *("ipv6", "uuid", "uri"),
    }
)
"""Formats of strings that llguidance holds an answer to."""
VALUES = ("const", "enum", "default", "examples")
"""Keys of a schema that hold values, which are not looked into."""
MAPS = (
    *("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"),
    *("dependencies",),
)
"""Keys of a schema that hold schemas by name."""
TAGGED_KEYS = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", "$defs"),
        *("title", "description", "$schema"),
    }
)
"""Keys of a tool's schema that arguments between tags can be held to."""
EMPTY = "no text fits it"
COMPILED = 16
"""Structures that are kept compiled: each holds the lexer states that answers found."""
ITEMS = 5000
"""Parser items of a step: more would hold up the other answers of its batch."""
STATES = 10_000
"""Lexer states of a structure: about a kilobyte each."""
REFUSED = 64
"""Structures of which it is kept that they cannot be compiled."""


class Limits(TypedDict):
    """Bounds of the work that a structure may be, as llguidance takes them."""

    step_max_items: int
    max_lexer_states: int
    precompute_large_lexemes: bool
    verbose_errors: bool


LIMITS: Limits = {
    "step_max_items": ITEMS,
    "max_lexer_states": STATES,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}


class StructureGuide:
    """The place of one answer in its structure, by llguidance (``masks.Guide``)."""

    def __init__(self, matcher: LLMatcher, said: str, vocabulary: int) -> None:
        self._matcher = matcher
        self._said = said
        self.vocabulary = vocabulary
        self._failure: StructureError | None = None

    @property
    def failure(self) -> StructureError | None:
        return self._failure

    @property
    def stopped(self) -> bool:
        """Whether the answer is whole: nothing may follow."""
        return self.failure is None and self._matcher.is_stopped()

    @property
    def asks(self) -> bool:
        """Whether it has a mask for the next token."""
        return self.failure is None and not self._matcher.is_stopped()

    def fill(self, bits: np.ndarray) -> None:
        """Write the next token's mask [1, words]."""
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, bits)
        matcher = self._matcher
        dead = matcher.is_stopped() and not matcher.is_accepting()
        if matcher.is_error() or dead:
            self._failure = self._failed()

    def accept(self, token: int) -> None:
        """Go on by a token that its mask allows, or one that ends the text."""
        if self.failure is None and not self._matcher.consume_token(token):
            self._failure = self._failed()

    def allows(self, token: int) -> bool:
        """Whether the mask allows a token. It need not be made for that."""
        return self._matcher.validate_tokens([token]) == 1

    def copy(self) -> StructureGuide:
        """A guide at the same place."""
        made = copy(self)
        made._matcher = self._matcher.deep_copy()
        return made

    def _failed(self) -> StructureError:
        found = reason_of(self._matcher.get_error()) or EMPTY
        fact = f"the answer cannot go on by its {self._said}"
        return StructureError(fact, found, "make it simpler")


@dataclass(frozen=True, eq=False)
class Compiled:
    """A structure that is ready for answers. Whoever holds one finds it ready."""

    matcher: LLMatcher


class Guides:
    """Guides for the answers of one engine. ``vocabulary``: of the model, which may
    have more tokens than the tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._lock = threading.Lock()  # of the three below
        # The client who asked first, and what it got; the one used last is last.
        self._compiled: OrderedDict[Structure, tuple[str, Compiled]] = OrderedDict()
        self._held: WeakValueDictionary[Structure, Compiled] = WeakValueDictionary()
        self._refused: OrderedDict[Structure, StructureError] = OrderedDict()
        self._trials: dict[float, Trials] = {}
        self._closed = False
        works = [partial(self._made, seconds=seconds) for seconds in (QUICK, SLOW)]
        self._queue = CompileQueue[Compiled](works, STACK)

    def guide(self, structure: Structure) -> Guide:
        """A guide at the beginning of an answer. The first one of a structure waits
        until it is compiled (``ready``), and raises what that raises."""
        if structure.kind == "thoughts":
            return self._thoughtful(structure)
        known = self._ready(structure, "").result()
        return StructureGuide(
            known.matcher.deep_copy(), structure.said, self._vocabulary
        )

    def ready(self, structure: Structure, client: str = "") -> Future[Compiled] | None:
        """The structure, compiled: at once where it was before, else when it is the
        ``client``'s turn, which may take some seconds. None where there is nothing to
        compile.

        Raises KvlatheError where the structure was refused before, Busy where the
        client waits for too many, and EngineStopped after ``close``. The future raises
        KvlatheError where llguidance is missing, the engine has no tokenizer, or the
        structure cannot be compiled; cancelling it gives the turn up.
        """
        if structure.kind == "thoughts":
            _, then = structure.thoughts
            return self._ready(then, client) if then else None
        return self._ready(structure, client)

    def _ready(self, structure: Structure, client: str) -> Future[Compiled]:
        if known := self._known(structure):
            done: Future[Compiled] = Future()
            done.set_result(known)
            return done
        return self._queue.put(structure, client)

    def least(self, least: int, ends: Sequence[int], then: Guide | None) -> Guide:
        """A guide that lets no token of ``ends`` end an answer before it has ``least``
        tokens; ``then`` guides it, too."""
        return LeastTokens(least, ends, self._vocabulary, then)

    def _thoughtful(self, structure: Structure) -> Guide:
        """A guide of an answer that may think before its structure."""
        form, then = structure.thoughts
        return ThoughtGuide(
            form,
            ThoughtTokens.of(form, self._tokenizer, self._ends or []),
            self._tokenizer,
            self._vocabulary,
            self.guide(then) if then else None,
        )

    def close(self) -> None:
        """Whoever waits for a structure is refused at once."""
        self._closed = True
        self._queue.close()
        for trials in list(self._trials.values()):
            trials.close()

    def _known(self, structure: Structure) -> Compiled | None:
        """A structure that was compiled before. Raises the error of one that was
        refused before."""
        with self._lock:
            if refused := self._refused.get(structure):
                raise StructureError(refused.fact, refused.reason, refused.remedy)
            if structure in self._compiled:
                self._compiled.move_to_end(structure)
            return self._held.get(structure)

    def _made(
        self, structure: Structure, client: str, seconds: float
    ) -> Compiled | None:
        """The structure, compiled and kept; None where that takes longer than QUICK and
        may take longer."""
        if known := self._known(structure):  # another client was before this one
            return known
        try:
            matcher = self._compile(structure, seconds)
        except StructureError as refused:
            with self._lock:
                self._refused[structure] = refused
                if len(self._refused) > REFUSED:
                    self._refused.popitem(last=False)
            raise
        except BaseException as error:
            refuse_fault(
                error, f"the {structure.said} cannot be followed", "correct it"
            )
            raise
        if matcher is None:
            return None
        made = Compiled(matcher)
        with self._lock:
            self._compiled[structure] = client, made
            self._held[structure] = made
            if len(self._compiled) > COMPILED:
                self._forget_one()
        return made

    def _forget_one(self) -> None:
        """The one that was used longest ago, of the client that has most."""
        counts = Counter(owner for owner, _ in self._compiled.values())
        (greedy, _), *_ = counts.most_common(1)
        owners = {kept: owner for kept, (owner, _) in self._compiled.items()}
        self._compiled.pop(next(kept for kept in owners if owners[kept] == greedy))

    def _compile(self, structure: Structure, seconds: float) -> LLMatcher | None:
        self._tries(seconds)  # it starts while this goes on
        vocabulary = self._walked
        trials = self._tries(seconds)
        from llguidance import LLMatcher

        fact = f"the {structure.said} cannot be followed"
        try:
            source = source_of(structure)
        except (ValueError, RecursionError) as error:
            raise StructureError(fact, str(error), "correct it") from error
        reason = trials.reason(source)
        if reason == TOO_SLOW and seconds == QUICK:
            return None
        if reason in (TOO_SLOW, TOO_LARGE):
            raise StructureError(fact, reason, "make it simpler")
        if reason:
            raise StructureError(fact, reason_of(reason), "correct it")
        made = LLMatcher(vocabulary, source, log_level=0, limits=limits())
        tried = StructureGuide(made, structure.said, self._vocabulary)
        if not made.is_error():
            tried.fill(no_bits(1, self._vocabulary))  # every answer's first
        reason = reason_of(made.get_error())
        if not reason and tried.failure is not None:
            reason = tried.failure.reason
        if reason:
            raise StructureError(fact, reason, "correct it")
        for warning in made.get_grammar_warnings():
            log.debug("%s: %s", structure.said, warning)
        return made

    def _tries(self, seconds: float) -> Trials:
        """The process that compiles on trial. It starts while this one does the
        same."""
        if self._closed:
            raise stopped()
        if seconds not in self._trials:
            setup = {
                "tokenizer": self._known_tokens,
                "vocabulary": self._vocabulary,
                "ends": self._ends,
                "limits": LIMITS,
            }
            self._trials[seconds] = Trials(setup, seconds)
        if self._closed:
            self._trials[seconds].close()
        return self._trials[seconds]

    @property
    def _ends(self) -> list[int] | None:
        """Tokens that end a text. Those that the model never says end none."""
        ends = [one for one in self._tokenizer.eos_ids if one < self._vocabulary]
        return ends or None

    @functools.cached_property
    def _known_tokens(self) -> str:
        return walked_tokens(self._tokenizer, self._vocabulary)

    @functools.cached_property
    def _walked(self) -> LLTokenizer:
        """The vocabulary as llguidance walks it; that takes a second or two."""
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise KvlatheError(
                "structured answers cannot be computed",
                f"{error.name} is not installed",
                f"run {pip_install('structured')}",
            ) from error
        made = partial(LLTokenizer, n_vocab=self._vocabulary, eos_token=self._ends)
        try:
            return made(self._known_tokens)
        except BaseException as error:  # it raises what it likes, and panics
            check_fault(error)
            log.warning(
                "llguidance does not read the tokenizer with other names of its added "
                "tokens (%s): a structure that spells one may fail",
                error,
            )
        plain = walked_tokens(self._tokenizer, self._vocabulary, rename=False)
        self._known_tokens = plain
        for trials in self._trials.values():
            trials.close()
        self._trials.clear()
        try:
            return made(plain)
        except BaseException as error:
            check_fault(error)
            raise StructureError(
                "this engine's answers cannot be structured",
                f"its tokenizer is of a kind that is not known: {error}",
                "leave the structure out",
            ) from error


def check_fault(error: BaseException) -> None:
    """Raises what is neither an exception nor a panic of Rust, as an interrupt."""
    if not isinstance(error, Exception) and type(error).__name__ != PANIC:
        raise error


def masks_of(guides: Sequence[Guide | None]) -> Masks | None:
    """The masks of all rows that have a guide; None where no row has any."""
    asking = {row: one for row, one in enumerate(guides) if one and one.asks}
    if not asking:
        return None
    first = next(iter(asking.values()))
    bits = no_bits(len(asking), first.vocabulary)
    for place, guide in enumerate(asking.values()):
        guide.fill(bits[place : place + 1])
    return Masks(np.array([*asking], np.int64), bits)


def source_of(structure: Structure) -> str:
    """A structure as llguidance takes it. Raises ValueError."""
    from llguidance import LLMatcher

    if structure.kind == "regex":
        return LLMatcher.grammar_from_regex(structure.text)
    if structure.kind == "grammar":
        return LLMatcher.grammar_from_lark(structure.text)
    schema = json.loads(structure.text)
    if structure.kind == "calls":
        return LLMatcher.grammar_from_lark(
            rules_of(schema["tools"], Calls(**schema["calls"]))
        )
    if isinstance(schema, bool):
        if not schema:
            raise ValueError(EMPTY)
        schema = dict[str, object]()
    check_settings(schema)
    known = without_notes(schema)
    # As a text: llguidance would spell the numbers anew.
    return LLMatcher.grammar_from_json_schema(
        spelled({**known, "x-guidance": SETTINGS})
    )


def check_settings(schema: dict[str, object]) -> None:
    """Raises ValueError for a schema that would set limits of the compiler."""
    if "x-guidance" in schema:
        raise ValueError("it says x-guidance, which sets limits of the compiler")


def without_notes(schema: dict[str, object]) -> dict[str, object]:
    """The schema without what holds an answer to nothing: string formats that
    llguidance does not know, which JSON schema takes as notes, and uniqueItems where it
    is false; large bounds are rounded inwards. Raises ValueError for values that
    llguidance would round, and for names by a pattern: nothing would keep an answer from
    giving one twice, which readers of JSON take for a fault or overwrite."""
    if schema.get("patternProperties") and schema.get("maxProperties") != 1:
        raise ValueError(
            "patternProperties could give a name twice: list the names in properties"
        )

    def kept(name: str, value: object) -> bool:
        unknown = name == "format" and isinstance(value, str) and value not in FORMATS
        return not unknown and not (name == "uniqueItems" and value is False)

    def inner(name: str, value: object) -> object:
        if name in VALUES:
            check_exact(value if name in ("const", "enum") else None)
            return value
        if name in BOUNDS:
            return bound(name, value)
        if name in MAPS and isinstance(value, dict):
            return {key: inner("", one) for key, one in value.items()}
        if isinstance(value, list):
            return [inner("", one) for one in value]
        return without_notes(value) if isinstance(value, dict) else value

    return {
        name: inner(name, value) for name, value in schema.items() if kept(name, value)
    }


def rules_of(tools: dict[str, dict[str, object]], calls: Calls) -> str:
    """The grammar of an answer that calls ``tools`` (name -> schema), as
    ``structure.Calls`` says."""

    def said(text: str) -> str:
        return terms(text, calls.special)

    more = calls.most - 1
    rest = f"({said(calls.between)} call){{0,{more}}}" if more else ""
    if more and calls.between.isspace():
        # Models write it, and then look whether there is more to call.
        rest += f" {said(calls.between)}?"
    lines = [f"start: {said(calls.begin)} call {rest} {said(calls.end)}"]
    for i, (name, schema) in enumerate(tools.items()):
        check_settings(schema)
        head = said(calls.head.replace(NAME, name))
        known = without_notes(schema)
        body = f"%json {spelled({**known, 'x-guidance': SETTINGS})}"
        if calls.tags is not None:
            body = tagged(known, calls.tags, said)
        lines.append(f"call_{i}: {head} {body} {said(calls.tail)}")
    names = " | ".join(f"call_{i}" for i in range(len(tools)))
    return "\n".join([*lines, f"call: {names}"])


def quote(text: str) -> str:
    """A text in a grammar; nothing for an empty one."""
    return json.dumps(text) if text else ""


def tagged(
    schema: Mapping[str, object], tags: Sequence[str], said: Callable[[str], str]
) -> str:
    """Arguments by a schema, each between ``tags``. Strings stand as they are: they have
    no <, and their lengths and choices are held to, but no pattern. Raises ValueError
    for a schema that asks more."""
    if unknown := {*schema} - TAGGED_KEYS:
        raise ValueError(f"arguments between tags cannot be held to {min(unknown)}")
    required = cast("list[str]", schema.get("required", []))
    named = cast("dict[str, dict[str, object]]", schema.get("properties", {}))
    if missing := {*required} - {*named}:
        raise ValueError(f"required names {min(missing)}, which properties does not")
    key, *rest = tags
    parts: list[str] = []
    for name, own in named.items():
        if not isinstance(own, dict):
            raise ValueError(f"properties.{name} is no schema of an argument")
        body = tagged_value({"$defs": schema.get("$defs", {}), **own}, name, rest, said)
        part = f"{said(key)} {body}"
        parts.append(part if name in required else f"({part})?")
    return " ".join(parts)


def tagged_value(
    schema: dict[str, object],
    name: str,
    tags: Sequence[str],
    said: Callable[[str], str],
) -> str:
    """An argument from its name to its end: a string as it stands, or JSON, between
    ``tags``."""
    keyed, other, after = tags
    kinds = kinds_of(schema)
    if "string" not in kinds:
        return f"{said(name + other)} %json {spelled(schema)} {said(after)}"
    for key in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(key), list):
            own = cast("list[dict[str, object]]", branches)
            defined = {"$defs": schema["$defs"]}
            each = (tagged_value({**defined, **one}, name, tags, said) for one in own)
            return f"({' | '.join(each)})"
    text = f"{said(name + keyed)} {raw_string(schema, after, said)}"
    null = f'{said(name + other)} "null" {said(after)}'
    return f"({text} | {null})" if "null" in kinds else text


def raw_string(
    schema: Mapping[str, object], after: str, said: Callable[[str], str]
) -> str:
    """A string without quotes in a grammar, and ``after``. Raises ValueError for one with
    a form."""
    if unknown := {"pattern", "format"} & {*schema}:
        raise ValueError(f"arguments between tags cannot be held to {min(unknown)}")
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return f"({' | '.join(quote(raw(value)) for value in values)}) {said(after)}"
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    # A terminal takes all that it can: what ends the string is part of it.
    ending, tag, rest = after.partition("<")
    ending = ending.replace("\n", "\\n")
    return f"/(?s:[^<]){{{least},{most}}}{ending}/ {said(tag + rest)}"


def raw(value: object) -> str:
    """A value as it stands between tags."""
    return value if isinstance(value, str) else json.dumps(value)


def terms(text: str, special: Mapping[str, int]) -> str:
    """A text in a grammar, with ``special`` tokens (name -> id) as such."""
    names = sorted(special, key=len, reverse=True)
    parts = re.split("|".join(map(re.escape, names)), text) if names else [text]
    found = re.findall("|".join(map(re.escape, names)), text) if names else []
    tokens = [f"<[{special[name]}]>" for name in found]
    return " ".join(
        one
        for part, token in zip_longest(map(quote, parts), tokens, fillvalue="")
        for one in (part, token)
        if one
    )


def limits() -> LLParserLimits:
    """LIMITS as llguidance's own object."""
    from llguidance import LLParserLimits

    return LLParserLimits(**LIMITS)


def reason_of(said: str) -> str:
    """llguidance's error in a line: without the parser's state and drawings."""
    lines = [line.strip() for line in said.partition("<non-verbose/>")[0].splitlines()]
    worth = [line for line in lines if line and not line.startswith(("^", "|"))]
    named = [line for line in worth if line.startswith("error: ")]
    first = "".join(worth[:1])
    if named:
        first = f"{first.partition('(in regex)')[0]}{named[0]}"
    return EMPTY if "NoExtension" in first else first[:300]
