"""CompressionPlan: what every head keeps, in which number format, in which token lists.
Data only.

Methods write a plan; fold, layout, graph, engines and runtime read it, and none of them
knows which method wrote it. This module imports the standard library alone, so that
every part may read a plan.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from kvlathe.base.errors import KvlatheError
from kvlathe.plan import json_fields
from kvlathe.plan.check import check
from kvlathe.plan.formats import Tier
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.json_fields import OneOf
from kvlathe.plan.placement import Placement, placement
from kvlathe.plan.token_rules import (
    KEEP_ALL,
    RULES,
    SEES_ALL,
    Compacted,
    ObservationWindow,
    TokenRule,
    Window,
)

SCHEMA_VERSION = 3
Fields = dict[str, Any]
"""What JSON has of a dataclass: values by the names of its fields."""
WARNINGS = ("ranks", "rope", "reach", "uncentred")
"""Names of the notes that warn: no rank was lowered, RoPE differs from transformers,
sequences may be longer than those that forms were chosen on, and nothing is centred.
A build logs them; the report and ``kvlathe inspect`` show them."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Lanes (indices into ``CompressionPlan.lanes``) that keep equally many tokens in
    one tier: one table, one length.

    ``source`` is None for a *fresh* bucket, where new tokens are appended; every lane
    that is not removed is in exactly one of those. Otherwise it is the index of the
    fresh bucket whose full pages are sealed into this one. A fresh bucket that no other
    names as its source is never sealed: its tier is append-able and its pages stay.
    """

    tier: int
    lanes: tuple[int, ...]
    source: int | None = None
    tokens: Annotated[TokenRule, OneOf(RULES)] = KEEP_ALL


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers that compute the same tokens of a prompt, and are one graph:
    from ``first_layer`` to the layer before the next stage's. At most ``tokens`` tokens
    of a prompt enter it: its last rows that the observation window observes, and of the others those
    of most saliency in the layer before, summed over its lanes. The rest leave for all
    later layers. The first stage has them all, and its ``tokens`` is 0.
    """

    first_layer: int
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Pass:
    """Stages ``first`` .. ``end`` - 1, which all compute the same ``tokens`` tokens of
    a prompt."""

    first: int
    end: int
    tokens: int


