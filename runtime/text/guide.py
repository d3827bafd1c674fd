"""Guides: which tokens an answer's structure leaves at each place, by llguidance.

llguidance is a parser in Rust that walks the vocabulary as a trie. It compiles most
schemas in milliseconds and makes a mask in some ten microseconds, and it needs no other
package. It bounds its own work. What it does not bound, structure.py does.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from kvlathe.base.errors import KvlatheError
from kvlathe.base.extras import pip_install
from kvlathe.runtime.text.masks import Masks, no_bits
from kvlathe.runtime.text.structure import Calls, Structure
from kvlathe.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

log = logging.getLogger("kvlathe")
SPACE = r" |\n {0,32}"
"""Between two parts of JSON, at most once: a small model could go on with blanks for
ever."""
SETTINGS: JsonCompileOptions = {"whitespace_pattern": SPACE, "coerce_one_of": True}
"""Of the schema compiler. oneOf is read as anyOf: an answer then fits one of them at
least."""
STACK = 256 << 20
"""Bytes of stack to compile on: rules that name each other are followed recursively."""
EMPTY = "no text fits it"
COMPILED = 16
"""Structures that are kept compiled: each holds the lexer states that answers found."""
ITEMS = 5000
"""Parser items of a step: more would hold up the other answers of its batch."""
STATES = 10_000
"""Lexer states of a structure: about a kilobyte each."""


class StructureError(KvlatheError):
    """A structure that this engine cannot follow, or not any further."""


class Guide:
    """Where one answer is in its structure. ``failure``: why it cannot go on."""

    def __init__(self, matcher: LLMatcher, said: str, vocabulary: int) -> None:
        self._matcher, self._said = matcher, said
        self.vocabulary = vocabulary
        self.failure: StructureError | None = None

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
            self.failure = self._failed()

    def accept(self, token: int) -> None:
        """Go on by a token that its mask allows, or one that ends the text."""
        if self.failure is None and not self._matcher.consume_token(token):
            self.failure = self._failed()

    def _failed(self) -> StructureError:
        found = reason_of(self._matcher.get_error()) or EMPTY
        fact = f"the answer cannot go on by its {self._said}"
        return StructureError(fact, found, "make it simpler")


class Guides:
    """Guides for the answers of one engine. ``vocabulary``: of the model, which may
    have more tokens than the tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._compiled: OrderedDict[Structure, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def guide(self, structure: Structure) -> Guide:
        """A guide at the beginning of an answer. The first one of a structure compiles
        it, which may take a second.

        Raises KvlatheError where llguidance is missing, the engine has no tokenizer,
        or the structure cannot be compiled.
        """
        with self._lock:
            known = self._compiled.get(structure)
        if known is None:
            known = compiler().submit(self._compile, structure).result()
            with self._lock:
                self._compiled[structure] = known
                if len(self._compiled) > COMPILED:
                    self._compiled.popitem(last=False)
        return Guide(known.deep_copy(), structure.said, self._vocabulary)

    def _compile(self, structure: Structure) -> LLMatcher:
        vocabulary = self._walked
        from llguidance import LLMatcher

        fact = f"the {structure.said} cannot be followed"
        try:
            source = source_of(structure)
        except ValueError as error:
            raise StructureError(fact, str(error), "correct it") from error
        made = LLMatcher(vocabulary, source, log_level=0, limits=limits())
        tried = Guide(made, structure.said, self._vocabulary)
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
        text = self._tokenizer.backend.to_str()
        ends = list(self._tokenizer.eos_ids) or None
        try:
            return LLTokenizer(text, n_vocab=self._vocabulary, eos_token=ends)
        except Exception as error:  # it raises what it likes
            fact = "this engine's answers cannot be structured"
            reason = f"its tokenizer is of a kind that is not known: {error}"
            raise StructureError(fact, reason, "leave the structure out") from error


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
    make = LLMatcher.grammar_from_json_schema
    return make(schema, overrides=SETTINGS)


def check_settings(schema: dict[str, object]) -> None:
    """Raises ValueError for a schema that would set limits of the compiler."""
    if "x-guidance" in schema:
        raise ValueError("it says x-guidance, which sets limits of the compiler")


def rules_of(tools: dict[str, dict[str, object]], calls: Calls) -> str:
    """The grammar of an answer that calls ``tools`` (name -> schema), as
    ``structure.Calls`` says."""
    begin = calls.begin
    opened = f"<[{begin}]>" if isinstance(begin, int) else quoted(begin)
    one = f"{quoted(calls.before)} call {quoted(calls.after)}"
    more = calls.most - 1
    rest = f"({quoted(calls.between)} {one}){{0,{more}}}" if more else ""
    opened += f" {quoted(calls.opens)}"
    lines = [f"start: {opened} {one} {rest} {quoted(calls.end)}"]
    for i, (name, schema) in enumerate(tools.items()):
        check_settings(schema)
        settings = {"x-guidance": SETTINGS}
        head = f'{{"name": {json.dumps(name)}, "{calls.key}": '
        body = json.dumps(schema | settings)
        lines.append(f'call_{i}: {quoted(head)} %json {body} "}}"')
    names = " | ".join(f"call_{i}" for i in range(len(tools)))
    return "\n".join([*lines, f"call: {names}"])


def quoted(text: str) -> str:
    """A text in a grammar; nothing for an empty one."""
    return json.dumps(text) if text else ""


def limits() -> LLParserLimits:
    """How much work a structure may be."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        step_max_items=ITEMS,
        max_lexer_states=STATES,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def reason_of(said: str) -> str:
    """llguidance's error in a line: without the parser's state and drawings."""
    plain = said.partition("<non-verbose/>")[0]
    lines = [line.strip() for line in plain.splitlines()]
    worth = [line for line in lines if line and not line.startswith(("^", "|"))]
    named = [line for line in worth if line.startswith("error: ")]
    first = "".join(worth[:1])
    if named:
        first = f"{first.partition('(in regex)')[0]}{named[0]}"
    return EMPTY if "NoExtension" in first else first[:300]


@functools.cache
def compiler() -> ThreadPoolExecutor:
    """The one thread that compiles structures: what is large holds up others that
    compile, and nobody else."""
    pool = ThreadPoolExecutor(1, "kvlathe-structures")
    before = threading.stack_size(STACK)
    try:
        started: Future[None] = pool.submit(lambda: None)
    finally:
        threading.stack_size(before)
    started.result()
    return pool
