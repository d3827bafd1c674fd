"""CompressionPlan: what every head keeps, in which number format, in which token lists. Data only.

Methods write a plan; fold, layout, graph, engines and runtime read it, and none of them knows which method wrote it.
This module imports the standard library alone, so that every part may read a plan.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvlathe.errors import KvlatheError

SCHEMA_VERSION = 1
RANK_MULTIPLE = 16
"""Ranks are multiples of this: one 16-wide matrix-unit step, one 32-byte sector in 16 bit."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One (layer, KV head): how its Q and K are projected and how many dimensions of K and V are cached.

    ``input_dim`` is the width of this lane's rows of q (each query head) and of k as they reach Attend, before RoPE.
    ``rope`` says what Attend does to them: rotate every plane (``full``), rotate the planes listed in ``planes`` (the
    input holds only those, first halves then second halves), or nothing (``none``).
    ``projected``: Q and K then pass their matrices A and B [input_dim, rank_k] inside Attend. A lane that is not
    projected has ``rank_k`` = input_dim rounded up to 16 (the padding is cached as zeros and counted).
    ``fill_from``: a removed lane (ranks 0) whose output is the output of that KV head of the same layer; fold adds its
    W_O to that head's, so a removed lane costs nothing at run time and does not appear in Attend.
    """

    layer: int
    head: int
    input_dim: int
    rank_k: int
    rank_v: int
    rope: Literal["full", "none", "planes"] = "full"
    planes: tuple[int, ...] = ()
    projected: bool = False
    fill_from: int | None = None
    shard: int = 0

    @property
    def removed(self) -> bool:
        return self.rank_k == 0


@dataclass(frozen=True, slots=True)
class Tier:
    """A number format of cached tokens.

    ``axis_*``: along which axis a quantization group of ``group_*`` elements runs: ``rank`` (within one token) or
    ``token`` (one channel over the page's tokens). Ignored at 16 and 32 bit, which are IEEE half and single.
    ``arithmetic`` = int: QK^T and PV are taken on the codes, nothing is dequantized; K's groups then run
    along the rank, which the product sums over; V's along the tokens or, where tokens may be dropped, the rank too
    (their scales go into the shares: export/integer.py).
    ``rounding``: codes to the nearest, or ``stochastic``, up or down by a hash of the plan's seed, the lane, the
    token's position and the channel (runtime/codec.py): without bias, and the same however often it is done.
    ``span_*``: the middle part of a group's range that its codes cover; what lies outside is cut to it. Below 1 coarse
    codes err less: a group's ends are rare (docs/auto.md).
    ``sums``: the sum of each group's codes is stored beside its metadata, so that integer products need no symmetry of
    the other side (export/integer.py).
    """

    bits_k: Literal[32, 16, 8, 4, 2]
    bits_v: Literal[32, 16, 8, 4, 2]
    axis_k: Literal["rank", "token"] = "rank"
    axis_v: Literal["rank", "token"] = "token"
    group_k: int = 64
    group_v: int = 64
    arithmetic: Literal["float", "int"] = "float"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    sums: bool = False
    span_k: float = 1.0
    span_v: float = 1.0

    @property
    def quantized(self) -> bool:
        return self.bits_k < 16 or self.bits_v < 16


@dataclass(frozen=True, slots=True)
class TokenRule:
    """Which of the n tokens that reached a bucket it keeps, once their prompt has ended. With P tokens a page:

    ``all`` of them. A ``share``, for cold buckets that divide the tokens of their source by saliency, the first of them
    taking the most salient: ``split_tokens`` says how many of n are whose; a bucket has those sealed that fill pages,
    the others wait in the source, in its format, and are ranked again with the next ones. Or a ``budget`` (a multiple
    of P): the most salient of the n tokens but the newest n mod P, which are kept beside them (by the source, if there
    is one). ``recent``, of a budget: this many of its tokens are the newest ones, whatever their saliency.
    """

    kind: Literal["all", "share", "budget"] = "all"
    share: float = 1.0
    budget: int = 0
    recent: int = 0


@dataclass(frozen=True, slots=True)
class Probe:
    """Which query rows are observed, and how their attention probabilities become the saliency of a cached token.

    Windows are the prompt, then every P later positions, from multiples of P on. Of each window these rows are
    observed: its last ones, as many as the larger of ``last`` and the share ``recent`` of the window; the share
    ``random`` of the window drawn from the others, by a hash of the plan's seed and the position; and the tokens whose
    ids are ``special``.

    The saliency of a token in a lane is the sum over the observed rows, and over the lane's query heads, of the
    probability that they give it. ``normalized``: divided by the number of observed rows at or after it; a token that
    none has observed then ranks first. Rows count from the token's arrival on or, where it is not ``accumulated``, from
    the last ranking on. ``pooling`` (odd): then the largest among so many neighbouring kept tokens. ``noise``: then its
    logarithm plus this many times a Gumbel variate (a hash of the plan's seed, the lane and the position).
    """

    recent: float = 0.0
    random: float = 0.0
    last: int = 0
    special: tuple[int, ...] = ()
    normalized: bool = False
    accumulated: bool = True
    pooling: int = 1
    noise: float = 0.0


@dataclass(frozen=True, slots=True)
class Bucket:
    """Lanes (indices into ``CompressionPlan.lanes``) that keep equally many tokens in one tier: one table, one length.

    ``source`` is None for a *fresh* bucket, where new tokens are appended; every lane that is not removed is in exactly
    one of those. Otherwise it is the index of the fresh bucket whose full pages are sealed into this one. A fresh
    bucket that no other names as its source is never sealed: its tier is append-able and its pages stay.
    """

    tier: int
    lanes: tuple[int, ...]
    source: int | None = None
    tokens: TokenRule = TokenRule()


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers that compute the same tokens of a prompt, and are one graph: from ``first_layer`` to the layer
    before the next stage's. At most ``tokens`` tokens of a prompt enter it: its last rows that the probe observes, and
    of the others those of most saliency in the layer before, summed over its lanes. The rest leave for all later
    layers. The first stage has them all, and its ``tokens`` is 0.
    """

    first_layer: int
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The attention shape a plan was made for. ``max_positions`` in tokens."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_positions: int

    @property
    def group_size(self) -> int:
        """Query heads for each KV head."""
        return self.query_heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Pass:
    """Stages ``first`` .. ``end`` - 1, which all compute the same ``tokens`` tokens of a prompt."""

    first: int
    end: int
    tokens: int


@dataclass(frozen=True, slots=True)
class CompressionPlan:
    """Everything downstream needs to know. ``lanes`` are sorted by (layer, head), one for each KV head of the model.

    ``compression`` and ``notes`` are for people and reports only: no code branches on them.
    ``page_tokens`` P and ``prefill_chunk`` (a multiple of P) fix when pages seal. ``probe``: what ranks the tokens,
    where a token rule chooses among them; a prompt then stays in the fresh buckets until it ends and is ranked once.
    ``stages``: the groups of layers that a prompt passes one after the other, losing tokens in between; empty: one
    graph. A bucket's lanes are of one stage, so that it has one length.
    """

    model: ModelShape
    lanes: tuple[Lane, ...]
    tiers: tuple[Tier, ...]
    buckets: tuple[Bucket, ...]
    page_tokens: int = 64
    prefill_chunk: int = 512
    seed: int = 0
    probe: Probe | None = None
    stages: tuple[Stage, ...] = ()
    compression: str = "none"
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        check(self)

    # -- views ---------------------------------------------------------------------------------------------------
    def lane(self, layer: int, head: int) -> Lane:
        return self.lanes[layer * self.model.kv_heads + head]

    def active(self, layer: int) -> tuple[Lane, ...]:
        """The lanes of a layer that Attend sees, in head order."""
        h = self.model.kv_heads
        return tuple(lane for lane in self.lanes[layer * h : (layer + 1) * h] if not lane.removed)

    def kept_before(self, layer: int) -> int:
        """Lanes that are not removed in the layers before: the place of a layer's first one among them all."""
        return sum(not lane.removed for lane in self.lanes[: layer * self.model.kv_heads])

    @property
    def unit(self) -> int:
        """Elements a gather moves at once, 16 to 64: divides every rank, and 128 bytes in the widest format (slabs
        are aligned to those)."""
        widest = max(max(tier.bits_k, tier.bits_v) for tier in self.tiers)
        return math.gcd(128 * 8 // widest, *(rank for lane in self.lanes for rank in (lane.rank_k, lane.rank_v)))

    @property
    def projected(self) -> bool:
        return any(lane.projected for lane in self.lanes)

    def cold(self, fresh: int) -> tuple[int, ...]:
        """Indices of the buckets that pages of fresh bucket ``fresh`` are sealed into; empty if it is never sealed."""
        return tuple(i for i, bucket in enumerate(self.buckets) if bucket.source == fresh)

    @property
    def keeps_positions(self) -> bool:
        """Whether scores stand beside their token's position: what counts rows or draws lots needs it."""
        drawn = any(tier.rounding == "stochastic" for tier in self.tiers)
        return self.probe is not None and (self.probe.normalized or self.probe.noise > 0 or drawn)

    def scored(self, bucket: int) -> bool:
        """Whether the tokens of a bucket are ranked while they are there, so that it keeps their scores."""
        ruled = (bucket, *self.cold(bucket))
        return any(self.buckets[b].tokens.kind != "all" for b in ruled) and not self._settled(bucket)

    def _settled(self, bucket: int) -> bool:
        """Tokens that a share sealed are not ranked again."""
        return self.buckets[bucket].source is not None and self.buckets[bucket].tokens.kind == "share"

    @property
    def ranked(self) -> bool:
        """Whether later queries decide which tokens are kept, or how."""
        return self.probe is not None

    @property
    def sharable(self) -> bool:
        """Whether sequences that begin alike have the same pages: for prefix sharing and forks."""
        return not self.ranked

    @property
    def recomputable(self) -> bool:
        """Whether a cache that was given up comes back the same by a prefill of all tokens; else preempt by swap."""
        return not self.ranked and all(bucket.source is None for bucket in self.buckets)

    # -- stages --------------------------------------------------------------------------------------------------
    @property
    def graphs(self) -> int:
        """Graphs that a token passes."""
        return max(1, len(self.stages))

    def layers_of(self, stage: int) -> range:
        ends = [*(s.first_layer for s in self.stages[1:]), self.model.layers]
        return range(self.stages[stage].first_layer if self.stages else 0, ends[stage])

    def buckets_of(self, stage: int) -> tuple[int, ...]:
        """The buckets whose lanes are in the layers of a stage."""
        layers = self.layers_of(stage)
        return tuple(i for i, bucket in enumerate(self.buckets) if self.lanes[bucket.lanes[0]].layer in layers)

    def part(self, stage: int) -> CompressionPlan:
        """The plan of one stage alone: its layers, lanes and buckets, counted from 0. Pages are laid out as in the
        whole plan, so its graph reads and fills the same ones."""
        if not self.stages:
            return self
        layers, buckets = self.layers_of(stage), self.buckets_of(stage)
        heads, first = self.model.kv_heads, layers[0]
        own = self.lanes[first * heads : (layers[-1] + 1) * heads]
        return dataclasses.replace(
            self,
            model=dataclasses.replace(self.model, layers=len(layers)),
            lanes=tuple(dataclasses.replace(lane, layer=lane.layer - first) for lane in own),
            buckets=tuple(_moved(self.buckets[b], first * heads, buckets) for b in buckets),
            stages=(Stage(0),),
        )

    def passes(self, tokens: int) -> tuple[Pass, ...]:
        """How a prompt of ``tokens`` tokens goes through the stages; those between which it loses none are one."""
        found = [Pass(0, 1, tokens)]
        for i, stage in enumerate(self.stages[1:], 1):
            last = found[-1]
            if last.tokens <= stage.tokens:
                found[-1] = Pass(last.first, i + 1, last.tokens)
            else:
                found.append(Pass(i, i + 1, stage.tokens))
        return tuple(found)

    @property
    def kept_dims(self) -> float:
        """Fraction of the head dimensions kept, K and V together (1 - p in the papers)."""
        kept = sum(lane.rank_k + lane.rank_v for lane in self.lanes)
        return kept / (2 * self.model.head_dim * len(self.lanes))

    # -- file form -----------------------------------------------------------------------------------------------
    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> CompressionPlan:
        """Raises KvlatheError for another schema version or a malformed plan."""
        try:
            raw = json.loads(text)
            version = raw.get("schema_version")
            if version != SCHEMA_VERSION:
                raise KvlatheError(
                    f"the plan has schema version {version}",
                    f"this kvlathe reads version {SCHEMA_VERSION}",
                    "build the engine again",
                )
            return cls(
                **{
                    **raw,
                    "model": ModelShape(**raw["model"]),
                    "probe": None if raw["probe"] is None else Probe(**_with_tuple(raw["probe"], "special")),
                    "lanes": tuple(Lane(**_with_tuple(x, "planes")) for x in raw["lanes"]),
                    "stages": tuple(Stage(**x) for x in raw["stages"]),
                    "tiers": tuple(Tier(**x) for x in raw["tiers"]),
                    "buckets": tuple(
                        Bucket(**{**x, "lanes": tuple(x["lanes"]), "tokens": TokenRule(**x["tokens"])})
                        for x in raw["buckets"]
                    ),
                }
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise KvlatheError(
                "the plan cannot be read", f"it is malformed ({error})", "build the engine again"
            ) from error

    @property
    def digest(self) -> str:
        """SHA-256 over everything that changes results (not over notes)."""
        raw = dataclasses.asdict(self)
        raw.pop("notes")
        return hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()


def graph_files(plan: CompressionPlan) -> tuple[str, ...]:
    """Names of the ONNX files, one for each graph."""
    return tuple(f"model.g{i}.onnx" for i in range(len(plan.stages))) or ("model.onnx",)


def _with_tuple(raw: dict[str, Any], name: str) -> dict[str, Any]:
    return {**raw, name: tuple(raw[name])}


def _moved(bucket: Bucket, lanes: int, buckets: Sequence[int]) -> Bucket:
    """The bucket where lanes are counted from ``lanes`` on and only ``buckets`` are left."""
    source = None if bucket.source is None else buckets.index(bucket.source)
    return dataclasses.replace(bucket, lanes=tuple(lane - lanes for lane in bucket.lanes), source=source)


def split_tokens(shares: Sequence[float], tokens: int) -> tuple[int, ...]:
    """How many of ``tokens`` tokens each of the ``shares``, which sum to 1, has: round(share * tokens), the last share
    what is left. No count falls as ``tokens`` grows, and each further token adds one to one of them.
    """
    counts, left, whole = [], tokens, 1.0
    for share in shares[:-1]:
        counts.append(round(share / whole * left))
        left, whole = left - counts[-1], whole - share
    return (*counts, left)


def check(plan: CompressionPlan) -> None:
    """Raise KvlatheError unless the plan obeys every rule written at its classes."""

    def refuse(fact: str, reason: str) -> None:
        raise KvlatheError(fact, reason, "mend the method that made this plan")

    if plan.page_tokens % RANK_MULTIPLE or plan.page_tokens <= 0:
        refuse(f"page_tokens is {plan.page_tokens}", f"pages are whole multiples of {RANK_MULTIPLE} tokens")
    if plan.prefill_chunk % plan.page_tokens or plan.prefill_chunk <= 0:
        refuse(
            f"prefill_chunk is {plan.prefill_chunk}", f"it must be a multiple of the page ({plan.page_tokens} tokens)"
        )
    _check_lanes(plan, refuse)
    _check_tiers(plan, refuse)
    _check_buckets(plan, refuse)
    _check_rules(plan, refuse)
    _check_probe(plan, refuse)
    _check_stages(plan, refuse)


def _check_lanes(plan: CompressionPlan, refuse: Callable[[str, str], None]) -> None:
    """One lane for each layer and KV head, and what each caches."""
    m = plan.model
    if [(x.layer, x.head) for x in plan.lanes] != [(i, h) for i in range(m.layers) for h in range(m.kv_heads)]:
        refuse("the plan's lanes are not one for each layer and KV head, in order", "every cache address depends on it")
    for lane in plan.lanes:
        where = f"layer {lane.layer} head {lane.head}"
        if lane.rank_k % RANK_MULTIPLE or lane.rank_v % RANK_MULTIPLE:
            refuse(f"{where} has ranks {lane.rank_k}/{lane.rank_v}", f"ranks are multiples of {RANK_MULTIPLE}")
        if lane.removed:
            keeper = None if lane.fill_from is None else plan.lane(lane.layer, lane.fill_from)
            if keeper is None or keeper.removed or lane.rank_v:
                refuse(f"{where} is removed", "it needs rank_v 0 and fill_from naming a kept head of its layer")
        elif lane.rank_v == 0 or lane.fill_from is not None:
            refuse(f"{where} keeps K", "a kept lane needs rank_v >= 16 and no fill_from")
        elif not lane.projected and lane.rank_k != -(-lane.input_dim // RANK_MULTIPLE) * RANK_MULTIPLE:
            refuse(
                f"{where} has input_dim {lane.input_dim} and rank_k {lane.rank_k}",
                "an unprojected lane caches its input",
            )
        if lane.rope == "planes" and lane.input_dim != 2 * len(lane.planes):
            refuse(f"{where} keeps {len(lane.planes)} planes in {lane.input_dim} dims", "a plane is two dims")


def _check_tiers(plan: CompressionPlan, refuse: Callable[[str, str], None]) -> None:
    """Number formats that can be computed."""
    for tier in plan.tiers:
        if tier.arithmetic == "int" and (
            (tier.bits_k < 16 and tier.axis_k != "rank")
            or (tier.bits_v < 16 and tier.axis_v == "token" and plan.page_tokens % tier.group_v)
        ):
            refuse(
                f"{tier} multiplies integers", "K's groups then run along the rank, V's along a page's tokens, evenly"
            )
        if not (0 < tier.span_k <= 1 and 0 < tier.span_v <= 1):
            refuse(f"{tier} covers more than a group's range, or none of it", "spans are above 0 and at most 1")
        if tier.sums and (tier.arithmetic != "int" or tier.axis_v != "token"):
            refuse(f"{tier} stores sums of codes", "only products of integers read them")


def _check_buckets(plan: CompressionPlan, refuse: Callable[[str, str], None]) -> None:
    """Every kept lane has one bucket for new tokens, in the one hot format; sealed ones follow from it."""
    fresh: list[int] = []
    for i, bucket in enumerate(plan.buckets):
        if not 0 <= bucket.tier < len(plan.tiers):
            refuse(f"bucket {i} names tier {bucket.tier}", "no such tier")
        if bucket.source is None:
            fresh += bucket.lanes
            if plan.tiers[bucket.tier].quantized:
                refuse(f"bucket {i} takes new tokens in {plan.tiers[bucket.tier]}", "fresh tokens are 16 or 32 bit")
        elif not set(bucket.lanes) <= set(plan.buckets[bucket.source].lanes):
            refuse(f"bucket {i} seals lanes that its source lacks", "a page seals only what it holds")
    if sorted(fresh) != [i for i, lane in enumerate(plan.lanes) if not lane.removed]:
        refuse("some lane is in no fresh bucket, or in two", "each new token has one place for each lane")
    if len({(plan.tiers[b.tier].bits_k, plan.tiers[b.tier].bits_v) for b in plan.buckets if b.source is None}) > 1:
        refuse("fresh buckets differ in number format", "Attend writes all fresh rows in one hot format")


def _check_rules(plan: CompressionPlan, refuse: Callable[[str, str], None]) -> None:
    """Token rules go with the buckets they stand at."""
    for i, bucket in enumerate(plan.buckets):
        rule, tier = bucket.tokens, plan.tiers[bucket.tier]
        if rule.kind == "share" and not 0 < rule.share <= 1:
            refuse(f"bucket {i} keeps a share of {rule.share}", "a share is above 0 and at most 1")
        if rule.kind == "budget" and (rule.budget <= 0 or rule.budget % plan.page_tokens):
            refuse(f"bucket {i} has a budget of {rule.budget} tokens", f"budgets are whole pages of {plan.page_tokens}")
        if not 0 <= rule.recent <= (rule.budget if rule.kind == "budget" else 0):
            refuse(f"bucket {i} keeps its {rule.recent} newest tokens", "they are part of a budget")
        if rule.kind == "budget" and (
            (tier.bits_k < 16 and tier.axis_k != "rank") or (tier.bits_v < 16 and tier.axis_v != "rank")
        ):
            refuse(
                f"bucket {i} drops tokens of {tier}", "groups along the tokens cannot lose any: group along the rank"
            )
        rules = [plan.buckets[c].tokens for c in plan.cold(i)]
        if bucket.source is None and rule.kind != "all" and (rules or rule.kind == "share"):
            refuse(f"fresh bucket {i} has a rule of its own", "only a budget where nothing is sealed")
        if any(r.kind == "share" for r in rules) and (
            any(set(plan.buckets[c].lanes) != set(bucket.lanes) for c in plan.cold(i))
            or abs(sum(r.share for r in rules) - 1) > 1e-9
            or any(r.kind != "share" for r in rules)
        ):
            refuse(
                f"the tokens of bucket {i} are not divided",
                "its cold buckets hold all of its lanes, in shares that sum to 1",
            )


def _check_probe(plan: CompressionPlan, refuse: Callable[[str, str], None]) -> None:
    """There is a probe where tokens are chosen, it observes some row of every window, and nowhere else is one."""
    choosing = bool(plan.stages) or any(bucket.tokens.kind != "all" for bucket in plan.buckets)
    probe = plan.probe
    if choosing != (probe is not None):
        refuse("the plan has a probe and no rule, or a rule and no probe", "a rule chooses by what a probe observes")
    if probe is None:
        return
    if not (0 <= probe.recent <= 1 and 0 <= probe.random <= 1 and probe.last >= 0):
        refuse(f"{probe} cannot be computed", "recent and random are shares, last is a count")
    if not (probe.recent or probe.random or probe.last):
        refuse(f"{probe} observes nothing", "every window needs rows that rank its tokens")
    if probe.normalized and not probe.accumulated:
        refuse(f"{probe} cannot be computed", "rows at or after a token are counted from its arrival on")
    if probe.pooling < 1 or probe.pooling % 2 == 0 or probe.noise < 0:
        refuse(f"{probe} cannot be computed", "pooling is odd, noise at least 0")


def _check_stages(plan: CompressionPlan, refuse: Callable[[str, str], None]) -> None:
    """Stages cover the layers in order, lose tokens and never gain any, and share no bucket."""
    if not plan.stages:
        return
    firsts, tokens = [s.first_layer for s in plan.stages], [s.tokens for s in plan.stages[1:]]
    if firsts[0] != 0 or plan.stages[0].tokens or firsts != sorted({*firsts} & {*range(plan.model.layers)}):
        refuse(f"stages begin at the layers {firsts}", "the first has layer 0 and every token, the others follow")
    least = plan.probe.last if plan.probe else 0
    if tokens != sorted(tokens, reverse=True) or any(n <= least for n in tokens):
        refuse(f"{tokens} tokens enter the stages", f"no token comes back, and more than the {least} last ones stay")
    for i, bucket in enumerate(plan.buckets):
        layers = {plan.lanes[lane].layer for lane in bucket.lanes}
        if not layers or not any(layers <= {*plan.layers_of(stage)} for stage in range(len(plan.stages))):
            refuse(f"bucket {i} holds the layers {sorted(layers)}", "a bucket has one length, so one stage")
