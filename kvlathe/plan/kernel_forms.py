"""The formats of quantized pages and the ranking of tokens that engines may ask of the
CUDA kernels. A build refuses the others, and so does a session on a GPU when it loads a
plan."""

from __future__ import annotations

import os

from kvlathe.base.kernel_limits import kernel_limits
from kvlathe.plan.formats import Format
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.token_score import ObservationWindow

Refusal = tuple[str, str]
"""A reason and a remedy."""


def plan_refusal(plan: CompressionPlan) -> Refusal | None:
    """The refusal of a plan by the CUDA kernels, whatever GPU runs them; None where they
    take it. A life that they do not know is refused here."""
    unproven = None if os.environ.get(UNPROVEN) == "1" else ages_refusal(plan)
    return unproven or forms_refusal(plan) or ranking_refusal(plan)


def ages_refusal(plan: CompressionPlan) -> Refusal | None:
    """The refusal of pages that wait until older ones are read elsewhere, by all that no
    test has compared with a CPU."""
    if not any(bucket.waits for bucket in plan.index.buckets):
        return None
    reason = (
        "newest tokens have more bits than older ones, and no GPU's logits of such plans "
        "were compared with a CPU's"
    )
    return (
        reason,
        "build with recent=0 (with --dtype float16 where a search chose this), or run it "
        "on a CPU",
    )


def is_wide(plan: CompressionPlan) -> bool:
    """Whether some rank is above ``kNarrowRank``, or some V a part of its K."""
    in_keys = any(lane.values_in_keys for lane in plan.lanes)
    return in_keys or _widest(plan) > kernel_limits()["kNarrowRank"]


def has_tiles(plan: CompressionPlan) -> bool:
    """Whether a kernel attends prompts in tiles, on GPUs that have it. Those for decoding
    attend the others."""
    return not is_wide(plan)


def most_group(plan: CompressionPlan) -> int:
    """Query heads that share a KV head, in the layer where they are most."""
    return max(plan.model.group(lane.layer) for lane in plan.lanes)


def _widest(plan: CompressionPlan) -> int:
    return max(max(lane.rank_k, lane.rank_v) for lane in plan.lanes)


UNLIKE = "its layers have heads of unlike shapes, or share caches"

UNPROVEN = "KVLATHE_UNPROVEN"
"""With this environment variable at 1, engines may use kernels whose tests have not all
passed on a GPU."""


def unlike_refusal(plan: CompressionPlan) -> Refusal | None:
    """The refusal of a model whose layers keep states or differ in their heads, by all
    but the cuda backend."""
    if plan.model.states:
        reason = (
            "some of its layers keep a state, which only --backend cuda has on a GPU"
        )
        return reason, "build with --backend cuda, or run it on a CPU"
    if plan.model.alike_heads:
        return None
    reason = f"{UNLIKE}, which only --backend cuda has on a GPU"
    return reason, "build with --backend cuda, or run it on a CPU"


def forms_refusal(plan: CompressionPlan) -> Refusal | None:
    """The refusal of the first of its quantized pages that may not be; None where all
    may."""
    for bucket in plan.index.buckets:
        if not bucket.tier.is_coded:
            continue
        refusal = _group_refusal(bucket.tier.formats, plan.page_tokens)
        if refusal is not None:
            return refusal
    return None


def node_refusal(plan: CompressionPlan) -> Refusal | None:
    """The refusal of what the node that ONNX Runtime and TensorRT run on a GPU does not
    compute."""
    if plan.model.latent:
        reason = "its heads share one latent (MLA), which its node was not run with"
        return reason, "build with --backend cuda, or run it on a CPU"
    if refusal := unlike_refusal(plan) or ages_refusal(plan):
        return refusal
    if is_wide(plan):
        reason = f"a head has rank {_widest(plan)}, which its node was not run with"
        return reason, "build with --backend cuda, or run it on a CPU"
    if plan.model.shifts:
        return None
    return (
        "the model bounds its scores or has sink logits, which its node does not compute",
        "build with --backend cuda, or run it on a CPU",
    )


def ranking_refusal(plan: CompressionPlan) -> Refusal | None:
    """The refusal of what ranks its tokens; None where the kernels do it."""
    if plan.index.moves_tokens and any(lane.values_in_keys for lane in plan.lanes):
        reason = "its values are stored as a part of their keys, which no GPU moves"
        return reason, "choose another backend, or a compression that keeps all tokens"
    if not plan.index.ranked:
        return None
    observation = plan.index.observation
    if observation is not None and (refusal := _observing_refusal(plan, observation)):
        return refusal
    if any(tier.rounding == "stochastic" for tier in plan.index.tiers):
        reason = "tokens that are ranked would be rounded at random"
        return reason, "round to the nearest"
    return None


def _observing_refusal(
    plan: CompressionPlan, observation: ObservationWindow
) -> Refusal | None:
    """The refusal of attention that the kernels do not report, or that nobody asks for in
    time."""
    if not plan.model.shifts:
        reason = "the model bounds its scores or has sink logits"
        remedy = "choose another backend, or a compression that treats tokens alike"
        return f"{reason}, by which no kernel ranks tokens", remedy
    if plan.stages and not _ranks_its_rows(plan, observation):
        reason = "a prompt loses rows between layers that keep no scores of its own"
        return reason, "build without stages, or choose another backend"
    if observation.special:
        reason = "it observes tokens by their ids, which the host learns too late"
        return reason, "choose another backend"
    return None


def _ranks_its_rows(plan: CompressionPlan, observation: ObservationWindow) -> bool:
    """Whether pages have what chooses the rows that stay after each stage: the attention of
    the last rows, in the stage's last layer."""
    if observation.recent or observation.random:
        return False
    layers = {plan.index.layers_of(stage)[-1] for stage in range(len(plan.stages) - 1)}
    for bucket in plan.index.buckets:
        own = {plan.lanes[lane].layer for lane in bucket.lanes}
        if bucket.is_hot and layers & own and not bucket.scored:
            return False
    return True


def _group_refusal(forms: tuple[Format, Format], page_tokens: int) -> Refusal | None:
    multiple = kernel_limits()["kRankMultiple"]
    for form in forms:
        if form.is_coded and form.group % multiple:
            reason = f"it has groups of {form.group}"
            return reason, f"choose a multiple of {multiple}"
        if form.along_tokens and page_tokens % form.group:
            reason = f"it has groups of {form.group} tokens"
            return reason, "choose groups that divide a page"
    return None
