"""The rules that every plan obeys. A plan is checked whenever one is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.formats import Format
from kvlathe.plan.groups import MEND
from kvlathe.plan.heads import RANK_MULTIPLE
from kvlathe.plan.plan_data import PlanData
from kvlathe.plan.stages import layers_of
from kvlathe.plan.token_score import ObservationWindow, TokenScore

Refuse = Callable[[str, str], None]

MOST = 1 << 31
"""Places and sizes of a page are int32 numbers in the layer table."""
LEAST_GROUP = 16
"""Groups along the rank are multiples of so many channels."""


def check(plan: PlanData) -> None:
    """Raise KvlatheError unless the plan obeys every rule written at its classes."""

    def refuse(fact: str, reason: str) -> None:
        raise KvlatheError(fact, reason, MEND)

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
    _check_groups(plan, refuse)
    _check_values_in_keys(plan, refuse)
    _check_score(plan, refuse)
    _check_compaction(plan, refuse)
    _check_stages(plan, refuse)
    _check_states(plan, refuse)


def _check_lanes(plan: PlanData, refuse: Refuse) -> None:
    """Ranks and inputs of each lane that can be cached."""
    m = plan.model
    for lane in plan.lanes:
        where = f"layer {lane.layer} head {lane.head}"
        if lane.rank_k % RANK_MULTIPLE or lane.rank_v % RANK_MULTIPLE:
            refuse(
                f"{where} has ranks {lane.rank_k}/{lane.rank_v}",
                f"ranks are multiples of {RANK_MULTIPLE}",
            )
        if lane.removed:
            keeper = None
            if lane.fill_from is not None:
                keeper = plan.lanes[m.lanes_before(lane.layer) + lane.fill_from]
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


def _check_tiers(plan: PlanData, refuse: Refuse) -> None:
    """Number formats that can be computed."""
    for tier in dict.fromkeys(tier for group in plan.groups for tier in group.tiers):
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


def _check_groups(plan: PlanData, refuse: Refuse) -> None:
    """Every kept lane is in one group, all groups have one hot format, and lives go
    with the page."""
    lanes = sorted(lane for group in plan.groups for lane in group.lanes)
    if lanes != [i for i, lane in enumerate(plan.lanes) if not lane.removed]:
        refuse(
            "some lane is in no group, or in two",
            "each new token has one place for each lane",
        )
    if len({(group.hot.k.name, group.hot.v.name) for group in plan.groups}) > 1:
        refuse(
            "groups differ in the format of new tokens",
            "Attend writes all new rows in one hot format",
        )
    for i, group in enumerate(plan.groups):
        if problem := group.life.problem(plan.page_tokens):
            refuse(f"group {i}: {problem[0]}", problem[1])


def _check_values_in_keys(plan: PlanData, refuse: Refuse) -> None:
    """V that is a part of K is so in every lane, as the model has it, and pages write
    both alike."""
    kept = [lane for lane in plan.lanes if not lane.removed]
    stored_once = [lane for lane in kept if lane.values_in_keys]
    if not stored_once:
        return
    ours = {lane.layer for lane in stored_once}
    if plan.model.latent:
        ours |= {lane.layer for lane in kept}
    count = sum(lane.layer in ours for lane in kept)
    can = all(plan.model.latent or plan.model.heads(x).turned for x in ours)
    if not can or len(stored_once) < count:
        refuse(
            f"{len(stored_once)} of {count} lanes have their V in their K",
            "it is all of layers whose values are a part of their keys, or none",
        )
    for lane in stored_once:
        if lane.rank_v > lane.rank_k or lane.projected or lane.rope != "none":
            refuse(
                f"layer {lane.layer} has V in K, ranks {lane.rank_k}/{lane.rank_v}",
                "V is then the beginning of K, which nothing turns or projects",
            )
    for group in plan.groups:
        if not any(plan.lanes[lane].values_in_keys for lane in group.lanes):
            continue
        for tier in group.tiers:
            if not tier.has_one_form:
                refuse(f"V is stored in K, in {tier}", "both then have one form")


def _check_score(plan: PlanData, refuse: Refuse) -> None:
    """There is a score where tokens are chosen, one that can be computed, and nowhere else
    is one."""
    choosing = bool(plan.stages) or any(group.life.by_saliency for group in plan.groups)
    score = plan.score
    if choosing != (score is not None):
        refuse(
            "the plan has a token score and no life that chooses, or such a life and none",
            "a life chooses by what the score says",
        )
    if score is None:
        return
    if any(group.life.sees.is_less for group in plan.groups):
        refuse(
            "the plan has windows beside a token score",
            "a score ranks every token of every lane",
        )
    if problem := score.problem():
        refuse(*problem)
    size = score.slice_tokens
    if size < 0 or size % plan.prefill_chunk or (size and plan.stages):
        refuse(
            f"prompts are ranked in slices of {size} tokens",
            f"slices are whole chunks of {plan.prefill_chunk}, and stages rank prompts whole",
        )
    if not isinstance(score, ObservationWindow):
        _check_unobserved(plan, score, refuse)


def _check_unobserved(plan: PlanData, score: TokenScore, refuse: Refuse) -> None:
    """Nothing needs observed attention, or the positions that pages have beside it."""
    if plan.stages:
        refuse(
            f"the plan has stages and a score of the kind {score.kind}",
            "rows stay by the attention that they get",
        )
    apart = [tier for group in plan.groups if not group.seals for tier in group.cold]
    if any(tier.rounding == "stochastic" for tier in apart):
        refuse(
            f"tokens of a score of the kind {score.kind} are rounded at random",
            "what they draw follows from positions, which their pages do not keep",
        )


def _check_compaction(plan: PlanData, refuse: Refuse) -> None:
    """Refuse compacted prefixes where anything else chooses tokens, or a code depends
    on a token's position."""
    shares = {group.life.compaction for group in plan.groups}
    if shares == {None}:
        return
    if len(shares) > 1:
        refuse(
            "the plan compacts prefixes of some lanes",
            "one share of the KV pairs is of all lanes",
        )
    tiers = [tier for group in plan.groups for tier in group.tiers]
    if any(tier.rounding == "stochastic" for tier in tiers):
        refuse(
            "the plan compacts prefixes and rounds stochastically",
            "a page of chosen tokens has no one position to draw from",
        )


