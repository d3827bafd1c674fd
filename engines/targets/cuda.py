"""The cuda engine: the folded weights, and decoder.json: where each lies and how layers
are wired (export/model/weights_file.py).

The runtime builds its decoder from these
(runtime/sessions/torch_cuda/model/decoder.py); no graph is needed, and none is
exported.
"""

from __future__ import annotations

from importlib import util
from importlib.metadata import version
from pathlib import Path

from kvlathe.base.errors import KvlatheError
from kvlathe.base.extras import pip_install
from kvlathe.base.kernel_limits import kernel_limits
from kvlathe.engines.backends import Built, check_token_ranking, check_windows
from kvlathe.plan.kernel_forms import (
    Refusal,
    forms_refusal,
    most_group,
    plan_refusal,
)
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan

ARCHITECTURES = tuple(f"sm_{number}" for number in (75, 80, 86, 87, 89, 90, 120, 121))
"""GPUs that the kernels are written for; a library may hold fewer (docs/native.md)."""


LEAST = {"fp8": 89, "int4": 80}
"""The first compute capability whose tensor cores, or whose torch kernels, take such
weights."""


def able(weights: str | None) -> tuple[str, ...]:
    """Those of ARCHITECTURES that multiply ``weights``."""
    least = LEAST.get(weights or "", 0)
    return tuple(name for name in ARCHITECTURES if int(name[3:]) >= least)


def identify(name: str) -> Built:
    """Nothing is compiled: the engine runs wherever the native library's kernels do."""
    if util.find_spec("torch") is None:
        raise KvlatheError(
            f"the backend {name} needs torch",
            "it is missing",
            f"run {pip_install('export')}",
        )
    return Built({"torch": version("torch")}, ARCHITECTURES)


def build(name: str, folder: Path, plan: CompressionPlan, limits: Limits) -> None:
    """Nothing is left to do: decoder.json and the weights are what it runs."""


def check_plan(name: str, plan: CompressionPlan) -> None:
    """Raise KvlatheError unless the CUDA kernels keep and attend the pages of this
    plan."""
    check_token_ranking(name, plan.index.moves_tokens)
    check_windows(name, plan.index.sees_less)
    refusal = _hot_refusal(plan) or _coded_refusal(plan)
    refusal = refusal or _size_refusal(plan) or plan_refusal(plan)
    if refusal is not None:
        reason, remedy = refusal
        raise KvlatheError(f"the backend {name} cannot run this plan", reason, remedy)


def _hot_refusal(plan: CompressionPlan) -> Refusal | None:
    hot = plan.index.hot_tier
    if hot.k.is_half and hot.v.is_half:
        return None
    return f"its hot pages have {hot.widest} bits", "build with --kv-bits 16"


def _coded_refusal(plan: CompressionPlan) -> Refusal | None:
    """The refusal of quantized pages."""
    if any(tier.sums for tier in plan.index.tiers):
        reason = "its pages store sums of codes, which the kernels do not read"
        return reason, "choose a compression without stored sums"
    if refusal := forms_refusal(plan):
        return refusal
    coded = any(bucket.tier.is_coded for bucket in plan.index.buckets)
    least, most = (kernel_limits()[name] for name in ("kLeastCodedPage", "kMaxPage"))
    page = plan.page_tokens
    fits = least <= page <= most and page & (page - 1) == 0
    if coded and not fits:
        reason = (
            f"its quantized pages have {page} tokens, and the kernels take "
            f"powers of two from {least} to {most}"
        )
        return reason, "build with --tokens-per-block 64 or 128"
    return None


def _size_refusal(plan: CompressionPlan) -> Refusal | None:
    """The refusal of sizes that the kernels have a bound on."""
    lanes = max(len(plan.index.active(layer)) for layer in range(plan.model.layers))
    rank_k = max(lane.rank_k for lane in plan.lanes)
    rank_v = max(lane.rank_v for lane in plan.lanes)
    inputs = max(lane.input_dim for lane in plan.lanes)
    buckets, group = len(plan.index.parts), most_group(plan)
    slots = plan.index.most_slots
    observation = plan.index.observation
    observed = plan.index.most_in_a_layer if observation else 0
    ranking = group if observation else 0
    # Where V is a part of K, query heads may be more than one tile has.
    once = plan.index.values_in_keys
    tiles = lanes * -(-group // kernel_limits()["kMaxGroup"]) if once else 0
    of_group = "kMaxWideGroup" if once else "kMaxGroup"
    sizes = (
        (
            f"it has {buckets} buckets, one for each window or head",
            buckets,
            "kMaxBuckets",
        ),
        (f"a head is in {slots} buckets", slots, "kMaxSlots"),
        (f"it ranks tokens in {observed} buckets a layer", observed, "kMaxSlots"),
        (f"the model has {group} query heads a KV head", group, of_group),
        (f"it ranks tokens by {ranking} query heads a KV head", ranking, "kMaxGroup"),
        (f"a layer has {lanes} KV heads", lanes, "kMaxLanes"),
        (f"a layer has {tiles} tiles of query heads", tiles, "kMaxLanes"),
        (f"a head has rank {rank_k}", rank_k, "kMaxRank"),
        (f"the values of a head have rank {rank_v}", rank_v, "kMaxRankV"),
        (f"a head has {inputs} dimensions before its projection", inputs, "kMaxInput"),
    )
    for fact, size, name in sizes:
        most = kernel_limits()[name]
        if size > most:
            reason = f"{fact}, and the kernels take {most} at most"
            remedy = "choose --backend onnxruntime, or compress more"
            if name == "kMaxBuckets" and plan.index.compaction is not None:
                remedy = "write heads=same, or choose --backend onnxruntime"
            return reason, remedy
    return None
