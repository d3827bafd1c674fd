"""A deal: which shard of a model has which KV heads (docs/scale.md).

Every shard has about equally many lanes of each layer, so that none waits for another.
Lanes differ in bytes, so which of them it has is chosen over all layers together:
shards then hold about the same bytes in every bucket. A layer with fewer lanes than
shards has some lanes twice, each time with other query heads.

The problem is that of number partitioning (Karmarkar and Karp 1982), with a vector of
bytes a lane and a count a layer. Lanes are dealt largest first; then two shards
exchange lanes of a layer while that brings their bytes together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise, product

import numpy as np
import numpy.typing as npt

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.heads import Lane
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan, ShardPlan
from kvlathe.plan.plan_data import Fields

Load = npt.NDArray[np.float64]
"""The load of a lane or a shard: its weighted bytes in each bucket, and their sum."""
ENOUGH = 1.002
"""The largest shard beside the mean, from which on nothing more is tried."""
ROUNDS, EXCHANGES = 8, 16
"""Times that all pairs of shards are tried, and exchanges of each time."""
MOST_PAIRED = 600
"""Exchanges among which the best two are looked for."""
LEAST_GAIN = 1e-6
"""The least gain of a swap, as a share of two shards' difference, squared."""
NOTHING = -1


@dataclass(frozen=True, slots=True)
class LaneShard:
    """A shard's part of a lane: its K and V, and the query heads from ``first`` on of
    those that read it."""

    lane: int
    first: int
    queries: int


Shards = tuple[tuple[LaneShard, ...], ...]
"""The lane_shards of each shard, by lane."""


@dataclass(frozen=True)
class Deal:
    """The assignment of a plan's lanes to shards."""

    plan: CompressionPlan
    shards: Shards

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    @cached_property
    def plans(self) -> tuple[ShardPlan, ...]:
        """The plan of what each shard keeps. Pages have the same size everywhere."""
        strides = [layout.filled for layout in self._layouts]
        largest = tuple(map(max, zip(*strides, strict=True)))
        return tuple(dataclasses.replace(own, strides=largest) for own in self._own)

    @cached_property
    def _own(self) -> tuple[ShardPlan, ...]:
        return tuple(_shard_plan(self, shard) for shard in range(self.num_shards))

    @cached_property
    def _layouts(self) -> tuple[CacheLayout, ...]:
        return tuple(CacheLayout(own) for own in self._own)

    def filled(self, tokens: int) -> tuple[int, ...]:
        """Bytes that the lanes of each shard take of a sequence of ``tokens``
        tokens."""
        return tuple(layout.bytes_for(tokens) for layout in self._layouts)

    def taken(self, tokens: int) -> int:
        """Bytes of the pages of such a sequence on every shard: what is filled of them,
        and what the largest shard has more."""
        return CacheLayout(self.plans[0]).bytes_for(tokens)


def deal(plan: CompressionPlan, num_shards: int, by_layer: bool = False) -> Deal:
    """``by_layer``: bring bytes together in each layer by itself, for hosts whose pages
    are of one layer. Raises KvlatheError where some shard would have no query head of a
    layer, and where shards would have to rank tokens together."""
    if num_shards > 1 and plan.index.moves_tokens:
        raise KvlatheError(
            f"the plan cannot be dealt to {num_shards} shards",
            "it moves single tokens, and shards move whole pages",
            "run it on one GPU, or build it with a compression that ranks no tokens",
        )
    if num_shards > 1 and (plan.model.states or not plan.model.alike):
        raise KvlatheError(
            f"the plan cannot be dealt to {num_shards} shards",
            "the model's layers have heads of unlike shapes, share caches or keep states",
            "run it on one device",
        )
    kept = [len(plan.index.active(layer)) for layer in range(plan.model.layers)]
    queries = min(kept) * plan.model.group_size if num_shards > 1 else num_shards
    if queries < num_shards:
        raise KvlatheError(
            f"the plan cannot be dealt to {num_shards} shards",
            f"layer {kept.index(min(kept))} has {queries} query heads that are kept",
            f"give at most {queries} shards",
        )
    layers = [
        _lane_shards_of(plan, layer, num_shards) for layer in range(plan.model.layers)
    ]
    loads = _loads(plan)
    hands: list[list[LaneShard]] = [[] for _ in range(num_shards)]
    for group in [[layer] for layer in layers] if by_layer else [layers]:
        for hand, own in zip(hands, _hands_of(group, loads, num_shards), strict=True):
            hand += own
    return Deal(plan, tuple(tuple(sorted(hand, key=_lane_of)) for hand in hands))


