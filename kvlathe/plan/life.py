"""Life: what every life answers (lives.py has them all), and the paging that its counts
depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kvlathe.plan.moves import NOTHING, Drop, Moves
from kvlathe.plan.sight import SEES_ALL, Sight

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
    ranked by; else pages leave by position, after the sink the oldest first. ``seals``:
    full pages become cold as they are, so that groups of such lives can have one hot page
    together.
    """

    by_saliency: ClassVar[bool] = False
    seals: ClassVar[bool] = True

    kind: str = field(default="", init=False)

    # -- the life's own numbers --------------------------------------------------------
    @property
    def drops(self) -> bool:
        """Whether some tokens leave the cache."""
        return False

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
    def first_apart(self) -> int:
        """The first tokens that are never in that second tier."""
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
    def reaches(self) -> Sight:
        """What queries see where tokens move after every page, as a decode's do: what
        masks let through of the pages that are there."""
        return self.sees

    @property
    def most(self) -> int:
        """Tokens of full pages that it keeps at most."""
        return self.reaches.most

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

    def shared(self, tokens: int, tier: int) -> tuple[int, int]:
        """The numbers (first, newest) of tokens that a sequence holds which ends after
        ``tokens`` tokens, whole pages: what a prefix keeps in a tier that pages leave,
        counted as in ``ranks_in``."""
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
