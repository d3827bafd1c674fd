"""Qwen3-Next, Qwen3.5 and 3.6: gated delta rules in most layers, gates of attention's
output in the others, RoPE on a part of each head; with experts or without. OLMo hybrid:
delta rules with norms before, attention with norms after."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from kvlathe.export.families.experts import (
    COUNTS,
    EXPERTS,
    SHARED,
    WITHOUT_MLP,
    counted,
    plain_layers,
    with_dense,
)
from kvlathe.export.families.family import Experts, Family, Mixer
from kvlathe.export.families.llama import NAMES, Heads, biased, of_columns
from kvlathe.export.families.norms_after import AFTER
from kvlathe.export.families.qwen import QK_NORMS
from kvlathe.export.families.stateful import LAYER, mixing_layers
from kvlathe.layers.mixers import Mixing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import (
        OlmoHybridConfig,
        Qwen3_5MoeTextConfig,
        Qwen3_5TextConfig,
        Qwen3NextConfig,
    )

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


OF_OLMO = OWN | {
    "project": tuple(f"{LAYER}linear_attn.{x}_proj" for x in "qkvg"),
    "gates": (LAYER + "linear_attn.b_proj", LAYER + "linear_attn.a_proj"),
    "conv": tuple(f"{LAYER}linear_attn.{x}_conv1d" for x in "qkv"),
    "norm": (LAYER + "linear_attn.o_norm.weight",),
    "out": (LAYER + "linear_attn.o_proj",),
}
OLMO_NORMS = {
    "attn_norm": LAYER + "attention_layer_norm",
    "mlp_norm": LAYER + "feedforward_layer_norm",
}
OLMO_EPS = 1e-5
"""That of a delta rule's norm."""


class Delta(Heads, Protocol):
    """Fields of a configuration with delta rules."""

    @property
    def attention_bias(self) -> bool: ...
    @property
    def layer_types(self) -> Sequence[str] | None: ...
    @property
    def linear_conv_kernel_dim(self) -> int: ...
    @property
    def linear_key_head_dim(self) -> int | None: ...
    @property
    def linear_value_head_dim(self) -> int | None: ...
    @property
    def linear_num_key_heads(self) -> int | None: ...
    @property
    def linear_num_value_heads(self) -> int | None: ...


def qwen3_next(config: Qwen3NextConfig) -> Family:
    """With experts in most layers; maps of a delta rule lie group by group."""
    family = replace(
        _gated(config, config.shared_expert_intermediate_size, TOGETHER),
        names=_with_experts(),
        experts=_experts(config),
        settings=COUNTS,
    )
    return with_dense(family, plain_layers(config), config.intermediate_size)


def olmo_hybrid(config: OlmoHybridConfig) -> Family:
    """Layers with attention normalize what they and their MLPs give, and the others what
    they read. Positions turn in some models only."""
    mixes, lacks = mixing_layers(config.layer_types, MIXING)
    layers = range(config.num_hidden_layers)
    before, after = ("attn_norm", "mlp_norm"), ("attn_out_norm", "mlp_out_norm")
    mixer = _delta(config, OF_OLMO)
    strength = 2.0 if config.linear_allow_neg_eigval else 1.0
    mixing = replace(mixer.mixing, norm_eps=OLMO_EPS, strength=strength)
    turns = (config.rope_parameters or {}).get("rope_theta") is not None
    return replace(
        biased(config),
        names=NAMES | AFTER | QK_NORMS | OLMO_NORMS,
        wide_qk_norm=True,
        ropes=() if turns else (None,) * len(layers),
        mixer=replace(mixer, mixing=mixing),
        mixes=mixes,
        lacks={i: (*lacks[i], *after) if i in lacks else before for i in layers},
        beside=("mtp.",),
        spellings={"post_attention_layernorm": "feedforward_layer_norm"},
    )


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
    return counted(config, getattr(config, "norm_topk_prob", True))


def _delta(config: Delta, stored: Mapping[str, tuple[str, ...]]) -> Mixer:
    key_dim, value_dim = (
        config.linear_key_head_dim or 0,
        config.linear_value_head_dim or 0,
    )
    groups, heads = config.linear_num_key_heads or 0, config.linear_num_value_heads or 0
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
