"""Reasoning: thoughts that a model writes before its answer, by the convention that its
chat template and its vocabulary show."""

from __future__ import annotations

from dataclasses import dataclass

from kvlathe.runtime.text.tokenizer import Tokenizer
from kvlathe.server.pieces import beginning_of


@dataclass(frozen=True, slots=True)
class Thinking:
    """Thoughts stand between ``begin`` and ``end``.

    ``follows`` may stand before the answer, thoughts or none, and ``closes`` behind it
    then; neither is part of it. A model has this convention where each of ``shows`` is
    in its template or is a token of its vocabulary.
    """

    begin: str
    end: str
    follows: str = ""
    closes: str = ""
    shows: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.begin, self.end, self.follows, self.closes)))

    def open_at_end(self, prompt: str, goes_on: str | None) -> bool | None:
        """Whether a prompt ends inside of thoughts; None where it ends neither with
        their begin nor with their end, and the answer may begin them. ``goes_on``: the
        text that the answer goes on with, if any: it alone may have begun thoughts.
        What other messages say of marks says nothing."""
        said = prompt.rstrip()
        if goes_on is not None:
            return goes_on.rfind(self.begin) > goes_on.rfind(self.end)
        if said.endswith(self.begin):
            return True
        return False if said.endswith(self.end) else None


CONVENTIONS = (
    # Granite 3.3, before the plain form: it has its marks, too.
    Thinking(
        "<think>", "</think>", "<response>", "</response>", ("<think>", "<response>")
    ),
    # Qwen 3, DeepSeek R1 and V3.1, GLM 4.5, Kimi K2, MiniMax M2, Phi 4, SmolLM 3, ...
    Thinking("<think>", "</think>", shows=("</think>",)),
    # Magistral.
    Thinking("[THINK]", "[/THINK]", shows=("[/THINK]",)),
    # Seed-OSS.
    Thinking("<seed:think>", "</seed:think>", shows=("</seed:think>",)),
    # Command A Reasoning.
    Thinking(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
        ("<|START_THINKING|>",),
    ),
    # Kimi VL.
    Thinking("◁think▷", "◁/think▷", shows=("◁/think▷",)),
    # Granite 3.2.
    Thinking(
        "Here is my thought process:",
        "Here is my response:",
        shows=("Here is my thought process:",),
    ),
)


def thinking_of(template: str, tokenizer: Tokenizer) -> Thinking | None:
    """The convention of a template's model; None where it does not think, or in a way
    that is not known."""
    escaped = template.replace("\\n", "\n")
    for one in CONVENTIONS:
        if all(mark in escaped or tokenizer.has_token(mark) for mark in one.shows):
            return one
    return None


BLANK, INSIDE, FOLLOWS, AFTER = range(4)


class Thoughts:
    """Parser of one answer: pieces of text go in, and pieces of thoughts and of the rest
    come out. ``inside``: the prompt ends inside of thoughts; None: the answer may begin
    them. Blanks at the marks belong to neither."""

    def __init__(self, convention: Thinking, inside: bool | None) -> None:
        self._marks = convention
        self._state = {True: INSIDE, False: AFTER, None: BLANK}[inside]
        self._held = ""
        self._closes = ""  # once the answer was opened
        self._bare = inside is True  # nothing was given out since the last mark

    @property
    def inside(self) -> bool:
        """Whether thoughts go on."""
        return self._state == INSIDE

    def push(self, text: str) -> tuple[str, str]:
        """The thoughts and the text that a piece adds."""
        self._held += text
        thought, said = "", ""
        if self._state == BLANK:
            self._begin()
        if self._state == INSIDE:
            thought = self._think()
        if self._state == FOLLOWS:
            self._follow()
        if self._state == AFTER:
            said = self._say()
        return thought, said

    def close(self) -> tuple[str, str]:
        """The end of the text: what was held back."""
        rest, self._held = self._held, ""
        if self._state == INSIDE:
            return rest, ""
        if self._state == FOLLOWS:
            rest = rest.lstrip()
        return "", rest

    def _begin(self) -> None:
        """Find out whether the answer begins with thoughts."""
        said, begin = self._held.lstrip(), self._marks.begin
        if said.startswith(begin):
            self._held, self._state, self._bare = said[len(begin) :], INSIDE, True
        elif (follows := self._marks.follows) and said.startswith(follows):
            self._state = FOLLOWS  # an answer without thoughts
        elif not begin.startswith(said) and not follows.startswith(said):
            self._state = AFTER

    def _think(self) -> str:
        if self._bare:
            self._held = self._held.lstrip()
            self._bare = not self._held
        thought, found, rest = self._held.partition(self._marks.end)
        if found:
            self._held, self._state = rest, FOLLOWS
            return thought.rstrip()
        keep = beginning_of([self._marks.end], thought)
        said = thought[: len(thought) - keep].rstrip()
        self._held = thought[len(said) :]
        return said

    def _follow(self) -> None:
        """Take off what stands before the answer."""
        self._held = self._held.lstrip()
        follows = "" if self._closes else self._marks.follows
        if follows and self._held.startswith(follows):
            self._held = self._held[len(follows) :].lstrip()
            self._closes, follows = self._marks.closes, ""
        waits = follows.startswith(self._held)
        if self._held and not waits:
            self._state = AFTER

    def _say(self) -> str:
        closes = self._closes
        if not closes:
            said, self._held = self._held, ""
            return said
        before, found, rest = self._held.partition(closes)
        if found:
            self._held = rest
            return before
        keep = beginning_of([closes], self._held)
        said, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return said
