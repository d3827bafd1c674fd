"""Thoughts before an answer: a guide that lets them pass, ends them where a budget says
so, and holds what follows to its structure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from kvlathe.runtime.text.masks import WORD, Guide, StructureError, no_bits
from kvlathe.runtime.text.structure import ThoughtForm
from kvlathe.runtime.text.tokenizer import Tokenizer

MOST_BLANKS = 4
"""Tokens of white space that may stand between thoughts and a structure."""
START, THINKING, FORCED, ANSWER = range(4)


@dataclass(frozen=True, slots=True)
class ThoughtTokens:
    """A ``ThoughtForm`` in the tokens of a vocabulary. ``blanks``: those of white
    space, ``ends``: those that end a text."""

    begin: tuple[int, ...]
    end: tuple[int, ...]
    after: tuple[int, ...]
    instead: tuple[int, ...]
    mark: bytes
    blanks: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(
        cls, form: ThoughtForm, tokenizer: Tokenizer, ends: Sequence[int]
    ) -> ThoughtTokens:
        def ids(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        blanks = tokenizer.blanks
        return cls(
            ids(form.begin),
            ids(form.end),
            ids(form.after),
            ids(form.instead),
            form.end.encode(),
            blanks,
            tuple(ends),
        )


class ThoughtGuide:
    """The place of an answer that may think first (``masks.Guide``). ``then``: the guide
    of what follows; None: any text. ``piece``: bytes that a token writes."""

    def __init__(
        self,
        form: ThoughtForm,
        tokens: ThoughtTokens,
        tokenizer: Tokenizer,
        vocabulary: int,
        then: Guide | None,
    ) -> None:
        self.vocabulary = vocabulary
        self._tokens, self._then = tokens, then
        self._tokenizer = tokenizer
        self._budget = form.budget
        self._state = {True: THINKING, False: ANSWER, None: START}[form.inside]
        self._tail = b""
        self._thought = 0
        self._blanks = 0
        self._forced: list[int] = []
        self._next = ANSWER  # after what is forced
        self._begun = 0  # tokens of the beginning that were matched
        self._check_budget()

    @property
    def failure(self) -> StructureError | None:
        return self._then.failure if self._then else None

    @property
    def stopped(self) -> bool:
        return self._state == ANSWER and bool(self._then and self._then.stopped)

    @property
    def asks(self) -> bool:
        if self._state == FORCED:
            return True
        if self._then is None:
            return False
        return self._then.asks or self._state in (START, THINKING)

    def fill(self, bits: np.ndarray) -> None:
        """Write the next token's mask [1, words]."""
        if self._state == FORCED:
            allow(bits, self._forced[:1])
        elif self._state == THINKING:
            bits[:] = -1
            forbid(bits, self._tokens.ends)
        elif self._state == START:
            self._fill_start(bits)
        else:
            self._fill_answer(bits)

    def accept(self, token: int) -> None:
        """Go on by a token that its mask allows, or one that ends the text."""
        if self._state == FORCED:
            self._forced.pop(0)
            if not self._forced:
                self._enter(self._next)
        elif self._state == THINKING:
            self._think(token)
        elif self._state == START:
            self._start(token)
        elif self._then is not None:
            self._answer(self._then, token)

    def allows(self, token: int) -> bool:
        """Whether the mask allows a token."""
        return in_mask(self, token)

    def copy(self) -> ThoughtGuide:
        """A guide at the same place."""
        made = copy(self)
        made._forced = [*self._forced]
        made._then = self._then and self._then.copy()
        return made

    # -- the beginning -----------------------------------------------------------------
    def _heads(self) -> list[tuple[int, tuple[int, ...]]]:
        """Texts that the answer may begin with, and the state behind it."""
        own = self._tokens
        return [
            (THINKING, own.begin),
            *([(ANSWER, own.instead)] if own.instead else []),
        ]

    def _fill_start(self, bits: np.ndarray) -> None:
        if self._then is not None and not self._tokens.instead and not self._begun:
            self._fill_answer(bits)
        heads = [head for _, head in self._heads() if self._matches(head)]
        allow(bits, [head[self._begun] for head in heads])

    def _matches(self, head: tuple[int, ...]) -> bool:
        """Whether the beginning so far is that of ``head``, which goes on."""
        begun = self._begun
        return len(head) > begun and head[:begun] == tuple(self._forced[:begun])

    def _start(self, token: int) -> None:
        """A token of the beginning. Where nothing holds the answer, it may be any."""
        heads = [
            (state, head)
            for state, head in self._heads()
            if self._matches(head) and head[self._begun] == token
        ]
        own = self._then is not None and not self._tokens.instead and not self._begun
        if not heads or (own and self._allows(token)):
            self._forced, self._state = [], ANSWER
            if self._then is not None:
                self._answer(self._then, token)
            return
        self._forced.append(token)
        self._begun += 1
        for state, head in heads:
            if len(head) == self._begun:
                self._forced = []
                self._enter(state)

    def _allows(self, token: int) -> bool:
        """Whether the structure itself may go on with a token."""
        assert self._then is not None
        return self._then.asks and self._then.allows(token)

    # -- thoughts ----------------------------------------------------------------------
    def _think(self, token: int) -> None:
        self._thought += 1
        mark = self._tokens.mark
        self._tail += self._tokenizer.piece(token)
        place = self._tail.find(mark)
        if place < 0:
            self._tail = self._tail[-len(mark) :]
            self._check_budget()
            return
        rest = self._tail[place + len(mark) :]
        self._force(self._tokens.after, ANSWER)
        if rest.strip() and self._then is not None and self._state == ANSWER:
            text = rest.decode(errors="replace").lstrip()
            for one in self._tokenizer.encode(text, add_special_tokens=False):
                self._answer(self._then, one)

    def _check_budget(self) -> None:
        """End thoughts that have taken their budget."""
        spent = self._budget is not None and self._thought >= self._budget
        if self._state == THINKING and spent:
            self._force(self._tokens.end + self._tokens.after, ANSWER)

    def _force(self, tokens: Iterable[int], then: int) -> None:
        self._forced = [*tokens]
        self._next = then
        if self._forced:
            self._state = FORCED
        else:
            self._enter(then)

    def _enter(self, state: int) -> None:
        self._state = state
        self._check_budget()

    # -- the answer --------------------------------------------------------------------
    def _fill_answer(self, bits: np.ndarray) -> None:
        assert self._then is not None
        if self._then.asks:
            self._then.fill(bits)
        if 0 <= self._blanks < MOST_BLANKS:
            allow(bits, self._tokens.blanks)

    def _answer(self, then: Guide, token: int) -> None:
        """A token of the answer, or of the white space before it."""
        waits = 0 <= self._blanks < MOST_BLANKS
        if waits and token in self._tokens.blanks and not self._allows(token):
            self._blanks += 1
            return
        self._blanks = -1
        then.accept(token)


