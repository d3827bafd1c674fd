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

from kvlathe.plan.moves import NOTHING, Drop, Moves, Selection, Shown, Span, Target
from kvlathe.plan.sight import NO_END, SEES_ALL, Sight

Problem = tuple[str, str]
"""A fact and the reason why it cannot be."""


@dataclass(frozen=True, slots=True)
class Paging:
    """The numbers beside its own that a life's counts depend on.

    ``page``: tokens of a page, P. ``cold``: how many cold tiers its group has.
    ``prompt_step``: a prompt's tokens move each time that so many of them are cached, and
    at its end (0: only there). In a decode they may move after each token.
    """

    page: int
    cold: int = 0
    prompt_step: int = 0

    def whole(self, tokens: int) -> int:
        """The part of ``tokens`` tokens that is in full pages."""
        return tokens // self.page * self.page

    def pages(self, tokens: int) -> int:
        """Pages that hold ``tokens`` tokens."""
        return -(-tokens // self.page)


@dataclass(frozen=True, slots=True)
class Life:
    """The questions that every life answers, answered as most do: where there is a cold
    tier, full pages are sealed into it, and the page that is being filled stays hot; then
    those that the life does not keep leave the tier where they are.

    ``by_saliency``: it chooses tokens by saliency, so the plan says what a token is
    ranked by; else pages leave by position, after the sink the oldest first. ``drops``:
    some tokens leave the cache. ``seals``: full pages become cold as they are, so that
    groups of such lives can have one hot page together.
    """

    by_saliency: ClassVar[bool] = False
    drops: ClassVar[bool] = False
    seals: ClassVar[bool] = True

    kind: str = field(default="", init=False)

    # -- the life's own numbers --------------------------------------------------------
    @property
    def stay_hot(self) -> int:
        """The first tokens that stay in the hot tier, whole pages, where full pages of
        the others are sealed. Groups share a hot page only where it is the same."""
        return 0

    @property
    def newest_apart(self) -> int:
        """The newest tokens in full pages that are in the first cold tier, where older
        ones are in the second; 0 where cold tiers do not go by age."""
        return 0

    @property
    def cold_tiers(self) -> range:
        """Numbers of cold tiers that its group may have."""
        return range(2)

    @property
    def sees(self) -> Sight:
        """The part of its tokens that queries see."""
        return SEES_ALL

    @property
    def most(self) -> int:
        """Tokens of full pages that it keeps at most."""
        return self.sees.most

    @property
    def compaction(self) -> float | None:
        """The share of a prefix's KV pairs that stays when the prefix is compacted; None
        where none can be."""
        return None

    def words(self, cold: int = 0) -> str:
        """For people: which tokens are in the cold tier ``cold``, or in the hot one where
        there is no other."""
        return "all"

    def problem(self, page_tokens: int) -> Problem | None:
        """A fault of its numbers, where a page holds ``page_tokens``; None for none."""
        return None

    def ranks_in(self, tier: int) -> bool:
        """Whether tokens are ranked while they are in a tier: 0 is the hot one, then the
        cold ones. Pages have their scores there."""
        return self.by_saliency

    def leaves(self, tier: int) -> bool:
        """Whether pages leave a tier, counted as in ``ranks_in``."""
        return self.drops

    def waits(self, tier: int) -> bool:
        """Whether pages are written to a tier, counted so, before queries see them
        there."""
        return False

    # -- counts ------------------------------------------------------------------------
    def written(self, tokens: int, at: Paging) -> tuple[int, ...]:
        """Tokens in pages of each tier, once ``tokens`` have arrived and moved: those
        that are ``held``, and those of pages that wait."""
        return self.held(tokens, at)

    def kept(self, whole: int) -> int:
        """Tokens that stay of ``whole`` tokens in full pages."""
        return min(whole, self.most)

    def held(self, tokens: int, at: Paging) -> tuple[int, ...]:
        """Tokens in the hot tier and in each cold one, once ``tokens`` have arrived and
        moved."""
        whole = at.whole(tokens)
        kept = self.kept(whole)
        tail = tokens - whole
        return (tail, kept) if at.cold else (kept + tail,)

    def shared(self, tokens: int) -> tuple[int, int]:
        """The numbers (first, newest) of tokens that a sequence holds which ends after
        ``tokens`` tokens, whole pages: what a prefix keeps."""
        kept = self.kept(tokens)
        first = min(kept, self.sees.sink)
        return first, kept - first

    def moves(
        self, buckets: Sequence[int], lengths: Sequence[int], arrived: int, at: Paging
    ) -> Moves:
        """Moves that make ``held(arrived)`` come true. ``buckets``: of the hot tier
        and of each cold one; ``lengths``: tokens in all buckets of the plan, those of this
        step included."""
        bucket = buckets[-1]
        length = lengths[bucket]
        seals = 0
        if at.cold:
            seals = lengths[buckets[0]] // at.page
            length += seals * at.page
        held = self.held(arrived, at)[-1]
        if length <= held:
            return Moves(seals) if seals else NOTHING
        tail = 0 if at.cold else arrived % at.page
        return self._cut(seals, bucket, length, held, tail, at)

    def _cut(
        self, seals: int, bucket: int, length: int, held: int, tail: int, at: Paging
    ) -> Moves:
        """``seals`` pages are sealed, then ``bucket`` goes from ``length`` tokens back to
        ``held``. Its ``tail`` newest tokens are in a page that is being filled."""
        pages = (length - held) // at.page
        return Moves(seals, drops=(Drop(bucket, self.sees.sink // at.page, pages),))

    def worst(self, tokens: int, prompt: int, at: Paging) -> tuple[int, ...]:
        """Pages of each tier that a sequence growing to ``tokens`` tokens, of which up to
        ``prompt`` are its prompt, can need at one time."""
        decode = self._peak(tokens, self._decode_step(at), at)
        return tuple(map(max, decode, self._peak(prompt, at.prompt_step or prompt, at)))

    def _decode_step(self, at: Paging) -> int:
        """Tokens between two moves of a decode."""
        return at.page

    def _peak(self, tokens: int, step: int, at: Paging) -> tuple[int, ...]:
        """Pages of each tier that are needed at one time by up to ``tokens`` tokens that
        move every ``step``; the pages that moves fill are beside those that they
        empty."""
        whole = at.whole(tokens)
        chooses = self.by_saliency and self.kept(whole) < whole
        moved = at.pages(self.most) if chooses else 0  # kept tokens go to new pages
        if at.cold:
            cold = at.pages(min(whole, self.most + step)) + moved
            return at.pages(min(tokens, step)), cold
        # What is chosen of a prompt ends with a page in part.
        part = chooses and step > at.page and tokens > self.most + at.page
        return (at.pages(min(tokens, self.most + step)) + moved + part,)


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
    """Every token stays. The ``first`` tokens stay hot. Of the others in full pages the
    ``young`` newest are in the first cold tier, older ones in the second.

    A page is sealed into both tiers at once, so nothing is coded twice. In the second it
    waits until it leaves the first: each query sees a token once.

    >>> life = Age(first=64, young=256)
    >>> life.held(1000, Paging(page=64, cold=2))
    (104, 256, 640)
    >>> life.written(1000, Paging(page=64, cold=2))
    (104, 256, 896)
    """

    first: int
    young: int
    kind: str = field(default="age", init=False)

    @property
    def stay_hot(self) -> int:
        return self.first

    @property
    def newest_apart(self) -> int:
        return self.young

    @property
    def cold_tiers(self) -> range:
        return range(2, 3)

    def words(self, cold: int = 0) -> str:
        if cold:
            return "older"
        others = f", without the {self.first:,} first" if self.first else ""
        return f"{self.young:,} newest{others}"

    def problem(self, page_tokens: int) -> Problem | None:
        fits = 0 <= self.first < NO_END and 0 < self.young < NO_END
        if not fits or self.first % page_tokens or self.young % page_tokens:
            fact = (
                f"{self.first} first and {self.young} newest tokens have other formats"
            )
            return fact, f"these are whole pages of {page_tokens}"
        return None

    def leaves(self, tier: int) -> bool:
        return tier == 1

    def waits(self, tier: int) -> bool:
        return tier == 2

    def held(self, tokens: int, at: Paging) -> tuple[int, ...]:
        hot, near, every = self.written(tokens, at)
        return hot, near, every - near

    def written(self, tokens: int, at: Paging) -> tuple[int, ...]:
        whole = at.whole(tokens)
        first = min(self.first, whole)
        sealed = whole - first
        return first + tokens - whole, min(sealed, self.young), sealed

    def shared(self, tokens: int) -> tuple[int, int]:
        return 0, min(max(0, tokens - self.first), self.young)

    def moves(
        self, buckets: Sequence[int], lengths: Sequence[int], arrived: int, at: Paging
    ) -> Moves:
        hot, young, old = buckets
        first = self.first // at.page
        seals = lengths[hot] // at.page - first
        if seals <= 0:
            return NOTHING
        _, near, far = self.held(arrived, at)
        passed = (lengths[young] - near) // at.page + seals
        drops = (Drop(young, 0, passed),) if passed else ()
        return Moves(seals, drops=drops, first=first, shown=(Shown(old, far),))

    def _peak(self, tokens: int, step: int, at: Paging) -> tuple[int, ...]:
        whole = at.whole(tokens)
        sealed = whole - min(self.first, whole)
        hot = min(tokens, self.first + step)
        young = min(sealed, self.young + step)
        return at.pages(hot), at.pages(young), at.pages(sealed)


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

    drops: ClassVar[bool] = True

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
    drops: ClassVar[bool] = True

    budget: int
    recent: int = 0
    kind: str = field(default="budget", init=False)

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
