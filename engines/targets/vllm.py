"""The engine that vLLM hosts: plan and bases alone. The checkpoint stays where it is, and
integrations/vllm runs it (docs/vllm.md)."""

from __future__ import annotations

from pathlib import Path

from kvlathe.base.errors import KvlatheError
from kvlathe.engines.backends import Built
from kvlathe.plan.kernel_forms import ages_refusal, unlike_refusal
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan

Refusal = tuple[str, str]
"""A reason and a remedy."""
OTHER = "choose --backend onnxruntime or cuda, or a compression that keeps all tokens"


def identify(name: str) -> Built:
    """vLLM need not be here. Nothing is compiled, and its GPUs were not tried."""
    return Built({}, ("cpu",))


def build(name: str, folder: Path, plan: CompressionPlan, limits: Limits) -> None:
    """Nothing is left to do: plan.json and heads.npz are what it runs."""


def check_plan(name: str, plan: CompressionPlan) -> None:
    """Raise KvlatheError for what vLLM's block manager cannot carry."""
    refusal = _layers_refusal(plan) or _tokens_refusal(plan) or _grid_refusal(plan)
    if refusal is not None:
        raise KvlatheError(f"the backend {name} cannot run this plan", *refusal)


def _layers_refusal(plan: CompressionPlan) -> Refusal | None:
    if refusal := unlike_refusal(plan):
        return refusal
    if plan.stages:
        reason = "later layers drop tokens of a prompt, and vLLM computes all in each"
        return reason, "compress in one group (stages=1), or choose another backend"
    if plan.index.compaction is not None:
        reason = "it compacts prefixes, and vLLM shares them as whole blocks"
        return reason, OTHER
    return None


def _tokens_refusal(plan: CompressionPlan) -> Refusal | None:
    """Its block table has one length for all heads of a sequence."""
    if refusal := ages_refusal(plan):
        return refusal
    if any(group.life.stay_hot for group in plan.groups):
        return "its first tokens are not sealed, and vLLM's blocks are all alike", OTHER
    if plan.index.ranked:
        reason = "heads keep unlike tokens, and vLLM has one block table for all heads"
        return reason, OTHER
    return None


def _grid_refusal(plan: CompressionPlan) -> Refusal | None:
    if plan.index.seals and plan.prefill_chunk != plan.page_tokens:
        reason = (
            f"pages of a prompt would be sealed every {plan.prefill_chunk} tokens, and "
            "vLLM shares prefixes by the page"
        )
        return reason, f"build with --prefill-chunk {plan.page_tokens}"
    return None
