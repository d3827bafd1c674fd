"""HunYuan V1, dense and with experts: norms of each head's queries and keys follow RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kvlathe.base.errors import KvlatheError
from kvlathe.export.families.experts import COUNTS, EXPERTS, WITHOUT_MLP
from kvlathe.export.families.family import Experts, Family
from kvlathe.export.families.llama import NAMES, biased

if TYPE_CHECKING:
    from transformers import HunYuanDenseV1Config, HunYuanMoEV1Config

    AnyHunYuan = HunYuanDenseV1Config | HunYuanMoEV1Config

HEAD_NORMS = {
    "q_norm": "model.layers.{i}.self_attn.query_layernorm",
    "k_norm": "model.layers.{i}.self_attn.key_layernorm",
}
OWN_EXPERTS = EXPERTS | {
    "router": "model.layers.{i}.mlp.gate.wg",
    "gate": "model.layers.{i}.mlp.shared_mlp.gate_proj",
    "up": "model.layers.{i}.mlp.shared_mlp.up_proj",
    "down": "model.layers.{i}.mlp.shared_mlp.down_proj",
}


def hunyuan(config: AnyHunYuan) -> Family:
    return replace(
        biased(config),
        names=NAMES | HEAD_NORMS,
        norm_after_rope=True,
        rope_parameters=_stretched(config),
    )


def hunyuan_moe(config: HunYuanMoEV1Config) -> Family:
    """Experts beside one that every token passes. Raises KvlatheError where layers
    choose different numbers of them."""
    if not isinstance(config.moe_topk, int):
        raise KvlatheError(
            f"config.json sets moe_topk to {config.moe_topk!r:.60}",
            "no record has layers that choose different numbers of experts",
            "choose a HunYuan with one number",
        )
    return replace(
        hunyuan(config),
        names=WITHOUT_MLP | OWN_EXPERTS | HEAD_NORMS,
        experts=Experts(
            count=config.num_experts,
            chosen=config.moe_topk,
            intermediate_size=config.intermediate_size,
            normalized=True,
        ),
        settings=COUNTS,
    )


def _stretched(config: AnyHunYuan) -> Mapping[str, object]:
    """RoPE's parameters where its base is stretched by ``alpha``; else none."""
    given = config.rope_parameters or {}
    alpha = float(str(given.get("alpha") or 0))
    if given.get("rope_type") != "dynamic" or not alpha:
        return {}
    dims = config.head_dim or config.hidden_size // config.num_attention_heads
    base = float(str(given.get("rope_theta"))) * alpha ** (dims / (dims - 2))
    return {"rope_type": "default", "rope_theta": base}
