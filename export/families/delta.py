"""Qwen3-Next, Qwen3.5 and 3.6: gated delta rules in most layers, gates of attention's
output in the others, RoPE on a part of each head; with experts or without."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from kvlathe.export.families.experts import (
    COUNTS,
    EXPERTS,
    SHARED,
    WITHOUT_MLP,
    plain_layers,
    with_dense,
)
from kvlathe.export.families.family import Experts, Family, Mixer
from kvlathe.export.families.llama import NAMES, Heads, of_columns
from kvlathe.export.families.qwen import QK_NORMS
from kvlathe.export.families.stateful import LAYER, mixing_layers
from kvlathe.layers.mixers import Mixing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig

MIXING = "linear_attention"
"""A layer with a delta rule or a state space, among ``layer_types``."""
OWN = {
    "conv": (LAYER + "linear_attn.conv1d",),
    "decay": (LAYER + "linear_attn.A_log",),
    "step_bias": (LAYER + "linear_attn.dt_bias",),
    "norm": (LAYER + "linear_attn.norm.weight",),
    "out": (LAYER + "linear_attn.out_proj",),
}
TOGETHER = OWN | {
    "project": (LAYER + "linear_attn.in_proj_qkvz",),
    "gates": (LAYER + "linear_attn.in_proj_ba",),
}
APART = OWN | {
    "project": (LAYER + "linear_attn.in_proj_qkv", LAYER + "linear_attn.in_proj_z"),
    "gates": (LAYER + "linear_attn.in_proj_b", LAYER + "linear_attn.in_proj_a"),
}


class Delta(Heads, Protocol):
    """Fields of a configuration with delta rules."""

    @property
    def attention_bias(self) -> bool: ...
    @property
    def layer_types(self) -> Sequence[str] | None: ...
    @property
    def linear_conv_kernel_dim(self) -> int: ...
    @property
    def linear_key_head_dim(self) -> int: ...
    @property
    def linear_value_head_dim(self) -> int: ...
    @property
    def linear_num_key_heads(self) -> int: ...
    @property
    def linear_num_value_heads(self) -> int: ...


def qwen3_next(config: Qwen3NextConfig) -> Family:
    """With experts in most layers; maps of a delta rule lie group by group."""
    family = replace(
        _gated(config, config.shared_expert_intermediate_size, TOGETHER),
        names=_with_experts(),
        experts=_experts(config),
        settings=COUNTS,
    )
    return with_dense(family, plain_layers(config), config.intermediate_size)


def qwen3_5(config: Qwen3_5TextConfig) -> Family:
    return _gated(config, config.intermediate_size, APART)


def qwen3_5_moe(config: Qwen3_5MoeTextConfig) -> Family:
    return replace(
        _gated(config, config.shared_expert_intermediate_size, APART),
        names=_with_experts(),
        experts=_experts(config),
        settings=COUNTS,
    )


def _gated(
    config: Delta, columns: int, stored: Mapping[str, tuple[str, ...]]
) -> Family:
    mixes, lacks = mixing_layers(config.layer_types, MIXING)
    return replace(
        of_columns(config, columns),
        names=_attention() | {role: NAMES[role] for role in ("gate", "up", "down")},
        norm_offset=1.0,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        partial_rotary=True,
        mixer=_delta(config, stored),
        mixes=mixes,
        lacks=lacks,
        beside=("mtp.",),
    )


def _attention() -> dict[str, str]:
    """Names of a layer's attention and of norms: queries and gates lie in turn."""
    own = {"q_out_gate": NAMES["q"], **QK_NORMS}
    return own | {role: x for role, x in WITHOUT_MLP.items() if role != "q"}


def _with_experts() -> dict[str, str]:
    return _attention() | EXPERTS | SHARED


def _experts(config: Qwen3NextConfig | Qwen3_5MoeTextConfig) -> Experts:
    return Experts(
        count=config.num_experts,
        chosen=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        normalized=getattr(config, "norm_topk_prob", True),
    )


def _delta(config: Delta, stored: Mapping[str, tuple[str, ...]]) -> Mixer:
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    groups, heads = config.linear_num_key_heads, config.linear_num_value_heads
    mixing = Mixing(
        "delta",
        channels=2 * groups * key_dim + heads * value_dim,
        taps=config.linear_conv_kernel_dim,
        heads=heads,
        groups=groups,
        key_dim=key_dim,
        value_dim=value_dim,
        norm_eps=config.rms_norm_eps,
    )
    return Mixer(mixing, stored, "group" if stored is TOGETHER else "apart")
