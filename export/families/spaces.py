"""Granite 4 hybrid and Bamba: state spaces (Mamba-2) in most layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvlathe.export.families.delta import MIXING
from kvlathe.export.families.family import Family, Mixer
from kvlathe.export.families.granite import (
    SHARED,
    granitemoe,
    granitemoeshared,
)
from kvlathe.export.families.llama import NAMES, llama
from kvlathe.export.families.stateful import LAYER, mixing_layers
from kvlathe.layers.mixers import MOST_STEP, Mixing

if TYPE_CHECKING:
    from transformers import BambaConfig, GraniteMoeHybridConfig


def granitemoehybrid(config: GraniteMoeHybridConfig) -> Family:
    """Experts beside one that every token passes, or that alone; positions in no layer
    of most models."""
    with_experts = (
        granitemoe if not config.shared_intermediate_size else granitemoeshared
    )
    family = with_experts(config)
    if not config.num_local_experts:
        kept = ("router", "experts_gate_up", "experts_down")
        names = {role: x for role, x in family.names.items() if role not in kept}
        factors = dict(family.factors)
        factors["down"] = factors["o"]
        family = replace(family, names=names | SHARED, experts=None, factors=factors)
    mixes, lacks = mixing_layers(config.layer_types, MIXING)
    turns = config.position_embedding_type == "rope"
    mixer = _space(config, LAYER + "mamba.", config.rms_norm_eps)
    return replace(
        family,
        mixer=replace(mixer, factor=float(config.residual_multiplier or 1.0)),
        mixes=mixes,
        lacks=lacks,
        ropes=() if turns else (None,) * config.num_hidden_layers,
    )


def bamba(config: BambaConfig) -> Family:
    mixes, lacks = mixing_layers(config.layers_block_type, MIXING)
    return replace(
        llama(config),
        names=NAMES
        | {
            "mlp_norm": LAYER + "pre_ff_layernorm",
            "gate": LAYER + "feed_forward.gate_proj",
            "up": LAYER + "feed_forward.up_proj",
            "down": LAYER + "feed_forward.down_proj",
            "norm": "model.final_layernorm",
        },
        partial_rotary=True,
        mixer=_space(config, LAYER + "mamba.", config.rms_norm_eps),
        mixes=mixes,
        lacks=lacks,
    )


def _space(
    config: GraniteMoeHybridConfig | BambaConfig, at: str, norm_eps: float
) -> Mixer:
    heads, groups = config.mamba_n_heads or 0, config.mamba_n_groups or 0
    key_dim, value_dim = config.mamba_d_state or 0, int(config.mamba_d_head or 0)
    least, most = config.time_step_limit or (0.0, float("inf"))
    mixing = Mixing(
        "space",
        channels=heads * value_dim + 2 * groups * key_dim,
        taps=config.mamba_d_conv or 0,
        heads=heads,
        groups=groups,
        key_dim=key_dim,
        value_dim=value_dim,
        norm="after",
        norm_eps=norm_eps,
        norm_groups=groups,
        least_step=float(least),
        most_step=min(float(most), MOST_STEP),
    )
    return Mixer(
        mixing,
        space_names(at),
        "space",
        bias=bool(config.mamba_proj_bias),
        conv_bias=bool(config.mamba_conv_bias),
    )


def space_names(at: str) -> dict[str, tuple[str, ...]]:
    """Names of a state space's tensors, which begin with ``at``."""
    return {
        "project": (at + "in_proj",),
        "gates": (at + "in_proj",),
        "conv": (at + "conv1d",),
        "decay": (at + "A_log",),
        "step_bias": (at + "dt_bias",),
        "skip": (at + "D",),
        "norm": (at + "norm.weight",),
        "out": (at + "out_proj",),
    }
