"""The rules that every plan obeys. A plan is checked whenever one is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.check_sizes import check_sizes
from kvlathe.plan.heads import RANK_MULTIPLE
from kvlathe.plan.token_rules import KEEP_ALL, Share

if TYPE_CHECKING:
    from kvlathe.plan.plan import CompressionPlan


def check(plan: CompressionPlan) -> None:
    """Raise KvlatheError unless the plan obeys every rule written at its classes."""

    def refuse(fact: str, reason: str) -> None:
        raise KvlatheError(fact, reason, "mend the method that made this plan")

    if plan.page_tokens % RANK_MULTIPLE or plan.page_tokens <= 0:
        refuse(
            f"page_tokens is {plan.page_tokens}",
            f"pages are whole multiples of {RANK_MULTIPLE} tokens",
        )
    if plan.prefill_chunk % plan.page_tokens or plan.prefill_chunk <= 0:
        refuse(
            f"prefill_chunk is {plan.prefill_chunk}",
            f"it must be a multiple of the page ({plan.page_tokens} tokens)",
        )
    check_sizes(plan, refuse)
    _check_lanes(plan, refuse)
    _check_tiers(plan, refuse)
    _check_buckets(plan, refuse)
    _check_rules(plan, refuse)
    _check_observation(plan, refuse)
    _check_compaction(plan, refuse)
    _check_stages(plan, refuse)


def _check_lanes(plan: CompressionPlan, refuse: Callable[[str, str], None]) -> None:
    """One lane for each layer and KV head, and what each caches."""
    m = plan.model
    if len(plan.lanes) != m.layers * m.kv_heads or [
        (x.layer, x.head) for x in plan.lanes
    ] != [(i, h) for i in range(m.layers) for h in range(m.kv_heads)]:
        refuse(
            "the plan's lanes are not one for each layer and KV head, in order",
            "every cache address depends on it",
        )
    for lane in plan.lanes:
        where = f"layer {lane.layer} head {lane.head}"
        if lane.rank_k % RANK_MULTIPLE or lane.rank_v % RANK_MULTIPLE:
            refuse(
                f"{where} has ranks {lane.rank_k}/{lane.rank_v}",
                f"ranks are multiples of {RANK_MULTIPLE}",
            )
        if lane.removed:
            keeper = (
                None
                if lane.fill_from is None
                else plan.lane(lane.layer, lane.fill_from)
            )
            if keeper is None or keeper.removed or lane.rank_v:
                refuse(
                    f"{where} is removed",
                    "it needs rank_v 0 and fill_from naming a kept head of its layer",
                )
        elif lane.rank_v == 0 or lane.fill_from is not None:
            refuse(
                f"{where} keeps K", "a kept lane needs rank_v >= 16 and no fill_from"
            )
        elif (
            not lane.projected
            and lane.rank_k != -(-lane.input_dim // RANK_MULTIPLE) * RANK_MULTIPLE
        ):
            refuse(
                f"{where} has input_dim {lane.input_dim} and rank_k {lane.rank_k}",
                "an unprojected lane caches its input",
            )
        if lane.rope == "planes" and lane.input_dim != 2 * len(lane.planes):
            refuse(
                f"{where} keeps {len(lane.planes)} planes in {lane.input_dim} dims",
                "a plane is two dims",
            )


def _check_tiers(plan: CompressionPlan, refuse: Callable[[str, str], None]) -> None:
    """Number formats that can be computed."""
    for tier in plan.tiers:
        if tier.arithmetic == "int" and (
            tier.k.along_tokens
            or (tier.v.along_tokens and plan.page_tokens % tier.v.group)
        ):
            refuse(
                f"{tier} multiplies integers",
                "K's groups then run along the rank, V's along a page's tokens, evenly",
            )
        if not (0 < tier.k.span <= 1 and 0 < tier.v.span <= 1):
            refuse(
                f"{tier} covers more than a group's range, or none of it",
                "spans are above 0 and at most 1",
            )
        if tier.sums and (tier.arithmetic != "int" or tier.v.along_rank):
            refuse(
                f"{tier} stores sums of codes", "only products of integers read them"
            )
        coded = [form for form in tier.formats if form.is_coded]
        if tier.arithmetic == "int" and not all(x.decoding.is_whole for x in coded):
            refuse(f"{tier} multiplies integers", "its codes are worth other numbers")
        affine = all(form.has_minimum for form in coded)
        if not affine and (tier.sums or tier.rounding != "nearest"):
            refuse(
                f"{tier} has groups without a minimum",
                "their codes are the nearest, and nothing reads their sums",
            )


def _check_buckets(plan: CompressionPlan, refuse: Callable[[str, str], None]) -> None:
    """Every kept lane has one bucket for new tokens, in the one hot format; sealed ones
    follow from it."""
    fresh: list[int] = []
    for i, bucket in enumerate(plan.buckets):
        if not 0 <= bucket.tier < len(plan.tiers):
            refuse(f"bucket {i} names tier {bucket.tier}", "no such tier")
        if bucket.source is None:
            fresh += bucket.lanes
            if plan.tiers[bucket.tier].is_coded:
                refuse(
                    f"bucket {i} takes new tokens in {plan.tiers[bucket.tier]}",
                    "fresh tokens are 16 or 32 bit",
                )
        elif not set(bucket.lanes) <= set(plan.buckets[bucket.source].lanes):
            refuse(
                f"bucket {i} seals lanes that its source lacks",
                "a page seals only what it holds",
            )
    if sorted(fresh) != [i for i, lane in enumerate(plan.lanes) if not lane.removed]:
        refuse(
            "some lane is in no fresh bucket, or in two",
            "each new token has one place for each lane",
        )
    hot_tiers = [plan.tiers[b.tier] for b in plan.buckets if b.source is None]
    if len({(tier.k.name, tier.v.name) for tier in hot_tiers}) > 1:
        refuse(
            "fresh buckets differ in number format",
            "Attend writes all fresh rows in one hot format",
        )


def _check_rules(plan: CompressionPlan, refuse: Callable[[str, str], None]) -> None:
    """Token rules go with the buckets they stand at."""
    for i, bucket in enumerate(plan.buckets):
        rule, tier = bucket.tokens, plan.tiers[bucket.tier]
        if problem := rule.problem(plan.page_tokens):
            refuse(f"bucket {i}: {problem[0]}", problem[1])
        by_token = tier.k.along_tokens or tier.v.along_tokens
        if rule.drops and rule.by_saliency and by_token:
            refuse(
                f"bucket {i} drops tokens of {tier}",
                "groups along the tokens cannot lose any: group along the rank",
            )
        if bucket.source is None:
            _check_placement(plan, i, refuse)


def _check_placement(
    plan: CompressionPlan, fresh: int, refuse: Callable[[str, str], None]
) -> None:
    """The rules of a fresh bucket and of its cold ones go together."""
    bucket, cold = plan.buckets[fresh], plan.cold(fresh)
    rules = [plan.buckets[c].tokens for c in cold]
    if bucket.tokens.divides or (rules and bucket.tokens != KEEP_ALL):
        refuse(
            f"fresh bucket {fresh} has a rule of its own",
            "only what drops tokens stands there, where nothing is sealed",
        )
    if not any(rule.divides for rule in rules):
        return
    shares = [rule.share for rule in rules if isinstance(rule, Share)]
    whole = all(set(plan.buckets[c].lanes) == set(bucket.lanes) for c in cold)
    missing = 1 - sum(shares)
    if not whole or len(shares) < len(rules) or abs(missing) > 1e-9:
        refuse(
            f"the tokens of bucket {fresh} are not divided",
            "its cold buckets hold all of its lanes, in shares that sum to 1",
        )


def _check_observation(
    plan: CompressionPlan, refuse: Callable[[str, str], None]
) -> None:
    """There is an observation window where tokens are chosen, it observes some row of every window,
    and nowhere else is one."""
    choosing = bool(plan.stages) or any(
        bucket.tokens.by_saliency for bucket in plan.buckets
    )
    observation = plan.observation
    if observation is not None and plan.windowed:
        refuse(
            "the plan has windows beside an observation window",
            "what is observed counts every token of every lane",
        )
    if choosing != (observation is not None):
        refuse(
            "the plan has an observation window and no rule, or a rule and no observation window",
            "a rule chooses by what an observation window observes",
        )
    if observation is None:
        return
    if not (
        0 <= observation.recent <= 1
        and 0 <= observation.random <= 1
        and observation.last >= 0
    ):
        refuse(
            f"{observation} cannot be computed",
            "recent and random are shares, last is a count",
        )
    if not (observation.recent or observation.random or observation.last):
        refuse(
            f"{observation} observes nothing",
            "every window needs rows that rank its tokens",
        )
    if observation.normalized and not observation.accumulated:
        refuse(
            f"{observation} cannot be computed",
            "rows at or after a token are counted from its arrival on",
        )
    size = observation.slice_tokens
    if size < 0 or size % plan.prefill_chunk or (size and plan.stages):
        refuse(
            f"prompts are ranked in slices of {size} tokens",
            f"slices are whole chunks of {plan.prefill_chunk}, and stages rank prompts whole",
        )
    if observation.pooling < 1 or observation.pooling % 2 == 0 or observation.noise < 0:
        refuse(f"{observation} cannot be computed", "pooling is odd, noise at least 0")


def _check_compaction(
    plan: CompressionPlan, refuse: Callable[[str, str], None]
) -> None:
    """Where prefixes are compacted, nothing else chooses tokens, and no code depends on
    a token's position."""
    if plan.compaction is None:
        return
    held = [bucket.tokens for i, bucket in enumerate(plan.buckets) if not plan.cold(i)]
    if any(rule != plan.compaction for rule in held):
        refuse(
            "the plan compacts prefixes of some lanes",
            "one share of the KV pairs is of all lanes",
        )
    if any(tier.rounding == "stochastic" for tier in plan.tiers):
        refuse(
            "the plan compacts prefixes and rounds stochastically",
            "a page of chosen tokens has no one position to draw from",
        )


def _check_stages(plan: CompressionPlan, refuse: Callable[[str, str], None]) -> None:
    """Stages cover the layers in order, lose tokens and never gain any, and share no
    bucket."""
    if not plan.stages:
        return
    firsts, tokens = (
        [s.first_layer for s in plan.stages],
        [s.tokens for s in plan.stages[1:]],
    )
    if (
        firsts[0] != 0
        or plan.stages[0].tokens
        or firsts != sorted({*firsts} & {*range(plan.model.layers)})
    ):
        refuse(
            f"stages begin at the layers {firsts}",
            "the first has layer 0 and every token, the others follow",
        )
    least = plan.observation.last if plan.observation else 0
    if tokens != sorted(tokens, reverse=True) or any(n <= least for n in tokens):
        refuse(
            f"{tokens} tokens enter the stages",
            f"no token comes back, and more than the {least} last ones stay",
        )
    for i, bucket in enumerate(plan.buckets):
        layers = {plan.lanes[lane].layer for lane in bucket.lanes}
        if not layers or not any(
            layers <= {*plan.layers_of(stage)} for stage in range(len(plan.stages))
        ):
            refuse(
                f"bucket {i} holds the layers {sorted(layers)}",
                "a bucket has one length, so one stage",
            )
