"""Token rules: which of the tokens that reach a bucket it keeps, and which query rows
decide it.

Pages hold P tokens. A rule speaks of whole pages; the page that is being filled is
always kept. placement.py makes counts, page demands and moves of it.

Budgets and shares choose tokens by saliency. A window goes by position: its pages leave
as they are, and nothing is ranked.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

Problem = tuple[str, str]
"""A fact and the reason why it cannot be."""


@dataclass(frozen=True, slots=True)
class TokenRule:
    """What every rule answers.

    ``by_saliency``: it chooses tokens by saliency, so the plan needs an ObservationWindow.
    ``drops``: some tokens leave the cache. ``divides``: it takes a share of its
    source's tokens, beside other buckets.
    """

    by_saliency: ClassVar[bool] = False
    drops: ClassVar[bool] = False
    divides: ClassVar[bool] = False

    kind: str = field(default="", init=False)

    @property
    def most(self) -> int:
        """Tokens of full pages that it keeps at most."""
        return sys.maxsize

    @property
    def newest(self) -> int:
        """The newest so many tokens are kept whatever their saliency."""
        return 0

    @property
    def words(self) -> str:
        """For people: which tokens a bucket holds."""
        return "all"

    def kept(self, whole: int) -> int:
        """How many of ``whole`` tokens in full pages it keeps."""
        return min(whole, self.most)

    def problem(self, page_tokens: int) -> Problem | None:
        """What is wrong with its numbers, where a page holds ``page_tokens``."""
        return None


@dataclass(frozen=True, slots=True)
class KeepAll(TokenRule):
    """Every token stays."""

    kind: str = field(default="all", init=False)


@dataclass(frozen=True, slots=True)
class Budget(TokenRule):
    """The ``budget`` most salient tokens, whole pages; the newest n mod P are kept
    beside them (by the source, if there is one).

    ``recent``: this many of its tokens are the newest ones, whatever their saliency.
    """

    by_saliency: ClassVar[bool] = True
    drops: ClassVar[bool] = True

    budget: int
    recent: int = 0
    kind: str = field(default="budget", init=False)

    @property
    def most(self) -> int:
        return self.budget

    @property
    def newest(self) -> int:
        return self.recent

    @property
    def words(self) -> str:
        return f"{self.budget:,}"

    def problem(self, page_tokens: int) -> Problem | None:
        if self.budget <= 0 or self.budget % page_tokens:
            fact = f"it has a budget of {self.budget} tokens"
            return fact, f"budgets are whole pages of {page_tokens}"
        if not 0 <= self.recent <= self.budget:
            return f"it keeps its {self.recent} newest tokens", "they are in the budget"
        return None


@dataclass(frozen=True, slots=True)
class Share(TokenRule):
    """A ``share`` of the source's tokens: its cold buckets divide them by saliency, the
    first bucket takes the most salient. ``split_tokens`` says how many are whose.

    A bucket has those that fill pages. The others wait in the source, in its format,
    and are ranked again with the next ones.
    """

    by_saliency: ClassVar[bool] = True
    divides: ClassVar[bool] = True

    share: float
    kind: str = field(default="share", init=False)

    @property
    def words(self) -> str:
        return f"{self.share:.0%} by saliency"

    def problem(self, page_tokens: int) -> Problem | None:
        if not 0 < self.share <= 1:
            fact = f"it keeps a share of {self.share}"
            return fact, "a share is above 0 and at most 1"
        return None


@dataclass(frozen=True, slots=True)
class Window(TokenRule):
    """The first ``sink`` tokens and the newest pages; a page leaves when the window has
    passed it. The query at position p sees token t where

        t < sink   or   p // P * P - recent <= t <= p

    for pages of P tokens: its own page and ``recent`` tokens before that page. So what
    it sees follows from its position alone. Both numbers are whole pages. ``exact``:
    where it is not 0, the query sees at most so many of its newest tokens, its own
    included, and ``recent`` is the pages that hold them.

    Pages between the sink and the window are a whole number. So the same rule holds for
    places among the tokens that are held, and nobody needs to know what is gone.
    """

    drops: ClassVar[bool] = True

    sink: int
    recent: int
    exact: int = 0
    kind: str = field(default="window", init=False)

    @classmethod
    def of_tokens(cls, tokens: int, page_tokens: int) -> Window:
        """The newest ``tokens`` tokens, to the token: sliding-window attention."""
        earlier = tokens - 1
        pages = -(-earlier // page_tokens)
        recent = pages * page_tokens
        return cls(0, recent, tokens)

    @property
    def most(self) -> int:
        return self.sink + self.recent

    @property
    def words(self) -> str:
        count = self.exact or self.recent
        newest = f"{count:,} newest"
        if not self.sink:
            return newest
        first = f"{self.sink:,} first"
        return f"{first}, {newest}"

    def problem(self, page_tokens: int) -> Problem | None:
        for name, tokens in (("first", self.sink), ("newest", self.recent)):
            is_possible = 0 <= tokens < NO_END
            if not is_possible or tokens % page_tokens:
                fact = f"it has a window of {tokens} {name} tokens"
                return fact, f"windows are whole pages of {page_tokens}"
        held = self.of_tokens(self.exact, page_tokens).recent
        if self.exact < 0 or (self.exact and self.recent != held):
            fact = f"it holds {self.recent} tokens to show {self.exact}"
            return fact, "it holds the pages of those that it shows"
        return None

    def first_seen(self, place: int, page_tokens: int) -> int:
        """The first token after the sink that the query at ``place`` sees."""
        own_page = place // page_tokens * page_tokens
        to_the_page = own_page - self.recent
        if not self.exact:
            return to_the_page
        to_the_token = place - self.exact + 1
        return max(to_the_page, to_the_token)


@dataclass(frozen=True, slots=True)
class Compacted(TokenRule):
    """Every token stays. Of a prefix that is compacted on request, before later sequences
    begin with it, the share ``keep`` of the KV pairs stays (runtime/requests/compaction.py).

    ``apart``: each lane has a bucket of its own, so that lanes may keep different
    numbers of tokens; else all keep equally many.
    """

    keep: float
    apart: bool = True
    kind: str = field(default="compacted", init=False)

    @property
    def words(self) -> str:
        return f"all; {self.keep:.0%} of a compacted prefix"

    def problem(self, page_tokens: int) -> Problem | None:
        if not 0 < self.keep <= 1:
            fact = f"it keeps a share of {self.keep}"
            return fact, "a share is above 0 and at most 1"
        return None


NO_END = 1 << 30
"""Tokens that no sequence has."""
KEEP_ALL = KeepAll()
SEES_ALL = Window(0, NO_END)
"""The window of a lane that has none."""
RULES: Mapping[str, type[TokenRule]] = {
    "all": KeepAll,
    "budget": Budget,
    "share": Share,
    "window": Window,
    "compacted": Compacted,
}
"""The rules by their ``kind``."""


def split_tokens(shares: Sequence[float], tokens: int) -> tuple[int, ...]:
    """How many of ``tokens`` tokens each of the ``shares``, which sum to 1, has:
    round(share * tokens), the last share what is left. No count falls as ``tokens``
    grows, and each further token adds one to one of them.
    """
    counts: list[int] = []
    left, whole = tokens, 1.0
    for share in shares[:-1]:
        counts.append(round(share / whole * left))
        left -= counts[-1]
        whole -= share
    return (*counts, left)


@dataclass(frozen=True, slots=True)
class ObservationWindow:
    """Which query rows are observed, and how their attention probabilities become the
    saliency of a cached token.

    Windows are the prompt, cut into slices of ``slice_tokens`` tokens where that is not
    0, then every P later positions, from multiples of P on. Tokens are ranked when a
    window ends. Of each window these rows are observed: its last ones, as many as the
    larger of ``last`` and the share ``recent`` of the window; the share ``random`` of
    the window drawn from the others, by a hash of the plan's seed and the position; and
    the tokens whose ids are ``special``.

    The saliency of a token in a lane is the sum over the observed rows, and over the
    lane's query heads, of the probability that they give it. ``normalized``: divided by
    the number of observed rows at or after it; a token that none has observed then
    ranks first. Rows count from the token's arrival on or, where it is not
    ``accumulated``, from the last ranking on. ``pooling`` (odd): then the largest among
    so many neighbouring kept tokens. ``noise``: then its logarithm plus this many times
    a Gumbel variate (a hash of the plan's seed, the lane and the position).
    """

    recent: float = 0.0
    random: float = 0.0
    last: int = 0
    special: tuple[int, ...] = ()
    normalized: bool = False
    accumulated: bool = True
    pooling: int = 1
    noise: float = 0.0
    slice_tokens: int = 0
