"""The cuda engine: the exported weights as they are, and decoder.json: where each lies and how layers are wired.

The runtime builds its decoder from these (runtime/cuda_decoder.py); the graph is not needed and leaves the folder.
"""

from __future__ import annotations

import json
from importlib import util
from importlib.metadata import version
from pathlib import Path

from kvlathe.engines.backends import Built, check_ranks
from kvlathe.engines.manifest import DECODER_FILE, ONNX_FILE, WEIGHTS_FILE, Limits
from kvlathe.errors import KvlatheError
from kvlathe.export.plan import CompressionPlan

ARCHITECTURES = tuple(f"sm_{number}" for number in (75, 80, 86, 87, 89, 90, 120, 121))
"""What the kernels are written for; a library may hold fewer (docs/native.md)."""
MOST_BUCKETS, MOST_RANK, MOST_GROUP, MOST_LANES = 3, 128, 8, 64
"""Buckets of a plan; the widest rank; query heads a KV head; KV heads of a layer."""
CODED_PAGES = (64, 128, 256)
"""Tokens of a quantized page."""


def identify(name: str) -> Built:
    """Nothing is compiled: the engine runs wherever the native library's kernels do."""
    if util.find_spec("torch") is None:
        raise KvlatheError(f"the backend {name} needs torch", "it is missing", "pip install 'kvlathe[export]'")
    return Built({"torch": version("torch")}, ARCHITECTURES)


def build(name: str, folder: Path, plan: CompressionPlan, limits: Limits) -> None:
    """Write decoder.json."""
    import onnx

    model = onnx.load(folder / ONNX_FILE, load_external_data=False)
    facts = {entry.key: entry.value for entry in model.metadata_props}
    tensors = {x.name: _entry(x) for x in model.graph.initializer if x.data_location == onnx.TensorProto.EXTERNAL}
    index = {"weights": WEIGHTS_FILE, "wiring": json.loads(facts["kvlathe.wiring"]), "tensors": tensors}
    (folder / DECODER_FILE).write_text(json.dumps(index, indent=1), "utf-8")
    (folder / ONNX_FILE).unlink()


def _entry(tensor: object) -> dict[str, object]:
    """dtype (as torch names it), shape, and offset in bytes of an initializer in the weights file."""
    import onnx

    assert isinstance(tensor, onnx.TensorProto)
    where = {entry.key: entry.value for entry in tensor.external_data}
    kinds = {int(onnx.TensorProto.FLOAT): "float32", int(onnx.TensorProto.FLOAT16): "float16"}
    return {"dtype": kinds[tensor.data_type], "shape": list(tensor.dims), "offset": int(where.get("offset", 0))}


def check_plan(name: str, plan: CompressionPlan) -> None:
    """Raise KvlatheError unless the CUDA kernels keep and attend the pages of this plan."""

    def refuse(fact: str, remedy: str) -> None:
        raise KvlatheError(f"the backend {name} cannot run this plan: {fact}", "its kernels do not do that", remedy)

    hot = {bits for b in plan.buckets if b.source is None for bits in _bits(plan, b.tier)}
    if hot != {16}:
        refuse(f"its hot pages have {max(hot)} bits", "build with --kv_bits 16")
    check_ranks(name, plan.ranked)
    if any(tier.sums for tier in plan.tiers):
        refuse("pages store sums of codes", "choose a compression without stored sums")
    for tier in (plan.tiers[b.tier] for b in plan.buckets if plan.tiers[b.tier].quantized):
        if tier.bits_k != tier.bits_v or (tier.axis_k, tier.axis_v) != ("rank", "token"):
            found = f"K has {tier.bits_k} bits along the {tier.axis_k}, V {tier.bits_v} along the {tier.axis_v}"
            refuse(found, "choose equal bits, K's groups along the rank and V's along the tokens")
        if tier.group_v < 32 or tier.group_v & (tier.group_v - 1) or plan.page_tokens % tier.group_v:
            refuse(f"V has groups of {tier.group_v} tokens", "choose 32, 64 or 128, dividing a page")
        if plan.page_tokens not in CODED_PAGES:
            refuse(f"quantized pages have {plan.page_tokens} tokens", "build with --tokens_per_block 64 or 128")
    if len(plan.buckets) > MOST_BUCKETS:
        refuse(f"it has {len(plan.buckets)} buckets of at most {MOST_BUCKETS}", "choose --backend onnxruntime")
    if plan.model.group_size > MOST_GROUP:
        found = f"the model has {plan.model.group_size} query heads a KV head and {MOST_GROUP} are the most"
        refuse(found, "choose --backend onnxruntime")
    if (lanes := max(len(plan.active(layer)) for layer in range(plan.model.layers))) > MOST_LANES:
        refuse(f"a layer has {lanes} KV heads and {MOST_LANES} are the most", "choose --backend onnxruntime")
    widest = max(rank for lane in plan.lanes for rank in (lane.rank_k, lane.rank_v))
    if widest > MOST_RANK:
        refuse(f"a rank is {widest} and {MOST_RANK} is the most", "choose --backend onnxruntime or compress more")


def _bits(plan: CompressionPlan, tier: int) -> tuple[int, int]:
    return plan.tiers[tier].bits_k, plan.tiers[tier].bits_v