def _check_stages(plan: PlanData, refuse: Refuse) -> None:
    """Stages cover the layers in order, lose tokens and never gain any, and share no
    group."""
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
    score = plan.score
    least = score.last if isinstance(score, ObservationWindow) else 0
    if tokens != sorted(tokens, reverse=True) or any(n <= least for n in tokens):
        refuse(
            f"{tokens} tokens enter the stages",
            f"no token comes back, and more than the {least} last ones stay",
        )
    for i, group in enumerate(plan.groups):
        layers = {plan.lanes[lane].layer for lane in group.lanes}
        if not layers or not any(
            layers <= {*layers_of(plan.stages, plan.model.layers, stage)}
            for stage in range(len(plan.stages))
        ):
            refuse(
                f"group {i} holds the layers {sorted(layers)}",
                "a group has one length, so one stage",
            )


def _check_states(plan: PlanData, refuse: Refuse) -> None:
    """Every row of a prompt enters the states of layers, in order."""
    states = plan.model.states
    if not states:
        return
    if len(states) != plan.model.layers or any(not 0 <= n < MOST for n in states):
        refuse(f"the states have {states} numbers", "each layer has some, or none")
    if plan.stages:
        refuse(
            "a prompt loses rows between layers that keep a state",
            "a state needs every row",
        )
    if any(group.life.compaction for group in plan.groups):
        refuse(
            "the plan compacts prefixes of a model that keeps states",
            "a state holds every token, whatever pages keep",
        )


def check_sizes(plan: PlanData, refuse: Refuse) -> None:
    """The model's shape, the lanes' and groups' sizes, and every index."""
    for field in fields(plan.model):
        if field.name in (
            "softcap",
            "sinks",
            "latent",
            "own_heads",
            "sources",
            "states",
            "values",
        ):
            continue
        size = getattr(plan.model, field.name)
        if not 0 < size < MOST:
            refuse(f"the model's {field.name} is {size}", "it is a count of something")
    if plan.model.softcap < 0:
        refuse("the model's softcap is below 0", "it is a bound of scores")
    values = plan.model.latent, plan.model.values
    if min(values) < 0 or max(values) > plan.model.head_dim:
        refuse(
            f"the model's values are {max(values)} dims of its keys",
            f"keys have {plan.model.head_dim}",
        )
    _check_heads(plan, refuse)
    count = plan.model.lanes_before(plan.model.layers)
    if len(plan.lanes) != count or plan.model.places != tuple(
        (lane.layer, lane.head) for lane in plan.lanes
    ):
        refuse(
            "the plan's lanes are not one for each layer and KV head, in order",
            "every cache address depends on it",
        )
    if not 0 < plan.prefill_chunk < MOST or abs(plan.seed) >= 1 << 63:
        refuse("prefill_chunk or seed is out of range", "kernels take them as numbers")
    _check_lane_sizes(plan, refuse)
    for tier in dict.fromkeys(tier for group in plan.groups for tier in group.tiers):
        for form in tier.formats:
            _check_format(form, refuse)
    _check_indices(plan, refuse)


