"""Placement: where the tokens are that have reached a fresh bucket, in it or in its
cold buckets.

A placement says once, for its token rules, how many tokens each bucket holds
(``held``), which moves keep that promise (``moves``), and how many pages a sequence can
need at one time (``worst_pages``). The layout, the pool and admission ask it. The
answers follow from the counts of one sequence, so they are the same whatever else is in
the batch.

There are three: a fresh bucket alone, one whose full pages are sealed into cold
buckets, and one whose tokens are divided among cold buckets by saliency.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvlathe.plan.moves import NOTHING, Drop, Moves, Selection, Span, Target
from kvlathe.plan.token_rules import Share, TokenRule, Window, split_tokens


@dataclass(frozen=True, slots=True)
class Placement(ABC):
    """Of ``buckets``: a fresh one, then its cold ones, as numbers of the plan.

    ``rules``: of the cold buckets or, where there are none, of the fresh one.
    ``prompt_step``: a prompt's tokens move each time that so many of them are cached,
    and at its end (0: only there). In a decode they move after each token.
    """

    buckets: tuple[int, ...]
    rules: tuple[TokenRule, ...]
    page_tokens: int
    prompt_step: int

    @property
    @abstractmethod
    def scored(self) -> tuple[bool, ...]:
        """Of each bucket, whether tokens are ranked while they are there."""

    @abstractmethod
    def held(self, tokens: int) -> tuple[int, ...]:
        """Tokens in each bucket once ``tokens`` have arrived and moved."""

    @abstractmethod
    def moves(self, lengths: Sequence[int], arrived: int) -> Moves:
        """What to move so that ``held(arrived)`` comes true. ``lengths`` of all buckets
        of the plan, the tokens of this step included."""

    @abstractmethod
    def _most(self, tokens: int, step: int) -> tuple[int, ...]:
        """Pages of each bucket that are needed at one time by up to ``tokens`` tokens
        that move every ``step``; the pages that moves fill are beside those that they
        empty."""

    def worst_pages(self, tokens: int, prompt: int) -> tuple[int, ...]:
        """Pages of each bucket that a sequence growing to ``tokens`` tokens, of which
        up to ``prompt`` are its prompt, can need at one time."""
        decode = self._most(tokens, self._decode_step)
        begin = self._most(prompt, self.prompt_step or prompt)
        return tuple(map(max, decode, begin))

    @property
    def _decode_step(self) -> int:
        """Tokens between two moves of a decode."""
        return self.page_tokens

    def can_move(self, tokens: int) -> bool:
        """Whether tokens can move when the ``tokens``-th one is cached."""
        if tokens % self.page_tokens == 0:
            return True
        return self.held(tokens)[1:] != self.held(tokens - 1)[1:]

    def _whole(self, tokens: int) -> int:
        """Of ``tokens`` tokens, those in full pages."""
        return tokens // self.page_tokens * self.page_tokens

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def _cut(
        self, seals: int, cuts: Sequence[tuple[int, TokenRule, int, int]], tail: int = 0
    ) -> Moves:
        """``seals`` pages are sealed, then each bucket goes back to what its rule keeps:
        ``cuts`` are (bucket, rule, length, held). The ``tail`` newest tokens stay."""
        selections: list[Selection] = []
        drops: list[Drop] = []
        for bucket, rule, length, held in cuts:
            if length <= held:
                continue
            if isinstance(rule, Window):
                first, gone = (
                    n // self.page_tokens for n in (rule.sink, length - held)
                )
                drops.append(Drop(bucket, first, gone))
            else:
                target = Target(bucket, ((0, held),))
                selections.append(
                    Selection(bucket, length, rule.newest + tail, (target,))
                )
        if not (seals or selections or drops):
            return NOTHING
        return Moves(seals, tuple(selections), tuple(drops))


class OneBucket(Placement):
    """A fresh bucket that is never sealed: its rule cuts its own full pages."""

    @property
    def scored(self) -> tuple[bool, ...]:
        return (self.rules[0].by_saliency,)

    def held(self, tokens: int) -> tuple[int, ...]:
        whole = self._whole(tokens)
        return (self.rules[0].kept(whole) + tokens - whole,)

    def moves(self, lengths: Sequence[int], arrived: int) -> Moves:
        bucket = self.buckets[0]
        rule = self.rules[0]
        length = lengths[bucket]
        (held,) = self.held(arrived)
        cut = (bucket, rule, length, held)
        tail = arrived % self.page_tokens
        return self._cut(0, [cut], tail)

    def _most(self, tokens: int, step: int) -> tuple[int, ...]:
        rule = self.rules[0]
        whole = self._whole(tokens)
        most = rule.most
        count = min(tokens, most + step)
        pages = self._pages(count)
        loses = rule.kept(whole) < whole
        if rule.by_saliency and loses:
            # The kept ones go to new pages; a prompt ends with a page in part.
            page = self.page_tokens
            tail = step > page and tokens > most + page
            pages += self._pages(most) + tail
        return (pages,)


class Sealed(Placement):
    """Full pages are quantized into every cold bucket, whose rule then cuts them; the
    page that is being filled is hot."""

    @property
    def scored(self) -> tuple[bool, ...]:
        cold = [rule.by_saliency for rule in self.rules]
        return (any(cold), *cold)

    def held(self, tokens: int) -> tuple[int, ...]:
        whole = self._whole(tokens)
        return (tokens - whole, *(rule.kept(whole) for rule in self.rules))

    def moves(self, lengths: Sequence[int], arrived: int) -> Moves:
        fresh, *cold = self.buckets
        seals = lengths[fresh] // self.page_tokens
        _, *held = self.held(arrived)
        cuts: list[tuple[int, TokenRule, int, int]] = []
        for bucket, rule, kept in zip(cold, self.rules, held, strict=True):
            length = lengths[bucket] + seals * self.page_tokens
            cuts.append((bucket, rule, length, kept))
        return self._cut(seals, cuts)

    def _most(self, tokens: int, step: int) -> tuple[int, ...]:
        whole = self._whole(tokens)
        pages = [self._pages(min(tokens, step))]
        for rule in self.rules:
            count = self._pages(min(whole, rule.most + step))
            if rule.by_saliency and rule.kept(whole) < whole:
                count += self._pages(rule.most)
            pages.append(count)
        return tuple(pages)


class Divided(Placement):
    """Cold buckets share the tokens by saliency; what fills no page of theirs waits in
    the fresh bucket."""

    @property
    def scored(self) -> tuple[bool, ...]:
        return (True, *(False for _ in self.rules))

    def shares(self, tokens: int) -> tuple[int, ...]:
        """How many of ``tokens`` tokens each cold bucket is to have."""
        shares = [rule.share for rule in self.rules if isinstance(rule, Share)]
        return split_tokens(shares, tokens)

    def held(self, tokens: int) -> tuple[int, ...]:
        cold = [self._whole(count) for count in self.shares(tokens)]
        return (tokens - sum(cold), *cold)

    def moves(self, lengths: Sequence[int], arrived: int) -> Moves:
        """The most salient tokens go to the first cold bucket, the least salient to the
        last. Each gets from its end of the ranks what fills its pages."""
        fresh, *cold = self.buckets
        _, *held = self.held(arrived)
        wanted = [
            share - lengths[c]
            for c, share in zip(cold, self.shares(arrived), strict=True)
        ]
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
            targets.append(Target(fresh, rest))
        return Moves(0, (Selection(fresh, lengths[fresh], 0, tuple(targets)),))

    @property
    def _decode_step(self) -> int:
        return 1

    def _most(self, tokens: int, step: int) -> tuple[int, ...]:
        waiting = len(self.rules) * (self.page_tokens - 1)
        length = min(tokens, step + waiting)
        # Where tokens move, a page of them does; the others go to new pages.
        rest = min(max(0, length - self.page_tokens), waiting)
        _, *held = self.held(tokens)
        cold = [self._pages(count) for count in held]
        return (self._pages(length) + self._pages(rest), *cold)


def placement(
    buckets: tuple[int, ...],
    rules: tuple[TokenRule, ...],
    page_tokens: int,
    prompt_step: int,
) -> Placement:
    """The placement of a fresh bucket and its cold ones (Placement has the fields)."""
    if len(buckets) == 1:
        kind = OneBucket
    elif rules[0].divides:
        kind = Divided
    else:
        kind = Sealed
    return kind(buckets, rules, page_tokens, prompt_step)
