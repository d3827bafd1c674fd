"""Moves: which tokens of a sequence go to which bucket once a step has cached more of
them. Counts only; lives.py decides them."""

from __future__ import annotations

from dataclasses import dataclass

Span = tuple[int, int]
"""Places in the order of saliency, from the first number to before the second."""


@dataclass(frozen=True, slots=True)
class Target:
    """Bucket ``bucket`` gets the tokens at the places in ``spans``, in new pages."""

    bucket: int
    spans: tuple[Span, ...]

    @property
    def tokens(self) -> int:
        return sum(stop - start for start, stop in self.spans)

    def pages(self, page_tokens: int) -> int:
        """New pages that it fills or begins."""
        return -(-self.tokens // page_tokens)


@dataclass(frozen=True, slots=True)
class Selection:
    """Each lane's first ``length`` tokens of ``bucket`` (those just sealed included)
    are ordered by saliency, the ``newest`` before all others. Each of ``targets`` gets
    its places in that order. The rest is dropped.
    """

    bucket: int
    length: int
    newest: int
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """``pages`` pages of ``bucket`` from its page ``first`` on leave the cache."""

    bucket: int
    first: int
    pages: int


@dataclass(frozen=True, slots=True)
class Shown:
    """Queries see the first ``tokens`` tokens of ``bucket``. The pages behind those are
    written, and wait."""

    bucket: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Moves:
    """``seals``: full pages of the hot bucket, behind the ``first`` ones that stay there,
    that are quantized into each of its cold ones; then ``selections`` are made, then
    ``drops``; then of some buckets a part is ``shown``."""

    seals: int = 0
    selections: tuple[Selection, ...] = ()
    drops: tuple[Drop, ...] = ()
    first: int = 0
    shown: tuple[Shown, ...] = ()


NOTHING = Moves()
