"""Groups of a plan: lanes whose tokens live alike in the same number formats, stage by
stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise

from kvlathe.base.errors import KvlatheError
from kvlathe.export.methods.method import Decision
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.plan.lives import KEEP, SEAL, Age, Divide, Life, SealAfter, Window
from kvlathe.plan.stages import Stage


def without(lanes: Sequence[Lane], removed: Mapping[int, int]) -> tuple[Lane, ...]:
    """``lanes`` where those that are ``removed``, lane -> head, take that head's
    output."""
    nothing = {"rank_k": 0, "rank_v": 0, "projected": False}
    left = list(lanes)
    for i, head in removed.items():
        left[i] = dataclasses.replace(lanes[i], **nothing, fill_from=head)
    return tuple(left)


def layer_lives(windows: Sequence[int], page_tokens: int) -> dict[int, Window]:
    """The life in each layer whose queries see so many tokens in the model itself; 0 is
    all of them."""
    return {
        layer: Window.of_tokens(tokens, page_tokens)
        for layer, tokens in enumerate(windows)
        if tokens
    }


def lives_of(
    lanes: Sequence[Lane], chosen: Decision, own: Mapping[int, Window]
) -> list[Life]:
    """The life of each lane: by what its layer sees in the model, which is ``own``, or as
    was chosen."""
    whole: Life = KEEP if chosen.cold is None else SEAL
    if chosen.cold is not None and chosen.sink:
        whole = SealAfter(chosen.sink)
    if chosen.young is not None:
        whole = Age(chosen.sink, chosen.recent)
    lives = chosen.tokens or (whole,)
    if len(lives) == 1:
        lives = lives * len(lanes)
    kept: list[Life] = []
    for lane, life in zip(lanes, lives, strict=True):
        is_whole = (lane.layer, lane.head) in chosen.whole_heads
        kept.append(own.get(lane.layer, whole if is_whole else life))
    return kept


def groups(
    lanes: Sequence[Lane], hot: Tier, chosen: Decision, lives: Sequence[Life]
) -> tuple[Group, ...]:
    """One group of each stage for each life, or for each lane. ``hot``: the format of
    new tokens; full pages change theirs as was chosen."""
    made: list[Group] = []
    for layers in _layers(chosen.stages, lanes[-1].layer + 1):
        by_life: dict[tuple[Life, int, bool], list[int]] = {}
        for i, lane in enumerate(lanes):
            if lane.layer in layers and not lane.removed:
                apart = i if chosen.apart else 0
                by_life.setdefault((lives[i], apart, lane.values_in_keys), []).append(i)
        if chosen.split:
            tiers, shares = zip(*chosen.split, strict=True)
            kept = sorted(lane for of_life in by_life.values() for lane in of_life)
            made.append(Group(tuple(kept), hot, tiers, Divide(shares)))
            continue
        for (life, _, once), of_life in by_life.items():
            tier = chosen.cold_of_shared if once and chosen.cold else None
            tier = tier or chosen.cold
            tiers = (tier,) if tier else ()
            if tier and chosen.young and life.newest_apart:
                tiers = (chosen.young, tier)
            made.append(Group(tuple(of_life), hot, tiers, life))
    return tuple(made)


def _layers(stages: Sequence[Stage], layers: int) -> list[range]:
    """The layers of each stage."""
    firsts = [stage.first_layer for stage in stages] or [0]
    return [range(first, end) for first, end in pairwise([*firsts, layers])]


def cold_tier(chosen: Decision) -> Tier | None:
    """The format of full pages. Tokens that may be dropped one by one share no group of
    V: those then run along the rank.
    Raises KvlatheError for what cannot stand beside dropped tokens.
    """
    tier = chosen.cold
    if tier is not None and chosen.compacts and tier.rounding == "stochastic":
        raise KvlatheError(
            "rounding=stochastic cannot be composed with compacted prefixes",
            "a page of chosen tokens has no one position to draw from",
            "leave rounding out",
        )
    chooses = any(life.drops and life.by_saliency for life in chosen.tokens)
    if tier is None or not chooses:
        return tier
    tier = chosen.cold_of_dropped or tier
    if tier.sums:
        raise KvlatheError(
            "sums=stored cannot be composed with token budgets",
            "a token that is dropped would be part of V's sums",
            "leave sums out",
        )
    if tier.k.along_tokens:
        raise KvlatheError(
            "keys quantized by channel cannot be composed with token budgets",
            "a token that is dropped shares its groups with others",
            "choose a method that groups keys along the rank",
        )
    return dataclasses.replace(tier, axis_v="rank") if tier.v.is_coded else tier
