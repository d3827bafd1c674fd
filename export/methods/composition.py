"""Composition: from a compression to one plan and one basis.

Each method answers with a Decision. At most one decides the ranks, at most one the
number format of full pages, at most one which tokens are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvlathe.base.errors import KvlatheError
from kvlathe.export.bases import allocate
from kvlathe.export.bases.basis import Basis
from kvlathe.export.calibration.stats import Stats
from kvlathe.export.methods.channels import scaled
from kvlathe.export.methods.compression import Compression, RequestedMethod
from kvlathe.export.methods.groups import (
    cold_tier,
    groups,
    layer_lives,
    lives_of,
    without,
)
from kvlathe.export.methods.hadamard import rotated
from kvlathe.export.methods.lowrank import full_lanes, low_rank, within
from kvlathe.export.methods.method import Decision, Rotate
from kvlathe.export.methods.options import RankOptions
from kvlathe.export.methods.turns import in_bases
from kvlathe.plan.formats import Tier
from kvlathe.plan.heads import ModelShape
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.token_score import TokenScore

Made = tuple[CompressionPlan, Basis]


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Settings that no method decides: bits of a cached number (16 or 32), tokens a page, the
    prefill grid, the seed. ``paired``: kernels read codes of a lane of one width only,
    K's grouped along the rank, V's along tokens. ``windowed``: fewer pages are held of
    lanes that see windows, and first tokens may stay as they are. ``aged``: older tokens
    may have fewer bits than newer ones.
    ``layer_windows``: tokens that each layer's queries see in the model itself, their
    own included; 0 is all of them, and so is no number. ``max_seq_len``: tokens of the
    longest sequence that the engine takes; None: the model's.
    """

    bits: Literal[16, 32] = 16
    page_tokens: int = 64
    prefill_chunk: int = 512
    seed: int = 0
    paired: bool = False
    windowed: bool = True
    aged: bool = True
    layer_windows: tuple[int, ...] = ()
    max_seq_len: int | None = None

    @property
    def own_windows(self) -> bool:
        """Whether some layer of the model has a window."""
        return any(self.layer_windows)


def check_layer_windows(compression: Compression, outline: Decision) -> None:
    """Raise KvlatheError where ``compression`` ranks tokens, of a model whose layers see
    windows: what is ranked counts every token of every head."""
    if outline.score or outline.compacts or outline.split:
        raise KvlatheError(
            f"{compression} cannot be used with this model",
            "some of its layers see a window of tokens, and a ranking is of all tokens",
            "choose a compression that treats all tokens alike",
        )


def check_latent(compression: Compression, outline: Decision) -> None:
    """Raise KvlatheError where ``compression`` turns, cuts or scales heads, of a model
    whose heads share one latent: V is a part of K."""
    refused = ""
    if compression.choosing_ranks or compression.measured:
        refused = "it chooses ranks and forms of K and of V apart"
    elif compression.measures_heads:
        refused = "it tells heads of a layer apart"
    elif compression.calibration is not None or outline.turn or outline.scales:
        refused = "it reads statistics of K and of V apart"
    elif outline.hadamard not in ("auto", "none"):
        refused = f"it rotates heads ({outline.hadamard})"
    if refused:
        raise KvlatheError(
            f"{compression} cannot be used with this model",
            f"its heads share one latent (MLA), V is a part of K, and {refused}",
            "choose hack:bits=8, hack:bits=4, fp8 or a method of tokens, which take both "
            "as they are",
        )


def check_unlike(
    compression: Compression, outline: Decision, shape: ModelShape
) -> None:
    """Raise KvlatheError where ``compression`` tells heads apart by their count in every
    layer, or ranks by the queries of one layer what several read."""
    refused = ""
    if compression.measures_heads:
        refused = "layers have heads of unlike shapes, and it chooses among all of them"
    elif shape.sources and (outline.score or outline.compacts or outline.split):
        refused = "layers share caches, and tokens are ranked by one layer's queries"
    if refused:
        raise KvlatheError(
            f"{compression} cannot be used with this model",
            refused,
            "choose a compression that treats all tokens and heads alike",
        )


def _one_form(compression: Compression, joined: Decision) -> Decision:
    """``joined`` where full pages write V as K, which it is a part of. Raises
    KvlatheError where they cannot."""
    tiers = [tier for tier, _ in joined.split] or [joined.cold, joined.young]
    if all(tier is None or tier.has_one_form for tier in tiers):
        return joined
    shared = joined.cold_of_shared
    if joined.young is not None or shared is None or not shared.has_one_form:
        raise KvlatheError(
            f"{compression} cannot be used with this model",
            "its heads share one latent (MLA), V is stored as a part of K, and the two "
            "would have different bits or groups",
            "choose hack:bits=8 or hack:bits=4 with no other option, or fp8",
        )
    return dataclasses.replace(joined, cold=shared)


