"""Moves: which tokens of a sequence go to which bucket once a step has cached more of
them. Counts only; placement.py decides them."""

from __future__ import annotations

from dataclasses import dataclass

Span = tuple[int, int]
"""Ranks from the first number to before the second."""


@dataclass(frozen=True, slots=True)
class Target:
    """Bucket ``bucket`` gets the tokens of the ranks in ``spans``, in new pages."""

    bucket: int
    spans: tuple[Span, ...]

    @property
    def tokens(self) -> int:
        return sum(stop - start for start, stop in self.spans)

    def pages(self, page_tokens: int) -> int:
        """New pages that it fills or begins."""
        return -(-self.tokens // page_tokens)


@dataclass(frozen=True, slots=True)
class Choice:
    """Each lane's first ``length`` tokens of ``bucket`` (those just sealed included)
    are ranked, the ``newest`` before all others. Each of ``targets`` gets its ranks.
    The rest is dropped.
    """

    bucket: int
    length: int
    newest: int
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class Moves:
    """``seals``: full pages at the front of the fresh bucket that are quantized into
    each of its cold ones; then ``choices`` are made."""

    seals: int = 0
    choices: tuple[Choice, ...] = ()


NOTHING = Moves()
