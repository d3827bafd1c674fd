"""Sizes that a plan may name, checked before anything is computed from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from kvlathe.plan.formats import Format
from kvlathe.plan.plan_data import PlanData

Refuse = Callable[[str, str], None]

MOST = 1 << 31
"""Places and sizes of a page are int32 numbers in the layer table."""
LEAST_GROUP = 16
"""Groups along the rank are multiples of so many channels."""


def check_sizes(plan: PlanData, refuse: Refuse) -> None:
    """The model's shape, the lanes' and groups' sizes, and every index."""
    for field in fields(plan.model):
        if field.name in ("softcap", "sinks"):
            continue
        size = getattr(plan.model, field.name)
        if not 0 < size < MOST:
            refuse(f"the model's {field.name} is {size}", "it is a count of something")
    if plan.model.softcap < 0:
        refuse("the model's softcap is below 0", "it is a bound of scores")
    if plan.model.query_heads % plan.model.kv_heads:
        refuse(
            f"{plan.model.query_heads} query heads share {plan.model.kv_heads} KV heads",
            "every KV head has equally many query heads",
        )
    if not 0 < plan.prefill_chunk < MOST or abs(plan.seed) >= 1 << 63:
        refuse("prefill_chunk or seed is out of range", "kernels take them as numbers")
    _check_lane_sizes(plan, refuse)
    for tier in dict.fromkeys(tier for group in plan.groups for tier in group.tiers):
        for form in tier.formats:
            _check_format(form, refuse)
    _check_indices(plan, refuse)


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
        if lane.fill_from is not None and not 0 <= lane.fill_from < plan.model.kv_heads:
            refuse(f"a lane is filled from head {lane.fill_from}", "no such head")
        if any(not 0 <= plane < plan.model.head_dim // 2 for plane in lane.planes):
            refuse("a lane keeps a RoPE plane that no head has", "planes are numbered")
        elements += lane.rank_k + lane.rank_v
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
