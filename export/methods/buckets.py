"""Buckets of a plan: lanes that keep equally many tokens in one number format, stage by
stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise

from kvlathe.base.errors import KvlatheError
from kvlathe.export.methods.options import Decision
from kvlathe.plan.formats import Tier
from kvlathe.plan.heads import Lane
from kvlathe.plan.plan import Bucket, Stage
from kvlathe.plan.token_rules import KEEP_ALL, Compacted, Share, TokenRule, Window


def without(lanes: Sequence[Lane], removed: Mapping[int, int]) -> tuple[Lane, ...]:
    """``lanes`` where those that are ``removed``, lane -> head, take that head's
    output."""
    nothing = {"rank_k": 0, "rank_v": 0, "projected": False}
    left = list(lanes)
    for i, head in removed.items():
        left[i] = dataclasses.replace(lanes[i], **nothing, fill_from=head)
    return tuple(left)


def layer_rules(windows: Sequence[int], page_tokens: int) -> dict[int, Window]:
    """The rule of each layer whose queries see so many tokens in the model itself; 0 is
    all of them."""
    return {
        layer: Window.of_tokens(tokens, page_tokens)
        for layer, tokens in enumerate(windows)
        if tokens
    }


def rules_of(
    lanes: Sequence[Lane], chosen: Decision, own: Mapping[int, Window]
) -> list[TokenRule]:
    """Which tokens each lane keeps: what its layer sees in the model, by ``own``, or
    what was chosen."""
    rules = chosen.tokens or (KEEP_ALL,)
    if len(rules) == 1:
        rules = rules * len(lanes)
    kept: list[TokenRule] = []
    for lane, rule in zip(lanes, rules, strict=True):
        whole = (lane.layer, lane.head) in chosen.whole_heads
        by_choice = KEEP_ALL if whole else rule
        kept.append(own.get(lane.layer, by_choice))
    return kept


def buckets(
    lanes: Sequence[Lane], chosen: Decision, rules: Sequence[TokenRule]
) -> tuple[Bucket, ...]:
    """The fresh bucket of each stage and, where full pages change their format, the
    cold ones they go to: one for each of the ``rules``, or each lane.
    """
    made: list[Bucket] = []
    for layers in _layers(chosen.stages, lanes[-1].layer + 1):
        kept: list[int] = []
        by_rule: dict[tuple[TokenRule, int], list[int]] = {}
        for i, lane in enumerate(lanes):
            if lane.layer in layers and not lane.removed:
                kept.append(i)
                rule = rules[i]
                apart = isinstance(rule, Compacted) and rule.apart
                by_rule.setdefault((rule, i if apart else 0), []).append(i)
        fresh = len(made)
        if chosen.split:
            made.append(Bucket(0, tuple(kept)))
            for tier, (_, share) in enumerate(chosen.split, start=1):
                made.append(Bucket(tier, tuple(kept), fresh, Share(share)))
        elif chosen.cold is None:
            for (rule, _), of_rule in by_rule.items():
                made.append(Bucket(0, tuple(of_rule), tokens=rule))
        else:
            made.append(Bucket(0, tuple(kept)))
            for (rule, _), of_rule in by_rule.items():
                made.append(Bucket(1, tuple(of_rule), fresh, rule))
    return tuple(made)


def _layers(stages: Sequence[Stage], layers: int) -> list[range]:
    """The layers of each stage."""
    firsts = [stage.first_layer for stage in stages] or [0]
    borders = [*firsts, layers]
    return [range(first, end) for first, end in pairwise(borders)]


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
    if (
        tier is None
        or not any(rule.drops and rule.by_saliency for rule in chosen.tokens)
        or not tier.v.is_coded
    ):
        return tier
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
    return dataclasses.replace(tier, axis_v="rank")
