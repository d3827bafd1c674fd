"""Cohere Command R, its later form with windows, also with experts, and the text of
Compass: a parallel block with one layer norm without bias, RoPE of neighbouring dims,
scaled logits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvlathe.base.errors import KvlatheError
from kvlathe.export.families.experts import (
    COUNTS,
    EXPERTS,
    PLAIN,
    not_sparse,
    with_dense,
)
from kvlathe.export.families.family import Experts, Family
from kvlathe.export.families.llama import NAMES
from kvlathe.export.families.sigmoid_experts import SHARED
from kvlathe.export.families.windows import sliding_layers

if TYPE_CHECKING:
    from transformers import (
        Cohere2Config,
        Cohere2MoeConfig,
        CohereCompassTextConfig,
        CohereConfig,
    )

ONE_NORM = {role: name for role, name in NAMES.items() if role != "mlp_norm"}


def cohere(config: CohereConfig) -> Family:
    """Raises KvlatheError for layer norms of single heads (Command R+)."""
    if config.use_qk_norm:
        raise KvlatheError(
            "the checkpoint normalizes each head's queries and keys by a norm of its own",
            "the decoder has one QK-norm for all heads of a layer",
            "choose a model without use_qk_norm",
        )
    return _parallel(config)


def cohere2(config: Cohere2Config) -> Family:
    """Layers without a window have no positions."""
    windows = sliding_layers(config)
    ropes = tuple("" if window else None for window in windows)
    return replace(_parallel(config), windows=windows, ropes=ropes)


def cohere_compass(config: CohereCompassTextConfig) -> Family:
    """Each kind of layers has a RoPE of its own, or none; it turns halves of a head."""
    given = config.rope_parameters or {}
    kinds = config.layer_types or ()
    return replace(
        _parallel(config),
        interleaved=False,
        windows=sliding_layers(config),
        ropes=tuple(kind if given.get(kind) else None for kind in kinds),
    )


def cohere2_moe(config: Cohere2MoeConfig) -> Family:
    """Experts in most layers, chosen by their logits. The first layers may have plain
    MLPs, and positions without a window."""
    windows = sliding_layers(config)
    dense = not_sparse(config.mlp_layer_types)
    turns = dense if config.prefix_dense_sliding_window_pattern == 1 else ()
    ropes = tuple(
        "" if window or i in turns else None for i, window in enumerate(windows)
    )
    shared = config.num_shared_experts
    averaged = shared and config.shared_expert_combination_strategy == "average"
    factors = dict.fromkeys(("experts_down", "shared_down"), 0.5 if averaged else 1.0)
    sigmoid = config.expert_selection_fn == "sigmoid"
    experts = Experts(
        count=config.num_experts,
        chosen=config.num_experts_per_tok,
        intermediate_size=config.intermediate_size,
        normalized=config.norm_topk_prob or not sigmoid,
        scores="sigmoid" if sigmoid else "softmax",
    )
    kept = {role: name for role, name in ONE_NORM.items() if role not in PLAIN}
    rms = config.rms_norm_eps is not None
    family = replace(
        _parallel(config),
        names=kept | EXPERTS | (SHARED if shared else {}),
        norm="rms" if rms else "layer",
        norm_eps=(config.rms_norm_eps if rms else config.layer_norm_eps) or 0.0,
        intermediate_size=config.intermediate_size * shared,
        windows=windows,
        ropes=ropes,
        experts=experts,
        factors={"norm": config.logit_scale or 1.0} | factors,
        settings=("logit_scale", *COUNTS),
    )
    return with_dense(family, dense, config.prefix_dense_intermediate_size or 0)


def _parallel(
    config: CohereConfig | Cohere2Config | Cohere2MoeConfig | CohereCompassTextConfig,
) -> Family:
    return Family(
        names=ONE_NORM,
        norm="layer",
        norm_eps=config.layer_norm_eps or 0.0,
        norm_bias=False,
        activation=config.hidden_act,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        parallel=True,
        interleaved=True,
        factors={"norm": config.logit_scale or 1.0},
        settings=("logit_scale",),
    )
