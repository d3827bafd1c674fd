"""PlanIndex: what follows from a plan, derived once and asked by everybody.

Groups say how lanes live. Pages are by *bucket*: the lanes whose tokens lie in the same
pages, so one list of pages and one length a sequence. Each group has a cold bucket for
every cold tier. Its hot bucket is its own, but for groups whose full pages are sealed: of
those only the page that is being filled is hot, and the first ones where they stay so. All
of them with one hot tier and as many first tokens, in one stage, share one.

    groups    even lanes: hot 16 bit, cold 4 bit, seal      odd lanes: hot 16 bit, cold 2 bit, window
    buckets   0: every lane, 16 bit                         1: even lanes, 4 bit      2: odd lanes, 2 bit

A *route* is a hot bucket and the cold ones that its tokens go on to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.plan.lives import KEEP, Life, Paging
from kvlathe.plan.moves import Moves
from kvlathe.plan.plan_data import PlanData
from kvlathe.plan.sight import SEES_ALL, Sight
from kvlathe.plan.stages import Pass, layers_of, passes
from kvlathe.plan.token_score import ObservationWindow


@dataclass(frozen=True, slots=True)
class Bucket:
    """Lanes (indices, ascending) whose tokens lie in the same pages, and the ``tier`` of
    those. ``number``: its place among all; ``place``: among those of its group, the hot
    one first.

    ``hot``: the bucket where these lanes' new tokens arrive, maybe this one. ``cold``: of
    a hot one, the buckets that its tokens go on to; empty where they stay. ``lives``: of
    the groups that it is of; one, but for hot pages that are sealed. ``scored``: whether
    its pages keep what tokens are ranked by here: observed attention, which is nowhere
    else. ``leaves``: whether pages leave it. ``waits``: whether pages are written here
    before queries see them; those are the last ones, behind its length.
    """

    number: int
    place: int
    lanes: tuple[int, ...]
    tier: Tier
    stage: int
    hot: int
    cold: tuple[int, ...]
    lives: tuple[Life, ...]
    scored: bool
    leaves: bool
    waits: bool
    words: str

    @property
    def is_hot(self) -> bool:
        """Whether new tokens arrive here."""
        return self.hot == self.number

    @property
    def stays(self) -> bool:
        """Whether no tokens go on from here."""
        return not self.cold

    @property
    def life(self) -> Life:
        """The life of the tokens that stay here."""
        return self.lives[0]


@dataclass(frozen=True, slots=True)
class Lived:
    """A group's life and its buckets, the hot one first; ``at``: what its counts depend
    on."""

    life: Life
    buckets: tuple[int, ...]
    at: Paging


@dataclass(frozen=True, slots=True)
class Route:
    """A hot bucket and the cold ones that its tokens go on to: the lives of ``groups``,
    taken together. Those that share a hot bucket seal its pages at the same time.
    ``buckets``: the hot one first."""

    groups: tuple[Lived, ...]
    buckets: tuple[int, ...]

    @classmethod
    def of(cls, groups: Sequence[Lived]) -> Route:
        """The route of groups that have one hot bucket."""
        cold = [bucket for group in groups for bucket in group.buckets[1:]]
        return cls(tuple(groups), (groups[0].buckets[0], *cold))

    @property
    def page_tokens(self) -> int:
        return self.groups[0].at.page

    @property
    def prompt_step(self) -> int:
        return self.groups[0].at.prompt_step

    @property
    def unsealed(self) -> int | None:
        """Pages at the front of the hot bucket that are never sealed; None where no page
        is."""
        if len(self.buckets) == 1:
            return None
        return self.stay_hot // self.page_tokens

    @property
    def stay_hot(self) -> int:
        """The first tokens that stay in the hot bucket."""
        return self.groups[0].life.stay_hot

    def held(self, tokens: int) -> tuple[int, ...]:
        """Tokens in each of ``buckets`` once ``tokens`` have arrived and moved."""
        return _joined([group.life.held(tokens, group.at) for group in self.groups])

    def written(self, tokens: int) -> tuple[int, ...]:
        """Tokens in pages of each of ``buckets`` then, those of pages that wait too."""
        return _joined([group.life.written(tokens, group.at) for group in self.groups])

    def moves(self, lengths: Sequence[int], arrived: int) -> Moves:
        """Moves that make ``held(arrived)`` come true. ``lengths`` of all buckets
        of the plan, the tokens of this step included."""
        of_groups = [
            group.life.moves(group.buckets, lengths, arrived, group.at)
            for group in self.groups
        ]
        if len(of_groups) == 1:
            return of_groups[0]
        return Moves(
            of_groups[0].seals,
            tuple(one for own in of_groups for one in own.selections),
            tuple(one for own in of_groups for one in own.drops),
            of_groups[0].first,
            tuple(one for own in of_groups for one in own.shown),
        )

    def worst_pages(self, tokens: int, prompt: int) -> tuple[int, ...]:
        """Pages of each of ``buckets`` that a sequence growing to ``tokens`` tokens, of
        which up to ``prompt`` are its prompt, can need at one time."""
        counts = [group.life.worst(tokens, prompt, group.at) for group in self.groups]
        hot = max(count[0] for count in counts)
        return (hot, *(count for _, *cold in counts for count in cold))

    def can_move(self, tokens: int) -> bool:
        """Whether tokens can move when the ``tokens``-th one is cached."""
        if tokens % self.page_tokens == 0:
            return True
        hot, *cold = self.held(tokens - 1)
        return self.held(tokens) != (hot + 1, *cold)


def _joined(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The counts of a route, from those of its groups: these have one hot bucket."""
    return (counts[0][0], *(count for _, *cold in counts for count in cold))