def _stores_once(joined: Decision) -> bool:
    """Whether values that keys are made of may be stored as a part of them: nothing
    turns, scales or removes heads, and full pages write both alike."""
    cold = joined.cold_of_shared or joined.cold
    if joined.young is not None:
        return False
    if joined.turn or joined.scales or joined.removed or joined.compacts:
        return False
    if joined.hadamard not in ("auto", "none") or joined.score or joined.split:
        return False
    return cold is None or cold.has_one_form


def verify(
    compression: Compression, options: RankOptions, page_tokens: int
) -> Decision:
    """Raise KvlatheError for all that can be refused without a model: methods that
    exclude each other, a target that none of them can be asked for. Returns what is
    known of formats and tokens by then.
    """
    if compression.measured:
        return Decision()
    _only_one("the ranks", compression.choosing_ranks)
    outlines = [
        (one, one.outline(page_tokens))
        for one in compression.methods
        if not one.method.rotate
    ]
    outline = _joined(outlines)
    if outline.turn is not None and compression.choosing_ranks:
        raise KvlatheError(
            f"the methods of {compression} cannot be composed",
            "two of them choose the basis",
            "keep one of them, or ask that which chooses ranks for --basis balanced",
        )
    for one in compression.choosing_ranks:
        options = one.overruling(options)
    _check_target(compression, options, outline)
    return outline


def _check_target(
    compression: Compression, options: RankOptions, outline: Decision
) -> None:
    """Raise KvlatheError for a share of the bytes that nothing can be asked for."""
    has_rate = options.removal_rate is not None
    has_ratio = options.compression_ratio is not None
    if (has_rate or has_ratio) and not compression.choosing_ranks:
        raise KvlatheError(
            f"{compression} cannot remove a given share",
            "none of its methods chooses the ranks",
            "build with auto, which finds what to remove; or compose it with fdc or "
            "zack, or leave the share out",
        )
    if has_ratio and outline.has_budget:
        raise KvlatheError(
            f"{compression} cannot remove a given share",
            "what a budget of tokens removes depends on the sequence's length",
            "say what the ranks remove: --removal-rate",
        )


def compose(
    compression: Compression,
    shape: ModelShape,
    rope: bool,
    stats: Stats | None,
    options: RankOptions,
    settings: CacheSettings,
) -> Made:
    """The plan and the basis of ``compression`` for a model of ``shape``. ``stats`` may
    be None where it calibrates on nothing.

    Raises KvlatheError for methods that exclude each other, and targets out of reach.
    """
    if compression.measured or compression.measures_heads:
        raise KvlatheError(
            f"{compression} cannot be planned from statistics",
            "it measures the model",
            "build an engine",
        )
    outline = verify(compression, options, settings.page_tokens)
    if shape.latent:
        check_latent(compression, outline)
    check_unlike(compression, outline, shape)
    decisions = [
        (one, _decided(one, stats, settings))
        for one in compression.methods
        if not one.method.rotate
    ]
    joined = _joined(decisions)
    for one in compression.methods:
        if rotate := one.method.rotate:
            given = _statistics(one.name, stats)
            target = one.overruling(options)
            return _with_ranks(compression, rotate, joined, given, target, settings)
    whole = Decision(full_lanes(shape, rope, _stores_once(joined)))
    return _composed(compression, shape, whole, joined, stats, settings)


def _decided(
    one: RequestedMethod, stats: Stats | None, settings: CacheSettings
) -> Decision:
    """The decision of a method that leaves the ranks alone."""
    choose = one.method.choose
    if choose is None:
        return one.outline(settings.page_tokens)
    given = _statistics(one.name, stats)
    return choose(given, one.options, settings.page_tokens, settings.seed)


def _statistics(name: str, stats: Stats | None) -> Stats:
    if stats is None:
        raise KvlatheError(
            f"{name} needs statistics", "it decides by them", "calibrate first"
        )
    return stats


def _joined(decisions: list[tuple[RequestedMethod, Decision]]) -> Decision:
    """Number format and lives, each decided by at most one method."""
    formats = [(one, made) for one, made in decisions if made.cold or made.split]
    tokens = [(one, made) for one, made in decisions if made.tokens or made.split]
    _only_one("the number format of full pages", [one for one, _ in formats])
    _only_one("which tokens are kept", [one for one, _ in tokens])
    kept = tokens[0][1] if tokens else Decision()
    if not formats:
        return kept
    one, coded = formats[0]
    if coded.split:
        return coded
    if tokens and coded.young is not None:
        raise KvlatheError(
            f"{one.name} with a format of newest tokens and {tokens[0][0].name} cannot be "
            "composed",
            "all tokens stay where older ones have fewer bits",
            "say recent=0, or leave the method of tokens out",
        )
    both = dataclasses.replace(
        kept,
        cold=coded.cold,
        cold_of_dropped=coded.cold_of_dropped,
        cold_of_shared=coded.cold_of_shared,
        sink=coded.sink,
        young=coded.young,
        recent=coded.recent,
        hadamard=coded.hadamard,
        scales=coded.scales,
        turn=coded.turn,
        notes=kept.notes | coded.notes,
    )
    cold = cold_tier(both)
    if cold == coded.cold:
        return both
    # Where tokens are dropped one by one, V that is a part of K follows the same form.
    return dataclasses.replace(both, cold=cold, cold_of_shared=None)


