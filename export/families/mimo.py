"""MiMo V2 Flash: values with fewer dims than keys, twice as many KV heads and sinks in
layers with windows, experts by sigmoids with a correction."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from kvlathe.export.families.experts import (
    COUNTS,
    EXPERTS,
    WITHOUT_MLP,
    not_sparse,
    with_dense,
)
from kvlathe.export.families.family import Family
from kvlathe.export.families.llama import of_columns
from kvlathe.export.families.sigmoid_experts import CORRECTION, grouped
from kvlathe.export.families.windows import sliding_layers
from kvlathe.plan.heads import HeadShape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import MiMoV2FlashConfig

SINKS = {"sinks": "model.layers.{i}.self_attn.attention_sink_bias"}

TURNING = 0.334
"""The share of a head that RoPE turns, where nobody says it."""


def mimo_v2_flash(config: MiMoV2FlashConfig) -> Family:
    """Layers that guess further tokens (multi-token prediction) are left out."""
    windows = sliding_layers(config)
    full = tuple(i for i, window in enumerate(windows) if not window)
    heads = tuple(
        HeadShape(config.num_key_value_heads * (2 if window else 1), config.head_dim)
        for window in windows
    )
    values = config.v_head_dim
    family = replace(
        of_columns(config, config.moe_intermediate_size),
        names=WITHOUT_MLP | EXPERTS | CORRECTION | SINKS,
        kv_heads=max(one.kv_heads for one in heads),
        own_heads=heads if len({*heads}) > 1 else (),
        value_dims=values if values < config.head_dim else 0,
        qkv_bias=config.attention_bias,
        partial_rotary=True,
        windows=windows,
        ropes=tuple(config.layer_types or ()),
        rope_parameters=_ropes(config.rope_parameters or {}),
        lacks=dict.fromkeys(full, tuple(SINKS)),
        experts=grouped(config, config.n_routed_experts),
        factors={
            "v": float(config.attention_value_scale or 1.0),
            "experts_down": float(config.routed_scaling_factor or 1.0),
        },
        beside=("mtp.",),
        settings=COUNTS,
    )
    return with_dense(
        family, not_sparse(config.mlp_layer_types), config.intermediate_size
    )


def _ropes(given: Mapping[str, object]) -> dict[str, object]:
    """RoPE's parameters of each kind of layers, with the share of a head that turns."""
    own = {kind: cast("Mapping[str, object]", one) for kind, one in given.items()}
    return {kind: {"partial_rotary_factor": TURNING, **own[kind]} for kind in own}
