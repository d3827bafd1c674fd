"""Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE: experts in place of the MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from kvlathe.base.errors import KvlatheError
from kvlathe.export.families.family import Experts, Family
from kvlathe.export.families.llama import NAMES
from kvlathe.export.families.qwen import QK_NORMS
from kvlathe.export.families.windows import every_layer, sliding_layers

if TYPE_CHECKING:
    from transformers import (
        MixtralConfig,
        OlmoeConfig,
        Qwen2MoeConfig,
        Qwen3MoeConfig,
    )

WITHOUT_MLP = {
    role: name for role, name in NAMES.items() if role not in ("gate", "up", "down")
}
EXPERTS = {
    "router": "model.layers.{i}.mlp.gate",
    "experts_gate": "model.layers.{i}.mlp.experts.{e}.gate_proj",
    "experts_up": "model.layers.{i}.mlp.experts.{e}.up_proj",
    "experts_down": "model.layers.{i}.mlp.experts.{e}.down_proj",
}
MIXTRAL_EXPERTS = {
    "router": "model.layers.{i}.block_sparse_moe.gate",
    "experts_gate": "model.layers.{i}.block_sparse_moe.experts.{e}.w1",
    "experts_up": "model.layers.{i}.block_sparse_moe.experts.{e}.w3",
    "experts_down": "model.layers.{i}.block_sparse_moe.experts.{e}.w2",
}
SHARED = {
    "gate": "model.layers.{i}.mlp.shared_expert.gate_proj",
    "up": "model.layers.{i}.mlp.shared_expert.up_proj",
    "down": "model.layers.{i}.mlp.shared_expert.down_proj",
    "shared_gate": "model.layers.{i}.mlp.shared_expert_gate",
}
COUNTS = ("num_experts", "num_local_experts")


class Sparse(Protocol):
    """Fields of a configuration that say which layers have experts."""

    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def decoder_sparse_step(self) -> int: ...
    @property
    def mlp_only_layers(self) -> list[int] | None: ...


def mixtral(config: MixtralConfig) -> Family:
    experts = Experts(
        count=config.num_local_experts,
        chosen=config.num_experts_per_tok,
        intermediate_size=config.intermediate_size,
        normalized=True,
    )
    return Family(
        names=WITHOUT_MLP | MIXTRAL_EXPERTS,
        norm="rms",
        norm_eps=config.rms_norm_eps,
        activation=config.hidden_act,
        kv_heads=config.num_key_value_heads,
        intermediate_size=config.intermediate_size,
        windows=every_layer(config),
        experts=experts,
        settings=COUNTS,
    )


def qwen2_moe(config: Qwen2MoeConfig) -> Family:
    """Raises KvlatheError where some layers have a plain MLP."""
    _check_every_layer(config)
    return replace(
        _qwen(config),
        names=WITHOUT_MLP | EXPERTS | SHARED,
        intermediate_size=config.shared_expert_intermediate_size,
        qkv_bias=bool(config.qkv_bias),
        windows=sliding_layers(config),
    )


def qwen3_moe(config: Qwen3MoeConfig) -> Family:
    """Raises KvlatheError where some layers have a plain MLP."""
    _check_every_layer(config)
    window = config.sliding_window if config.use_sliding_window else 0
    return replace(
        _qwen(config),
        names=WITHOUT_MLP | EXPERTS | QK_NORMS,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        windows=(window or 0,) * config.num_hidden_layers,
    )


def olmoe(config: OlmoeConfig) -> Family:
    """QK-norms are of all heads together. Raises KvlatheError for clipped q, k and
    v."""
    if config.clip_qkv is not None:
        raise KvlatheError(
            f"config.json sets clip_qkv to {config.clip_qkv:g}",
            "no record bounds q, k and v",
            "choose another checkpoint",
        )
    return Family(
        names=WITHOUT_MLP | EXPERTS | QK_NORMS,
        norm="rms",
        norm_eps=config.rms_norm_eps,
        activation=config.hidden_act,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        wide_qk_norm=True,
        experts=Experts(
            count=config.num_experts,
            chosen=config.num_experts_per_tok,
            intermediate_size=config.intermediate_size,
            normalized=config.norm_topk_prob,
        ),
        settings=COUNTS,
    )


def _qwen(config: Qwen2MoeConfig | Qwen3MoeConfig) -> Family:
    experts = Experts(
        count=config.num_experts,
        chosen=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        normalized=config.norm_topk_prob,
    )
    return Family(
        names=WITHOUT_MLP | EXPERTS,
        norm="rms",
        norm_eps=config.rms_norm_eps,
        activation=config.hidden_act,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        intermediate_size=config.moe_intermediate_size,
        experts=experts,
        settings=COUNTS,
    )


def _check_every_layer(config: Sparse) -> None:
    if config.decoder_sparse_step != 1 or config.mlp_only_layers:
        raise KvlatheError(
            "some of the model's layers have a plain MLP, the others experts",
            "a record says one wiring of all layers",
            "choose another checkpoint",
        )
