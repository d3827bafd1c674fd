"""Lives: which tokens of a group stay in the cache, where they are, when they move, and
what queries see of them.

A group's tokens arrive in its hot tier. A life is said in counts of one sequence, so its
answers are the same whatever else is in the batch. Pages hold P tokens. A life speaks of
whole pages; the page that is being filled always stays. Each life answers six
questions, and nobody else asks what kind it is:

    held(n)            tokens in the hot tier and in each cold one, once n have arrived
    written(n)         the same with those of pages that wait until queries see them there
    moves(...)         what to do so that ``held`` comes true
    worst(n, prompt)   pages of each tier that a sequence can need at one time
    shared(n)          the tokens of a prefix of n that a sequence holds which ends there
    sees               the three numbers of the mask

Budgets and divisions choose tokens by saliency (CompressionPlan.score). A window
goes by position: its pages leave as they are, and nothing is ranked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar

from kvlathe.plan.life import Life, Paging, Problem
from kvlathe.plan.moves import NOTHING, Drop, Moves, Selection, Shown, Span, Target
from kvlathe.plan.sight import NO_END, Sight


@dataclass(frozen=True, slots=True)
class Keep(Life):
    """Every token stays in the hot tier."""

    kind: str = field(default="keep", init=False)

    @property
    def cold_tiers(self) -> range:
        return range(1)


@dataclass(frozen=True, slots=True)
class Seal(Life):
    """Every token stays. Full pages are sealed.

    >>> Seal().held(1000, Paging(page=64, cold=1))
    (40, 960)
    """

    kind: str = field(default="seal", init=False)

    @property
    def cold_tiers(self) -> range:
        return range(1, 2)


@dataclass(frozen=True, slots=True)
class SealAfter(Life):
    """Every token stays. The ``first`` tokens stay hot, other full pages are sealed.

    Most heads attend to the first tokens by default (attention sinks), so that errors of
    these cost more than all others' (docs/quantization.md).

    >>> SealAfter(64).held(1000, Paging(page=64, cold=1))
    (104, 896)
    """

    first: int
    kind: str = field(default="seal_after", init=False)

    @property
    def stay_hot(self) -> int:
        return self.first

    @property
    def cold_tiers(self) -> range:
        return range(1, 2)

    def words(self, cold: int = 0) -> str:
        return f"all but the {self.first:,} first"

    def problem(self, page_tokens: int) -> Problem | None:
        if not 0 < self.first < NO_END or self.first % page_tokens:
            fact = f"its {self.first} first tokens stay as they are"
            return fact, f"these are whole pages of {page_tokens}"
        return None

    def held(self, tokens: int, at: Paging) -> tuple[int, ...]:
        whole = at.whole(tokens)
        first = min(self.first, whole)
        return (first + tokens - whole, whole - first)

    def moves(
        self, buckets: Sequence[int], lengths: Sequence[int], arrived: int, at: Paging
    ) -> Moves:
        first = self.first // at.page
        seals = lengths[buckets[0]] // at.page - first
        return Moves(seals, first=first) if seals > 0 else NOTHING

    def _peak(self, tokens: int, step: int, at: Paging) -> tuple[int, ...]:
        whole = at.whole(tokens)
        first = min(self.first, whole)
        return at.pages(min(tokens, self.first + step)), at.pages(whole - first)


@dataclass(frozen=True, slots=True)
class Age(Life):
    """The ``first`` tokens stay hot. Of the others in full pages the first cold tier has
    the ``sink`` first and the ``young`` newest, the second has older ones: of the newest
    ``recent`` alone, where those are not all.

    A page is sealed into both tiers at once, so nothing is coded twice. In the second it
    waits until it leaves the first: each query sees a token once. Pages leave when tokens
    move, and no mask hides them before.

    >>> life = Age(first=64, young=256)
    >>> life.held(1000, Paging(page=64, cold=2))
    (104, 256, 640)
    >>> life.written(1000, Paging(page=64, cold=2))
    (104, 256, 896)
    >>> Age(first=0, young=128, sink=64, recent=512).held(1000, Paging(page=64, cold=2))
    (40, 192, 384)
    """

    first: int
    young: int
    sink: int = 0
    recent: int = NO_END
    kind: str = field(default="age", init=False)

    @property
    def drops(self) -> bool:
        return self.reaches.is_less

    @property
    def stay_hot(self) -> int:
        return self.first

    @property
    def newest_apart(self) -> int:
        return self.young

    @property
    def first_apart(self) -> int:
        return self.first + self.sink

    @property
    def reaches(self) -> Sight:
        return Sight(self.first_apart, self.recent)

    @property
    def cold_tiers(self) -> range:
        return range(2, 3)

    def words(self, cold: int = 0) -> str:
        if cold:
            return f"older of {self.recent:,} newest" if self.drops else "older"
        newest = f"{self.young:,} newest"
        if self.sink:
            return f"{self.sink:,} first, {newest}"
        others = f", without the {self.first:,} first" if self.first else ""
        return f"{newest}{others}"

    def problem(self, page_tokens: int) -> Problem | None:
        firsts = self.first, self.sink
        fits = all(0 <= tokens < NO_END for tokens in firsts)
        fits &= 0 < self.young < self.recent <= NO_END
        numbers = *firsts, self.young, self.recent
        if not fits or any(tokens % page_tokens for tokens in numbers):
            fact = (
                f"{self.first + self.sink} first and {self.young} newest of "
                f"{self.recent} tokens have other formats"
            )
            return (
                fact,
                f"these are whole pages of {page_tokens}, each more than before",
            )
        return None

    def leaves(self, tier: int) -> bool:
        return tier == 1 or (tier == 2 and self.drops)

    def waits(self, tier: int) -> bool:
        return tier == 2

    def held(self, tokens: int, at: Paging) -> tuple[int, ...]:
        hot, near, every = self.written(tokens, at)
        return hot, near, every - max(0, near - self.sink)

    def written(self, tokens: int, at: Paging) -> tuple[int, ...]:
        whole = at.whole(tokens)
        first = min(self.first, whole)
        sink, near, every = self._cold(whole - first)
        return first + tokens - whole, sink + near, every

    def _cold(self, sealed: int) -> tuple[int, int, int]:
        """Of ``sealed`` tokens: the sink, the newest apart, and all those after the sink
        that stay."""
        sink = min(sealed, self.sink)
        every = min(sealed - sink, self.recent)
        return sink, min(every, self.young), every

    def shared(self, tokens: int, tier: int) -> tuple[int, int]:
        sink, near, every = self._cold(max(0, tokens - self.first))
        return (sink, near) if tier == 1 else (0, every)

    def moves(
        self, buckets: Sequence[int], lengths: Sequence[int], arrived: int, at: Paging
    ) -> Moves:
        hot, young, old = buckets
        first = self.first // at.page
        seals = lengths[hot] // at.page - first
        if seals <= 0:
            return NOTHING
        _, near, far = self.held(arrived, at)
        *_, every = self.written(arrived, at)
        written = lengths[old] + max(0, lengths[young] - self.sink)
        drops = (
            Drop(
                young, self.sink // at.page, (lengths[young] - near) // at.page + seals
            ),
            Drop(old, 0, (written - every) // at.page + seals),
        )
        made = tuple(drop for drop in drops if drop.pages)
        return Moves(seals, drops=made, first=first, shown=(Shown(old, far),))

    def _peak(self, tokens: int, step: int, at: Paging) -> tuple[int, ...]:
        whole = at.whole(tokens)
        sealed = whole - min(self.first, whole)
        hot = min(tokens, self.first + step)
        young = min(sealed, self.sink + self.young + step)
        # The sink is written there, too, and leaves at once.
        old = sealed if sealed <= step else min(sealed - self.sink, self.recent + step)
        old = max(old, min(sealed, step))
        return at.pages(hot), at.pages(young), at.pages(old)


@dataclass(frozen=True, slots=True)
class Window(Life):
    """The first ``sink`` tokens and the newest pages; a page leaves when the window has
    passed it. Queries see the same (Sight has the numbers).

    >>> life = Window(sink=64, recent=128)
    >>> life.words()
    '64 first, 128 newest'
    >>> life.held(1000, Paging(page=64))  # 15 full pages and 40 tokens have arrived
    (232,)
    >>> life.moves([0], [1024], 1024, Paging(page=64)).drops
    (Drop(bucket=0, first=1, pages=13),)
    >>> Window(sink=64, recent=100).problem(page_tokens=64)
    ('it has a window of 100 newest tokens', 'windows are whole pages of 64')
    """

    sink: int
    recent: int
    exact: int = 0
    kind: str = field(default="window", init=False)

    @classmethod
    def of_tokens(cls, tokens: int, page_tokens: int) -> Window:
        """The newest ``tokens`` tokens, to the token: sliding-window attention."""
        pages = -(-(tokens - 1) // page_tokens)
        return cls(0, pages * page_tokens, tokens)

    @property
    def drops(self) -> bool:
        return True

    @property
    def sees(self) -> Sight:
        return Sight(self.sink, self.recent, self.exact)

    def words(self, cold: int = 0) -> str:
        newest = f"{self.exact or self.recent:,} newest"
        return f"{self.sink:,} first, {newest}" if self.sink else newest

    def problem(self, page_tokens: int) -> Problem | None:
        for name, tokens in (("first", self.sink), ("newest", self.recent)):
            if not 0 <= tokens < NO_END or tokens % page_tokens:
                fact = f"it has a window of {tokens} {name} tokens"
                return fact, f"windows are whole pages of {page_tokens}"
        held = self.of_tokens(self.exact, page_tokens).recent
        if self.exact < 0 or (self.exact and self.recent != held):
            fact = f"it holds {self.recent} tokens to show {self.exact}"
            return fact, "it holds the pages of those that it shows"
        return None


@dataclass(frozen=True, slots=True)
class Budget(Life):
    """The ``budget`` most salient tokens, whole pages. The newest n mod P stay beside
    them, hot.

    ``recent``: this many of its tokens are the newest ones, whatever their saliency.

    >>> Budget(256).held(1000, Paging(page=64, cold=1))
    (40, 256)
    """

    by_saliency: ClassVar[bool] = True
    budget: int
    recent: int = 0
    kind: str = field(default="budget", init=False)

    @property
    def drops(self) -> bool:
        return True

    @property
    def most(self) -> int:
        return self.budget

    def words(self, cold: int = 0) -> str:
        return f"{self.budget:,}"

    def problem(self, page_tokens: int) -> Problem | None:
        if self.budget <= 0 or self.budget % page_tokens:
            fact = f"it has a budget of {self.budget} tokens"
            return fact, f"budgets are whole pages of {page_tokens}"
        if not 0 <= self.recent <= self.budget:
            fact = f"{self.recent} newest tokens exceed the budget of {self.budget}"
            return fact, "they are part of it"
        return None

    def _cut(
        self, seals: int, bucket: int, length: int, held: int, tail: int, at: Paging
    ) -> Moves:
        kept = Target(bucket, ((0, held),))
        return Moves(seals, (Selection(bucket, length, self.recent + tail, (kept,)),))


@dataclass(frozen=True, slots=True)
class Divide(Life):
    """Every token stays. Cold tiers share them by saliency: the first has ``shares[0]``
    of them, the most salient. ``split_tokens`` says how many are whose.

    A cold tier has those that fill pages. The others wait in the hot tier, and are ranked
    again with the next ones.

    >>> Divide((0.25, 0.75)).held(1000, Paging(page=64, cold=2))
    (104, 192, 704)
    """

    by_saliency: ClassVar[bool] = True
    seals: ClassVar[bool] = False

    shares: tuple[float, ...]
    kind: str = field(default="divide", init=False)

    @property
    def cold_tiers(self) -> range:
        count = len(self.shares)
        return range(count, count + 1)

    def words(self, cold: int = 0) -> str:
        return f"{self.shares[cold]:.0%} by saliency"

    def problem(self, page_tokens: int) -> Problem | None:
        for share in self.shares:
            if not 0 < share <= 1:
                fact = f"it keeps a share of {share}"
                return fact, "a share is above 0 and at most 1"
        if abs(1 - sum(self.shares)) > ROUNDING:
            return f"it divides tokens by {self.shares}", "shares sum to 1"
        return None

    def ranks_in(self, tier: int) -> bool:
        return tier == 0

    def held(self, tokens: int, at: Paging) -> tuple[int, ...]:
        cold = [at.whole(count) for count in split_tokens(self.shares, tokens)]
        return (tokens - sum(cold), *cold)

    def moves(
        self, buckets: Sequence[int], lengths: Sequence[int], arrived: int, at: Paging
    ) -> Moves:
        """The most salient tokens go to the first cold tier, the least salient to the
        last. Each gets from its end of the ranks what fills its pages."""
        hot, *cold = buckets
        _, *held = self.held(arrived, at)
        counts = split_tokens(self.shares, arrived)
        wanted = [count - lengths[c] for c, count in zip(cold, counts, strict=True)]
        sealed: list[Target] = []
        left: list[Span] = []
        start = 0
        for bucket, total, end in zip(cold, held, accumulate(wanted), strict=True):
            count = total - lengths[bucket]
            first = start if bucket != cold[-1] else end - count
            sealed.append(Target(bucket, ((first, first + count),)))
            left += [(start, first), (first + count, end)]
            start = end
        targets = [target for target in sealed if target.tokens]
        if not targets:
            return NOTHING
        rest = tuple(span for span in left if span[0] < span[1])
        if rest:
            targets.append(Target(hot, rest))
        return Moves(0, (Selection(hot, lengths[hot], 0, tuple(targets)),))

    def _decode_step(self, at: Paging) -> int:
        return 1

    def _peak(self, tokens: int, step: int, at: Paging) -> tuple[int, ...]:
        waiting = len(self.shares) * (at.page - 1)
        length = min(tokens, step + waiting)
        # Where tokens move, a page of them does; the others go to new pages.
        rest = min(max(0, length - at.page), waiting)
        _, *held = self.held(tokens, at)
        return (at.pages(length) + at.pages(rest), *map(at.pages, held))


@dataclass(frozen=True, slots=True)
class Compact(Life):
    """Every token stays. Of a prefix that is compacted on request, before later sequences
    begin with it, the share ``keep`` of the KV pairs stays
    (runtime/requests/compaction.py). Each group then keeps its own number of tokens.
    """

    keep: float
    kind: str = field(default="compact", init=False)

    @property
    def compaction(self) -> float | None:
        return self.keep

    def words(self, cold: int = 0) -> str:
        return f"all; {self.keep:.0%} of a compacted prefix"

    def problem(self, page_tokens: int) -> Problem | None:
        if not 0 < self.keep <= 1:
            fact = f"it keeps a share of {self.keep}"
            return fact, "a share is above 0 and at most 1"
        return None


ROUNDING = 1e-9
"""Allowed error of shares that sum to 1."""
KEEP = Keep()
SEAL = Seal()
LIVES: Mapping[str, type[Life]] = {
    "keep": Keep,
    "seal": Seal,
    "seal_after": SealAfter,
    "age": Age,
    "window": Window,
    "budget": Budget,
    "divide": Divide,
    "compact": Compact,
}
"""The lives by their ``kind``."""


def split_tokens(shares: Sequence[float], tokens: int) -> tuple[int, ...]:
    """Divide ``tokens`` tokens by ``shares``, which sum to 1: round(share * tokens)
    each, the last one what is left. No count falls as ``tokens`` grows, and each further
    token adds one to one of them.
    """
    counts: list[int] = []
    left, whole = tokens, 1.0
    for share in shares[:-1]:
        counts.append(round(share / whole * left))
        left -= counts[-1]
        whole -= share
    return (*counts, left)