class LeastTokens:
    """A guide that lets no text end before it has ``least`` tokens (``masks.Guide``).
    ``then``: the guide of the answer's structure, which may end it sooner."""

    def __init__(
        self, least: int, ends: Sequence[int], vocabulary: int, then: Guide | None
    ) -> None:
        self.vocabulary = vocabulary
        self._left, self._ends, self._then = least, ends, then

    @property
    def failure(self) -> StructureError | None:
        return self._then.failure if self._then else None

    @property
    def stopped(self) -> bool:
        return self._then is not None and self._then.stopped

    @property
    def asks(self) -> bool:
        return self._left > 0 or (self._then is not None and self._then.asks)

    def fill(self, bits: np.ndarray) -> None:
        """Write the next token's mask [1, words]."""
        if self._then is not None and self._then.asks:
            self._then.fill(bits)
        else:
            bits[:] = -1
        if self._left > 0:
            whole = bits.copy()
            forbid(bits, self._ends)
            if not bits.any():  # the structure leaves nothing but the end
                bits[:] = whole

    def accept(self, token: int) -> None:
        self._left -= 1
        if self._then is not None:
            self._then.accept(token)

    def allows(self, token: int) -> bool:
        """Whether the mask allows a token."""
        return in_mask(self, token)

    def copy(self) -> LeastTokens:
        """A guide at the same place."""
        made = copy(self)
        made._then = self._then and self._then.copy()
        return made


def in_mask(guide: Guide, token: int) -> bool:
    """Whether a guide that asks allows a token."""
    bits = no_bits(1, guide.vocabulary)
    guide.fill(bits)
    return bool(bits[0, token // WORD] >> (token % WORD) & 1)


def allow(bits: np.ndarray, tokens: Sequence[int]) -> None:
    """Set the bits of tokens in a mask [1, words]."""
    words = bits.view(np.uint32)
    for token in tokens:
        words[0, token // WORD] |= np.uint32(1 << (token % WORD))


def forbid(bits: np.ndarray, tokens: Sequence[int]) -> None:
    """Clear the bits of tokens in a mask [1, words]."""
    words = bits.view(np.uint32)
    for token in tokens:
        words[0, token // WORD] &= np.uint32(0xFFFFFFFF ^ (1 << (token % WORD)))