@dataclass(frozen=True, slots=True)
class CompressionPlan:
    """Everything downstream needs to know. ``lanes`` are sorted by (layer, head), one
    for each KV head of the model.

    ``compression`` and ``notes`` are for people and reports only: no code branches on
    them. ``page_tokens`` P and ``prefill_chunk`` (a multiple of P) fix when pages seal.
    ``observation``: what ranks the tokens, where a token rule chooses among them; a prompt
    then stays in the fresh buckets until it, or a slice of it, ends and is ranked.
    ``stages``: the groups of layers that a prompt passes one after the other, losing
    tokens in between; empty: one graph. A bucket's lanes are of one stage, so that it
    has one length.
    """

    model: ModelShape
    lanes: tuple[Lane, ...]
    tiers: tuple[Tier, ...]
    buckets: tuple[Bucket, ...]
    page_tokens: int = 64
    prefill_chunk: int = 512
    seed: int = 0
    observation: ObservationWindow | None = None
    stages: tuple[Stage, ...] = ()
    compression: str = "none"
    notes: Fields = dataclasses.field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        check(self)

    # -- views -------------------------------------------------------------------------
    def lane(self, layer: int, head: int) -> Lane:
        index = layer * self.model.kv_heads + head
        return self.lanes[index]

    def active(self, layer: int) -> tuple[Lane, ...]:
        """The lanes of a layer that Attend sees, in head order."""
        h = self.model.kv_heads
        return tuple(
            lane for lane in self.lanes[layer * h : (layer + 1) * h] if not lane.removed
        )

    def kept_before(self, layer: int) -> int:
        """Lanes that are not removed in the layers before: the place of a layer's first
        one among them all."""
        return sum(
            not lane.removed for lane in self.lanes[: layer * self.model.kv_heads]
        )

    @property
    def is_part(self) -> bool:
        """Whether it is what one shard keeps, which may be nothing of a bucket."""
        return False

    @property
    def unit(self) -> int:
        """Elements a gather moves at once, 16 to 64: divides every rank, and 128 bytes
        in the widest format (K and V are aligned to those)."""
        widest = max(tier.widest for tier in self.tiers)
        return math.gcd(
            128 * 8 // widest,
            *(rank for lane in self.lanes for rank in (lane.rank_k, lane.rank_v)),
        )

    @property
    def hot_bits(self) -> int:
        """Bits of the one format in which new K is written; V's are as many in every
        plan that runs."""
        hot = next(bucket for bucket in self.buckets if bucket.source is None)
        return self.tiers[hot.tier].k.bits

    @property
    def projected(self) -> bool:
        return any(lane.projected for lane in self.lanes)

    def cold(self, fresh: int) -> tuple[int, ...]:
        """Indices of the buckets that pages of fresh bucket ``fresh`` are sealed into;
        empty if it is never sealed."""
        return tuple(
            i for i, bucket in enumerate(self.buckets) if bucket.source == fresh
        )

    @property
    def windowed(self) -> bool:
        """Whether some lane sees a window of the tokens before it."""
        rules = [bucket.tokens for bucket in self.buckets]
        found = [isinstance(rule, Window) for rule in rules]
        return any(found)

    def window(self, lane: int) -> Window:
        """What lane ``lane`` sees of the tokens before it."""
        for bucket in self.buckets:
            if lane in bucket.lanes and isinstance(bucket.tokens, Window):
                return bucket.tokens
        return SEES_ALL

    @property
    def keeps_positions(self) -> bool:
        """Whether scores stand beside their token's position: what counts rows or draws
        lots needs it."""
        drawn = any(tier.rounding == "stochastic" for tier in self.tiers)
        return self.observation is not None and (
            self.observation.normalized or self.observation.noise > 0 or drawn
        )

    def scored(self, bucket: int) -> bool:
        """Whether the tokens of a bucket are ranked while they are there, so that it
        keeps their scores."""
        source = self.buckets[bucket].source
        placed = self.placement(bucket if source is None else source)
        return placed.scored[placed.buckets.index(bucket)]

    def placement(self, fresh: int) -> Placement:
        """Where the tokens of fresh bucket ``fresh`` go."""
        cold = self.cold(fresh)
        rules = tuple(self.buckets[b].tokens for b in cold or (fresh,))
        return placement((fresh, *cold), rules, self.page_tokens, self.prompt_step)

    @property
    def prompt_step(self) -> int:
        """A prompt's tokens move each time that so many of them are cached, and at its
        end (0: only there)."""
        if self.observation is None:
            return self.prefill_chunk
        return self.observation.slice_tokens

    @property
    def cuts_prompts(self) -> bool:
        """Whether answers depend on where a prompt is cut: pages seal there, tokens
        move, or pages that no query sees any more are freed."""
        if self.ranked:
            return True
        return any(b.source is not None or b.tokens != KEEP_ALL for b in self.buckets)

    @property
    def ranked(self) -> bool:
        """Whether later queries decide which tokens are kept, or how."""
        return self.observation is not None

    @property
    def compaction(self) -> Compacted | None:
        """How prefixes are compacted, where they can be."""
        for bucket in self.buckets:
            if isinstance(bucket.tokens, Compacted):
                return bucket.tokens
        return None

    @property
    def observes(self) -> bool:
        """Whether Attend reports what observed rows attend: to rank tokens, or to
        compact prefixes."""
        return self.ranked or self.compaction is not None

    @property
    def sharable(self) -> bool:
        """Whether sequences that begin alike have the same pages: for prefix sharing
        and forks."""
        return not self.ranked

    @property
    def recomputable(self) -> bool:
        """Whether a cache that was given up comes back the same, in the same pages, by a
        prefill of all tokens; else preempt by swap."""
        if self.ranked:
            return False
        for bucket in self.buckets:
            is_cold = bucket.source is not None
            if is_cold or bucket.tokens.drops:
                return False
        return True

    # -- stages ------------------------------------------------------------------------
    @property
    def graphs(self) -> int:
        """Graphs that a token passes."""
        return max(1, len(self.stages))

    def layers_of(self, stage: int) -> range:
        if not self.stages:
            return range(self.model.layers)
        firsts = [one.first_layer for one in self.stages]
        borders = [*firsts, self.model.layers]
        return range(borders[stage], borders[stage + 1])

    def buckets_of(self, stage: int) -> tuple[int, ...]:
        """The buckets whose lanes are in the layers of a stage."""
        if not self.stages:
            return tuple(range(len(self.buckets)))
        layers = self.layers_of(stage)
        return tuple(
            i
            for i, bucket in enumerate(self.buckets)
            if self.lanes[bucket.lanes[0]].layer in layers
        )

    def part(self, stage: int) -> CompressionPlan:
        """The plan of one stage alone: its layers, lanes and buckets, counted from 0.
        Pages are laid out as in the whole plan, so its graph reads and fills the same
        ones."""
        if not self.stages:
            return self
        layers, buckets = self.layers_of(stage), self.buckets_of(stage)
        heads, first = self.model.kv_heads, layers[0]
        own = self.lanes[first * heads : (layers[-1] + 1) * heads]
        return dataclasses.replace(
            self,
            model=dataclasses.replace(self.model, layers=len(layers)),
            lanes=tuple(
                dataclasses.replace(lane, layer=lane.layer - first) for lane in own
            ),
            buckets=tuple(
                _moved(self.buckets[b], first * heads, buckets) for b in buckets
            ),
            stages=(Stage(0),),
        )

    def passes(self, tokens: int) -> tuple[Pass, ...]:
        """How a prompt of ``tokens`` tokens goes through the stages; those between
        which it loses none are one."""
        ranges = [Pass(0, 1, tokens)]
        for i, stage in enumerate(self.stages[1:], 1):
            last = ranges[-1]
            if last.tokens <= stage.tokens:
                ranges[-1] = Pass(last.first, i + 1, last.tokens)
            else:
                ranges.append(Pass(i, i + 1, stage.tokens))
        return tuple(ranges)

    @property
    def kept_dims(self) -> float:
        """Fraction of the head dimensions kept, K and V together (1 - p in the
        papers)."""
        kept = sum(lane.rank_k + lane.rank_v for lane in self.lanes)
        whole = 2 * self.model.head_dim * len(self.lanes)
        return kept / whole

    # -- file form ---------------------------------------------------------------------
    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> CompressionPlan:
        """Raises KvlatheError for another schema version or a malformed plan."""
        try:
            raw = json_fields.parse(text)
        except ValueError as error:
            raise _malformed(error) from error
        version = raw.get("schema_version") if isinstance(raw, dict) else None
        if version != SCHEMA_VERSION:
            raise KvlatheError(
                f"the plan has schema version {version}",
                f"this kvlathe reads version {SCHEMA_VERSION}",
                "build the engine again",
            )
        try:
            return json_fields.read(cls, raw, "plan")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise _malformed(error) from error

    @property
    def digest(self) -> str:
        """SHA-256 over everything that changes results (not over notes)."""
        raw = dataclasses.asdict(self)
        raw.pop("notes")
        return hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()


def graph_files(plan: CompressionPlan) -> tuple[str, ...]:
    """Names of the ONNX files, one for each graph."""
    if not plan.stages:
        return ("model.onnx",)
    stages = range(len(plan.stages))
    return tuple(f"model.g{stage}.onnx" for stage in stages)


def _malformed(error: Exception) -> KvlatheError:
    return KvlatheError(
        "the plan cannot be read",
        f"it is malformed ({error})",
        "build the engine again",
    )


def _moved(bucket: Bucket, lanes: int, buckets: Sequence[int]) -> Bucket:
    """The bucket where lanes are counted from ``lanes`` on and only ``buckets`` are
    left."""
    source = None if bucket.source is None else buckets.index(bucket.source)
    return dataclasses.replace(
        bucket, lanes=tuple(lane - lanes for lane in bucket.lanes), source=source
    )