def _only_one(what: str, requested: Sequence[RequestedMethod]) -> None:
    if len(requested) > 1:
        names = " and ".join(one.name for one in requested)
        raise KvlatheError(
            f"{names} cannot be composed",
            f"each of them chooses {what}",
            "keep one of them",
        )


def _with_ranks(
    compression: Compression,
    rotate: Rotate,
    joined: Decision,
    stats: Stats,
    options: RankOptions,
    settings: CacheSettings,
) -> Made:
    """The composition where one method chooses ranks. A share of the bytes is asked of
    all methods together."""
    shape = stats.shape

    def at(ratio: float | None) -> Made:
        target = options
        if ratio is not None:
            target = options.asked(compression_ratio=ratio)
        ranks = low_rank(stats, target, rotate)
        return _composed(compression, shape, ranks, joined, stats, settings)

    quantizes = joined.cold is not None or bool(joined.split)
    if options.compression_ratio is None or not quantizes:
        return at(None)
    return within(options.compression_ratio, shape, settings.bits, at)


def _composed(
    compression: Compression,
    shape: ModelShape,
    ranks: Decision,
    joined: Decision,
    stats: Stats | None,
    settings: CacheSettings,
) -> Made:
    """Fresh tokens in the cache's own format; full pages, tokens and stages as
    ``joined``."""
    assert ranks.lanes is not None
    own = layer_lives(settings.layer_windows, settings.page_tokens)
    if own:
        check_layer_windows(compression, joined)
    if shape.latent:
        joined = _one_form(compression, joined)
    if own or joined.tokens or not settings.windowed:
        joined = dataclasses.replace(joined, sink=0)
    sink = -(-joined.sink // settings.page_tokens) * settings.page_tokens
    recent = -(-joined.recent // settings.page_tokens) * settings.page_tokens
    joined = dataclasses.replace(joined, sink=sink, recent=recent)
    lanes = without(ranks.lanes, joined.removed)
    basis = ranks.basis
    if joined.turn is not None:
        given = _statistics(compression.text, stats)
        lanes, basis = in_bases(lanes, joined.turn(given, settings.seed))
    if joined.cold is not None and not shape.latent:
        lanes, basis = rotated(
            lanes, basis, shape, joined.cold, joined.hadamard, settings.seed
        )
    if joined.scales:
        given = _statistics(compression.text, stats)
        basis = scaled(lanes, basis, given, joined.scales)
    hot = Tier(settings.bits, settings.bits)
    plan = CompressionPlan(
        model=shape,
        lanes=lanes,
        groups=groups(lanes, hot, joined, lives_of(lanes, joined, own)),
        page_tokens=settings.page_tokens,
        prefill_chunk=settings.prefill_chunk,
        seed=settings.seed,
        score=_sliced(joined, settings.prefill_chunk),
        stages=joined.stages,
        compression=compression.text,
        notes=ranks.notes | joined.notes,
    )
    return plan, basis


def whole_ranks_note(compression: Compression, plan: CompressionPlan) -> str:
    """A note where a method was asked to lower ranks and every head keeps all of
    its dimensions: fact, reason and remedy. Empty where some rank is lower."""
    if not compression.choosing_ranks:
        return ""
    if compression.measured:  # it was asked for bytes, and chose how
        return ""
    whole = allocate.whole(plan.model.head_dim)
    kept = [lane for lane in plan.lanes if not lane.removed]
    for lane in kept:
        dims = allocate.whole(plan.model.heads(lane.layer).head_dim)
        if min(lane.rank_k, lane.rank_v) < dims:
            return ""
    if any(lane.rope == "planes" for lane in kept):
        return ""
    return _whole_ranks(plan, whole)


def _whole_ranks(plan: CompressionPlan, whole: int) -> str:
    """Fact, reason and remedy, as in a KvlatheError."""
    fact = f"{plan.compression} removes no dimension of any head"
    if whole <= allocate.RANK_MULTIPLE:
        coded = any(tier.is_coded for tier in plan.index.tiers)
        remedy = (
            "Leave the part that lowers ranks out"
            if coded
            else "Choose a method that quantizes"
        )
        return (
            f"{fact}: ranks are multiples of {allocate.RANK_MULTIPLE} and the heads "
            f"have {plan.model.head_dim} dimensions. {remedy}."
        )
    if any(tier.is_coded for tier in plan.index.tiers):
        return (
            f"{fact}: its number formats alone reach what was asked for. Ask for more "
            "(--compression-ratio), for ranks (--removal-rate), or leave it out."
        )
    return (
        f"{fact}: what was asked for is less than a step of "
        f"{allocate.RANK_MULTIPLE} dimensions. Ask for more (--removal-rate)."
    )


def _sliced(joined: Decision, chunk: int) -> TokenScore | None:
    """Slices of prompts are whole chunks; stages rank a prompt whole."""
    score = joined.score
    if score is None:
        return None
    size = 0 if joined.stages else -(-score.slice_tokens // chunk) * chunk
    return dataclasses.replace(score, slice_tokens=size)