@dataclass(frozen=True, slots=True)
class KernelPart:
    """A bucket in which lanes see alike, as kernels take it (kvlathe_part of abi.h): rows
    of a step have one page table and one length a part. Lanes that see less than all are
    alike where they also live alike.

    New tokens of its lanes go to bucket ``fresh``, their full pages to bucket ``sealed``
    (-1: they stay).
    """

    bucket: int
    lanes: tuple[int, ...]
    life: Life
    fresh: int
    sealed: int

    @property
    def sight(self) -> Sight:
        return self.life.sees

    @property
    def sees_less(self) -> bool:
        """Whether its lanes see less than all that came before."""
        return self.sight.is_less


class PlanIndex:
    """All that follows from one plan, which has it as ``index``."""

    def __init__(self, plan: PlanData) -> None:
        self.plan = plan

    # -- buckets -----------------------------------------------------------------------
    @cached_property
    def _numbers(self) -> list[tuple[int, ...]]:
        """The buckets of each group, the hot one first. They are counted group by
        group."""
        hot_of: dict[object, int] = {}
        numbers: list[tuple[int, ...]] = []
        count = 0
        for place, group in enumerate(self.plan.groups):
            shared = (_stage_of(self.plan, group), group.hot, group.life.stay_hot)
            key = shared if group.seals else place
            if key not in hot_of:
                hot_of[key] = count
                count += 1
            numbers.append((hot_of[key], *range(count, count + len(group.cold))))
            count += len(group.cold)
        return numbers

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Every one, by its number."""
        members: dict[int, list[tuple[Group, int]]] = {}
        hot_of: dict[int, int] = {}
        for group, numbers in zip(self.plan.groups, self._numbers, strict=True):
            for place, number in enumerate(numbers):
                members.setdefault(number, []).append((group, place))
                hot_of[number] = numbers[0]
        return tuple(
            self._bucket(number, hot_of, members[number]) for number in sorted(members)
        )

    def _bucket(
        self, number: int, hot_of: dict[int, int], members: list[tuple[Group, int]]
    ) -> Bucket:
        """``members``: its groups, and the place of its tier there. ``hot_of``: the hot
        bucket of every bucket."""
        cold = [b for b, hot in hot_of.items() if hot == number != b]
        lanes = [lane for group, _ in members for lane in group.lanes]
        first, place = members[0]
        return Bucket(
            number=number,
            place=place,
            lanes=tuple(sorted(lanes)),
            tier=first.tiers[place],
            stage=_stage_of(self.plan, first),
            hot=hot_of[number],
            cold=tuple(sorted(cold)),
            lives=tuple(dict.fromkeys(group.life for group, _ in members)),
            scored=self.observation is not None
            and any(group.life.ranks_in(place) for group, place in members),
            leaves=first.life.leaves(place) and not cold,
            waits=first.life.waits(place),
            words=_hot_words(first.life) if cold else first.life.words(place - 1),
        )

    # -- lanes -------------------------------------------------------------------------
    def lane(self, layer: int, head: int) -> Lane:
        return self.plan.lanes[self.number(layer, head)]

    def number(self, layer: int, head: int) -> int:
        """The index of a lane."""
        return self._firsts[layer] + head

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        """The index of each layer's first lane, and the count of all."""
        model = self.plan.model
        return tuple(map(model.lanes_before, range(model.layers + 1)))

    def active(self, layer: int) -> tuple[Lane, ...]:
        """The lanes of a layer that Attend sees, in head order."""
        first, end = self._firsts[layer : layer + 2]
        of_layer = self.plan.lanes[first:end]
        return tuple(lane for lane in of_layer if not lane.removed)

    def kept_before(self, layer: int) -> int:
        """Lanes that are not removed in the layers before: the place of a layer's first
        one among them all."""
        return sum(
            not lane.removed for lane in self.plan.lanes[: self.number(layer, 0)]
        )

    @cached_property
    def groups(self) -> dict[int, Group]:
        """The group of each lane that is not removed."""
        return {lane: group for group in self.plan.groups for lane in group.lanes}

    @cached_property
    def hot_bucket(self) -> dict[int, int]:
        """The bucket where the new tokens of each lane arrive."""
        return {
            lane: bucket.number
            for bucket in self.buckets
            if bucket.is_hot
            for lane in bucket.lanes
        }

    def sight(self, lane: int) -> Sight:
        """The part of a lane's tokens that queries see."""
        group = self.groups.get(lane)
        return group.life.sees if group else SEES_ALL

    @property
    def projected(self) -> bool:
        return any(lane.projected for lane in self.plan.lanes)

    @property
    def values_in_keys(self) -> bool:
        """Whether V is a part of K everywhere, and no page holds it apart."""
        kept = [lane for lane in self.plan.lanes if not lane.removed]
        return all(lane.values_in_keys for lane in kept)

    @property
    def some_in_keys(self) -> bool:
        """Whether V is a part of K in some layers alone."""
        some = any(lane.values_in_keys for lane in self.plan.lanes)
        return some and not self.values_in_keys

    @property
    def kept_dims(self) -> float:
        """Fraction of the head dimensions kept, K and V together (1 - p in the
        papers)."""
        kept = sum(lane.numbers for lane in self.plan.lanes)
        return kept / self.plan.model.numbers

    # -- tiers -------------------------------------------------------------------------
    @cached_property
    def tiers(self) -> tuple[Tier, ...]:
        """Every one once, in the order of the buckets."""
        return tuple(dict.fromkeys(bucket.tier for bucket in self.buckets))

    @cached_property
    def unit(self) -> int:
        """Elements a gather moves at once, 16 to 64: divides every rank, and 128 bytes
        in the widest format (K and V are aligned to those)."""
        return math.gcd(
            128 * 8 // max(tier.widest for tier in self.tiers),
            *(rank for lane in self.plan.lanes for rank in (lane.rank_k, lane.rank_v)),
        )

    @property
    def hot_tier(self) -> Tier:
        """In whose format new tokens are written: the same in all groups."""
        return self.plan.groups[0].hot

    @property
    def hot_bits(self) -> int:
        """Bits of the one format in which new K is written; V's are as many in every
        plan that runs."""
        return self.hot_tier.k.bits

    # -- what lives ask for ------------------------------------------------------------
    @cached_property
    def lives(self) -> tuple[Life, ...]:
        """Every one once."""
        return tuple(dict.fromkeys(group.life for group in self.plan.groups))

    @property
    def sees_less(self) -> bool:
        """Whether some lane sees less than all the tokens before it."""
        return any(life.sees.is_less for life in self.lives)

    @property
    def drops(self) -> bool:
        """Whether some pages leave their bucket: a token costs less, the longer its
        sequence is."""
        return any(bucket.leaves for bucket in self.buckets)

    @property
    def seals(self) -> bool:
        """Whether some tokens go on to cold pages."""
        return any(group.cold for group in self.plan.groups)

    @property
    def ranked(self) -> bool:
        """Whether tokens are ranked: a score decides which are kept, or how."""
        return self.plan.score is not None

    @property
    def observation(self) -> ObservationWindow | None:
        """The score, where tokens are ranked by the attention that observed rows give."""
        score = self.plan.score
        return score if isinstance(score, ObservationWindow) else None

    @property
    def compaction(self) -> float | None:
        """The share of the KV pairs that compacted prefixes keep; None where none are."""
        shares = [life.compaction for life in self.lives if life.compaction is not None]
        return shares[0] if shares else None

    @property
    def moves_tokens(self) -> bool:
        """Whether single tokens move, not pages alone: ranked ones, or those that stay of
        a compacted prefix."""
        return self.ranked or self.compaction is not None

    @property
    def observes(self) -> bool:
        """Whether Attend reports what observed rows attend: to rank tokens, or to
        compact prefixes."""
        return self.observation is not None or self.compaction is not None

    @property
    def keeps_positions(self) -> bool:
        """Whether scores stand beside their token's position: what counts rows or draws
        lots needs it."""
        drawn = any(tier.rounding == "stochastic" for tier in self.tiers)
        observation = self.observation
        return observation is not None and (
            observation.normalized or observation.noise > 0 or drawn
        )

    @property
    def prompt_step(self) -> int:
        """A prompt's tokens move each time that so many of them are cached, and at its
        end (0: only there)."""
        score = self.plan.score
        return self.plan.prefill_chunk if score is None else score.slice_tokens

    @property
    def cuts_prompts(self) -> bool:
        """Whether answers depend on where a prompt is cut: pages seal there, tokens
        move, or pages that no query sees any more are freed."""
        return self.ranked or any(life != KEEP for life in self.lives)

    @property
    def sharable(self) -> bool:
        """Whether sequences that begin alike have the same pages: for prefix sharing
        and forks."""
        return not self.ranked

    @property
    def recomputable(self) -> bool:
        """Whether a cache that was given up comes back the same, in the same pages, by a
        prefill of all tokens; else preempt by swap."""
        return not (self.ranked or self.seals or self.drops)

    # -- stages ------------------------------------------------------------------------
    @property
    def graphs(self) -> int:
        """Graphs that a token passes."""
        return max(1, len(self.plan.stages))

    def layers_of(self, stage: int) -> range:
        return layers_of(self.plan.stages, self.plan.model.layers, stage)

    def buckets_of(self, stage: int) -> tuple[int, ...]:
        """The buckets whose lanes are in the layers of a stage."""
        return tuple(b.number for b in self.buckets if b.stage == stage)

    def passes(self, tokens: int) -> tuple[Pass, ...]:
        """The passes of a prompt of ``tokens`` tokens through the stages."""
        return passes(self.plan.stages, tokens)

    # -- routes ------------------------------------------------------------------------
    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """In the order of their hot buckets."""
        of_hot: dict[int, list[Lived]] = {}
        for group, buckets in zip(self.plan.groups, self._numbers, strict=True):
            at = Paging(self.plan.page_tokens, len(group.cold), self.prompt_step)
            of_hot.setdefault(buckets[0], []).append(Lived(group.life, buckets, at))
        return tuple(Route.of(of_hot[hot]) for hot in sorted(of_hot))

    @cached_property
    def _route_of(self) -> dict[int, Route]:
        return {bucket: route for route in self.routes for bucket in route.buckets}

    def route(self, bucket: int) -> Route:
        """The one that bucket number ``bucket`` is on."""
        return self._route_of[bucket]

    # -- what kernels take -------------------------------------------------------------
    @cached_property
    def parts(self) -> tuple[KernelPart, ...]:
        """Bucket after bucket. One without lanes, as a rank may have, is a part as well:
        page tables and lengths are by bucket."""
        sealed: dict[int, int] = {}
        for bucket in self.buckets:
            if not bucket.is_hot:
                sealed |= dict.fromkeys(bucket.lanes, bucket.number)
        parts: list[KernelPart] = []
        for bucket in self.buckets:
            alike: dict[Life, list[int]] = {}
            for lane in bucket.lanes:
                life = self.groups[lane].life
                alike.setdefault(life if life.sees.is_less else KEEP, []).append(lane)
            if not alike:
                alike[KEEP] = []
            for life, lanes in alike.items():
                cold = bucket.number
                if bucket.is_hot:
                    cold = max((sealed.get(lane, -1) for lane in lanes), default=-1)
                part = KernelPart(bucket.number, tuple(lanes), life, bucket.hot, cold)
                parts.append(part)
        return tuple(parts)

    @cached_property
    def most_slots(self) -> int:
        """Buckets that hold one lane, at most."""
        return max(len(group.tiers) for group in self.plan.groups if group.lanes)

    @cached_property
    def most_in_a_layer(self) -> int:
        """Buckets that hold lanes of one layer, at most."""
        buckets: dict[int, set[int]] = {}
        for bucket in self.buckets:
            for lane in bucket.lanes:
                layer = self.plan.lanes[lane].layer
                buckets.setdefault(layer, set()).add(bucket.number)
        return max(len(of_layer) for of_layer in buckets.values())


def _stage_of(plan: PlanData, group: Group) -> int:
    """The stage of a group's lanes. A group may be without lanes only where there are
    no stages."""
    if not plan.stages:
        return 0
    layer = plan.lanes[group.lanes[0]].layer
    return sum(stage.first_layer <= layer for stage in plan.stages) - 1


def _hot_words(life: Life) -> str:
    """The tokens of a hot bucket that go on to cold ones, for people."""
    words = "until they are sealed"
    return f"{life.stay_hot:,} first, others {words}" if life.stay_hot else words
