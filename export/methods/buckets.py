"""Buckets of a plan: lanes that keep equally many tokens in one number format, stage by stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from kvlathe.errors import KvlatheError
from kvlathe.export.methods.options import Part
from kvlathe.export.plan import Bucket, Lane, Stage, Tier, TokenRule


def without(lanes: Sequence[Lane], removed: Mapping[int, int]) -> tuple[Lane, ...]:
    """``lanes`` where those that are ``removed``, lane -> head, take that head's output."""
    gone = {"rank_k": 0, "rank_v": 0, "projected": False}
    return tuple(
        dataclasses.replace(lane, **gone, fill_from=removed[i]) if i in removed else lane
        for i, lane in enumerate(lanes)
    )


def buckets(lanes: Sequence[Lane], chosen: Part) -> tuple[Bucket, ...]:
    """The fresh bucket of each stage and, where full pages change their format, the cold ones they go to: one for each
    token rule.
    """
    rules = chosen.tokens * len(lanes) if len(chosen.tokens) == 1 else chosen.tokens or (TokenRule(),) * len(lanes)
    found: list[Bucket] = []
    for layers in _layers(chosen.stages, lanes[-1].layer + 1):
        kept = tuple(i for i, lane in enumerate(lanes) if lane.layer in layers and not lane.removed)
        by_rule = {rule: tuple(i for i in kept if rules[i] == rule) for rule in dict.fromkeys(rules[i] for i in kept)}
        if chosen.split:
            fresh = len(found)
            cold = [Bucket(1 + i, kept, fresh, TokenRule("share", share=s)) for i, (_, s) in enumerate(chosen.split)]
            found += [Bucket(0, kept), *cold]
        elif chosen.cold is None:
            found += [Bucket(0, held, tokens=rule) for rule, held in by_rule.items()]
        else:
            fresh = len(found)
            found += [Bucket(0, kept), *(Bucket(1, held, fresh, rule) for rule, held in by_rule.items())]
    return tuple(found)


def _layers(stages: Sequence[Stage], layers: int) -> list[range]:
    """The layers of each stage."""
    firsts = [stage.first_layer for stage in stages] or [0]
    return [range(first, end) for first, end in zip(firsts, [*firsts[1:], layers], strict=True)]


def cold_tier(chosen: Part) -> Tier | None:
    """The format of full pages. Tokens that may be dropped share no group of V: those then run along the rank.
    Raises KvlatheError where sums of codes are asked for beside that.
    """
    tier = chosen.cold
    if tier is None or not any(rule.kind == "budget" for rule in chosen.tokens) or tier.bits_v >= 16:
        return tier
    if tier.sums:
        raise KvlatheError(
            "sums=stored cannot be composed with token budgets",
            "a token that is dropped would be part of V's sums",
            "leave sums out",
        )
    if tier.axis_k == "token" and tier.bits_k < 16:
        raise KvlatheError(
            "keys quantized by channel cannot be composed with token budgets",
            "a token that is dropped shares its groups with others",
            "choose a method that groups keys along the rank",
        )
    return dataclasses.replace(tier, axis_v="rank")