def _hands_of(
    layers: Sequence[Sequence[LaneShard]], loads: Mapping[int, Load], num_shards: int
) -> Iterator[list[LaneShard]]:
    """The hand of each shard in some layers, whose bytes are brought together."""
    table = _Table(loads, num_shards)
    for lane_shards in layers:
        table.add(lane_shards)
    for _ in range(ROUNDS):
        if table.even or not table.improve():
            break
    return table.dealt()


def _lane_of(lane_shard: LaneShard) -> int:
    return lane_shard.lane


def _lane_shards_of(
    plan: CompressionPlan, layer: int, num_shards: int
) -> list[LaneShard]:
    """The pieces of a layer that are dealt: its lanes, or as many parts of them as
    there are shards. Lanes of fewest bytes are the first to be there more often."""
    group = plan.model.group(layer)
    active = plan.index.active(layer)
    lanes = [plan.index.number(layer, lane.head) for lane in active]
    if len(lanes) >= num_shards or not lanes:
        return [LaneShard(lane, 0, group) for lane in lanes]
    by_size = sorted(lanes, key=lambda lane: _kept(plan.lanes[lane]))
    copies, more = divmod(num_shards, len(lanes))
    lane_shards: list[LaneShard] = []
    for place, lane in enumerate(by_size):
        count = copies + (place < more)
        for first, end in pairwise([group * i // count for i in range(count + 1)]):
            lane_shards.append(LaneShard(lane, first, end - first))
    return lane_shards


def _kept(lane: Lane) -> int:
    return lane.numbers


def _loads(plan: CompressionPlan) -> dict[int, Load]:
    """The load of each lane: its bytes in each bucket, by what the bucket's pages weigh
    in short sequences and in the longest; and their sum."""
    layout = CacheLayout(plan)
    buckets = len(plan.index.buckets)
    weights = np.zeros(buckets)
    for tokens in (plan.prefill_chunk, plan.model.max_positions):
        weights += np.array(layout.all_written(tokens)) / layout.bytes_for(tokens)
    loads: dict[int, Load] = {}
    for bucket in range(buckets):
        for lane, size in layout.lane_bytes(bucket).items():
            load = loads.setdefault(lane, np.zeros(buckets + 1))
            load[bucket] = size * weights[bucket]
            load[-1] += load[bucket]
    return loads


@dataclass(frozen=True, slots=True)
class _Swap:
    """An exchange between two shards in a layer: the places of the lane shards that are
    given and taken, and what the first one loses by it."""

    layer: int
    given: int
    taken: int
    moved: Load


class _Table:
    """Shards with what they were dealt. The sum of the squares of their loads falls
    with every exchange; it is least where all are equal."""

    def __init__(self, loads: Mapping[int, Load], num_shards: int) -> None:
        self.loads = loads
        columns = len(next(iter(loads.values())))
        self.sums = np.zeros((num_shards, columns))
        self.layers: list[list[list[LaneShard]]] = []

    def dealt(self) -> Iterator[list[LaneShard]]:
        """The hand of each shard."""
        for shard in range(len(self.sums)):
            yield [lane_shard for hands in self.layers for lane_shard in hands[shard]]

    @property
    def even(self) -> bool:
        """Whether no bucket of any shard is much above the mean."""
        return bool((self.sums.max(0) <= ENOUGH * self.sums.mean(0)).all())

    def add(self, lane_shards: Sequence[LaneShard]) -> None:
        """Deal a layer: the largest first, each to the shard that has least."""
        shards = range(len(self.sums))
        hands: list[list[LaneShard]] = [[] for _ in shards]
        self.layers.append(hands)
        by_size = sorted(
            lane_shards, key=lambda lane_shard: -self.loads[lane_shard.lane][-1]
        )
        for lane_shard in by_size:
            load = self.loads[lane_shard.lane]
            fewest = min(map(len, hands))
            open_shards = [shard for shard in shards if len(hands[shard]) == fewest]
            shard = min(open_shards, key=lambda s: float(self.sums[s] @ load))
            hands[shard].append(lane_shard)
            self.sums[shard] += load

    def improve(self) -> bool:
        """Let every two shards exchange what brings them together; whether any did."""
        changed = False
        for a, b in combinations(range(len(self.sums)), 2):
            for _ in range(EXCHANGES):
                if not self._exchange(a, b):
                    break
                changed = True
        return changed

    def _exchange(self, a: int, b: int) -> bool:
        """Make the best exchange between two shards, or the best two in two layers;
        False where none helps."""
        swaps = list(self._swaps(a, b))
        moved = np.array([swap.moved for swap in swaps]).reshape(len(swaps), -1)
        gap = self.sums[a] - self.sums[b]
        gained, chosen = _best(swaps, moved, (moved * moved).sum(1) - moved @ gap)
        if gained >= -LEAST_GAIN * (gap @ gap):
            return False
        for place in chosen:
            swap = swaps[place]
            _hand(self.layers[swap.layer], a, b, swap)
            self.sums[a] -= swap.moved
            self.sums[b] += swap.moved
        return True

    def _swaps(self, a: int, b: int) -> Iterator[_Swap]:
        """Every exchange within a layer. Who has one more may give it for nothing."""
        nothing = np.zeros_like(self.sums[0])
        for layer, hands in enumerate(self.layers):
            mine = self._offers(hands[a])
            theirs = self._offers(hands[b])
            more = len(mine) - len(theirs)
            if more < 0:
                mine.append((NOTHING, nothing))
            if more > 0:
                theirs.append((NOTHING, nothing))
            for (i, given), (j, taken) in product(mine, theirs):
                yield _Swap(layer, i, j, given - taken)

    def _offers(self, hand: Sequence[LaneShard]) -> list[tuple[int, Load]]:
        """The places of what a shard has, with their loads."""
        return [(i, self.loads[lane_shard.lane]) for i, lane_shard in enumerate(hand)]


def _best(swaps: Sequence[_Swap], moved: Load, costs: Load) -> tuple[float, list[int]]:
    """The cost of the best swap, or of the best two of different layers; and their
    places."""
    place = int(costs.argmin())
    best = (float(costs[place]), [place])
    if len(swaps) > MOST_PAIRED:
        return best
    layers = np.array([swap.layer for swap in swaps])
    crossed = moved @ moved.T
    both = costs[:, None] + costs + 2 * crossed
    alike = layers[:, None] == layers
    both[alike] = np.inf
    place = int(both.argmin())
    cost = float(both.flat[place])
    if cost >= best[0]:
        return best
    return cost, list(divmod(place, len(swaps)))


def _hand(hands: list[list[LaneShard]], a: int, b: int, swap: _Swap) -> None:
    """Exchange what a swap names."""
    given = [] if swap.given == NOTHING else [hands[a].pop(swap.given)]
    taken = [] if swap.taken == NOTHING else [hands[b].pop(swap.taken)]
    hands[a] += taken
    hands[b] += given


def _shard_plan(dealt: Deal, shard: int) -> ShardPlan:
    """The plan of one shard, with pages of its own size."""
    plan, lane_shards = dealt.plan, dealt.shards[shard]
    own = {lane_shard.lane for lane_shard in lane_shards}
    groups = [
        dataclasses.replace(group, lanes=tuple(filter(own.__contains__, group.lanes)))
        for group in plan.groups
    ]
    group = max(lane_shard.queries for lane_shard in lane_shards)
    model = plan.model
    queries = group * model.kv_heads if model.alike else model.query_heads
    fields: Fields = {}
    for field in dataclasses.fields(plan):
        fields[field.name] = getattr(plan, field.name)
    fields["model"] = dataclasses.replace(plan.model, query_heads=queries)
    fields["lanes"] = tuple(_lanes_of(plan, own))
    fields["groups"] = tuple(groups)
    return ShardPlan(**fields, shard=shard, num_shards=dealt.num_shards)


def _lanes_of(plan: CompressionPlan, own: Set[int]) -> Iterator[Lane]:
    """The plan's lanes, of which all but the ``own`` ones are removed."""
    keeper: dict[int, int] = {}
    for place in own:
        lane = plan.lanes[place]
        keeper[lane.layer] = lane.head
    for place, lane in enumerate(plan.lanes):
        if place in own:
            yield lane
            continue
        source = keeper[lane.layer]
        yield dataclasses.replace(lane, rank_k=0, rank_v=0, fill_from=source)
