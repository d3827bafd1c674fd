"""Nemotron-H and Nemotron 3: a layer is a state space (Mamba-2), attention, an MLP or
experts, without positions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvlathe.base.errors import KvlatheError
from kvlathe.export.families.delta import MIXING
from kvlathe.export.families.experts import COUNTS, OF_EXPERTS
from kvlathe.export.families.family import ATTENTION, Experts, Family, Mixer
from kvlathe.export.families.sigmoid_experts import grouped
from kvlathe.export.families.spaces import space_names
from kvlathe.layers.mixers import Mixing

if TYPE_CHECKING:
    from transformers import NemotronHConfig

LAYER = "backbone.layers.{i}."
OWN = LAYER + "mixer."
NAMES = {
    "embed": "backbone.embeddings",
    "attn_norm": LAYER + "norm",
    "q": OWN + "q_proj",
    "k": OWN + "k_proj",
    "v": OWN + "v_proj",
    "o": OWN + "o_proj",
    "mlp_norm": LAYER + "norm",
    "norm": "backbone.norm_f",
    "head": "lm_head",
}
PLAIN = {"up": OWN + "up_proj", "down": OWN + "down_proj"}
EXPERTS = {
    "router": OWN + "gate",
    "router_correction": OWN + "gate.e_score_correction_bias",
    "experts_up": OWN + "experts.{e}.up_proj",
    "experts_down": OWN + "experts.{e}.down_proj",
    "up": OWN + "shared_experts.up_proj",
    "down": OWN + "shared_experts.down_proj",
}
LATENT = {
    "experts_into": OWN + "fc1_latent_proj",
    "experts_back": OWN + "fc2_latent_proj",
}
NO_MLP = ("mlp_norm", *OF_EXPERTS)
NO_ATTENTION = ("attn_norm", *ATTENTION)
LACKS = {
    MIXING: (*ATTENTION, *NO_MLP),
    "full_attention": NO_MLP,
    "mlp": NO_ATTENTION,
    "moe": NO_ATTENTION,
}
"""Kind of a layer -> roles that it lacks."""


def nemotron_h(config: NemotronHConfig) -> Family:
    """Raises KvlatheError for experts with a MLP's biases."""
    kinds = list(config.layers_block_type or ())
    has_experts = "moe" in kinds
    if has_experts and config.mlp_bias:
        raise KvlatheError(
            f"config.json has experts, and sets mlp_bias to {config.mlp_bias}",
            "no record says how such experts compute",
            "choose a Nemotron-H model without them",
        )
    experts = EXPERTS | (LATENT if config.moe_latent_size is not None else {})
    return Family(
        names=NAMES | (experts if has_experts else PLAIN),
        norm="rms",
        norm_eps=config.layer_norm_epsilon,
        activation=config.mlp_hidden_act,
        kv_heads=config.num_key_value_heads,
        intermediate_size=config.moe_shared_expert_intermediate_size
        if has_experts
        else config.intermediate_size,
        mlp_bias=config.mlp_bias,
        ropes=(None,) * len(kinds),
        experts=_experts(config) if has_experts else None,
        dense=tuple(i for i, kind in enumerate(kinds) if has_experts and kind != "moe"),
        dense_names=NAMES | PLAIN,
        dense_size=config.intermediate_size,
        factors={"experts_down": float(config.routed_scaling_factor)},
        mixer=_mixer(config),
        mixes=tuple(i for i, kind in enumerate(kinds) if kind == MIXING),
        lacks={i: LACKS[kind] for i, kind in enumerate(kinds)},
        beside=("mtp.",),
        settings=COUNTS,
    )


def _experts(config: NemotronHConfig) -> Experts:
    plain = grouped(config, config.n_routed_experts)
    return replace(plain, gated=False, latent=config.moe_latent_size or 0)


def _mixer(config: NemotronHConfig) -> Mixer:
    heads, groups = config.mamba_num_heads, config.n_groups
    key_dim, value_dim = config.ssm_state_size, config.mamba_head_dim
    mixing = Mixing(
        "space",
        channels=heads * value_dim + 2 * groups * key_dim,
        taps=config.conv_kernel,
        heads=heads,
        groups=groups,
        key_dim=key_dim,
        value_dim=value_dim,
        norm="after",
        norm_eps=config.layer_norm_epsilon,
        norm_groups=groups,
        least_step=config.time_step_min,
    )
    bias, conv_bias = config.use_bias, config.use_conv_bias
    return Mixer(mixing, space_names(OWN), "space", bias, conv_bias)