def _check_heads(plan: PlanData, refuse: Refuse) -> None:
    """The heads of each layer, and whose cache each reads."""
    m = plan.model
    for name, given in (("heads", m.own_heads), ("sources", m.sources)):
        if given and len(given) != m.layers:
            refuse(f"{len(given)} layers have {name}", f"the model has {m.layers}")
    for layer, source in enumerate(m.sources):
        if not 0 <= source <= layer or m.sources[source] != source:
            refuse(
                f"layer {layer} reads the cache of layer {source}",
                "it is an earlier one, or its own, and one that is cached",
            )
    for heads in m.own_heads:
        within = heads.kv_heads <= m.kv_heads and heads.head_dim <= m.head_dim
        least = min(heads.kv_heads, heads.head_dim)
        is_none = heads.kv_heads == heads.head_dim == 0
        within = within and 0 <= heads.turned <= heads.head_dim and not heads.turned % 2
        if not within or (least < 1 and not is_none):
            refuse(f"a layer has {heads}", "the model says how many they are at most")
        if heads.kv_heads and m.query_heads % heads.kv_heads:
            _refuse_group(m.query_heads, heads.kv_heads, refuse)
    if not m.own_heads and m.query_heads % m.kv_heads:
        _refuse_group(m.query_heads, m.kv_heads, refuse)


def _refuse_group(query_heads: int, kv_heads: int, refuse: Refuse) -> None:
    refuse(
        f"{query_heads} query heads share {kv_heads} KV heads",
        "every KV head has equally many query heads",
    )


def _check_lane_sizes(plan: PlanData, refuse: Refuse) -> None:
    elements = 0
    for lane in plan.lanes:
        sizes = (lane.input_dim, lane.rank_k, lane.rank_v)
        empty = lane.input_dim == 0 and not lane.removed
        if empty or any(not 0 <= size < MOST for size in sizes):
            refuse(
                f"layer {lane.layer} head {lane.head} has the sizes {sizes}",
                "sizes are counts of dimensions",
            )
        heads = plan.model.heads(lane.layer)
        if lane.fill_from is not None and not 0 <= lane.fill_from < heads.kv_heads:
            refuse(f"a lane is filled from head {lane.fill_from}", "no such head")
        if any(not 0 <= plane < heads.head_dim // 2 for plane in lane.planes):
            refuse("a lane keeps a RoPE plane that no head has", "planes are numbered")
        elements += lane.numbers
    if elements * plan.page_tokens * 8 >= MOST:
        refuse(
            f"a page of {plan.page_tokens} tokens has {elements} numbers a token",
            "pages are smaller than 2 GB",
        )


def _check_format(form: Format, refuse: Refuse) -> None:
    """Formats without codes have no groups; the layer table holds the number all the
    same."""
    least = LEAST_GROUP if form.is_coded and form.along_rank else 1
    if not least <= form.group < MOST:
        refuse(
            f"groups have {form.group} elements",
            f"they have {least} or more",
        )
    if not form.is_possible:
        widths = " or ".join(map(str, form.decoding.widths))
        refuse(
            f"{form} has {form.coding} codes",
            f"they have {widths} bits, in groups along the rank",
        )


def _check_indices(plan: PlanData, refuse: Refuse) -> None:
    if not plan.groups:
        refuse("the plan has no group", "new tokens need one")
    for i, group in enumerate(plan.groups):
        known = all(0 <= lane < len(plan.lanes) for lane in group.lanes)
        if not known or not (group.lanes or plan.is_part):
            refuse(f"group {i} names the lanes {group.lanes}", "no such lanes")
