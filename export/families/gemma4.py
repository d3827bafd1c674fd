"""Gemma 4 (text): full layers have other heads than those with windows, the last layers may
read the keys and values of earlier ones, and every layer may be given embeddings of its
own. Values pass a norm; in some models they are what keys are made of. Experts, where
there are any, are beside a dense MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kvlathe.base.errors import KvlatheError
from kvlathe.export.families.family import Experts, Family
from kvlathe.export.families.gemma import FOUR_NORMS
from kvlathe.export.families.llama import NAMES
from kvlathe.export.families.qwen import QK_NORMS
from kvlathe.export.families.windows import sliding_layers
from kvlathe.plan.heads import HeadShape

if TYPE_CHECKING:
    from transformers import (
        Gemma3nTextConfig,
        Gemma4TextConfig,
        Gemma4UnifiedTextConfig,
    )

LAYER = "model.layers.{i}."
INPUTS = {
    "inputs_embed": "model.embed_tokens_per_layer",
    "inputs_project": "model.per_layer_model_projection",
    "inputs_norm": "model.per_layer_projection_norm",
    "inputs_gate": f"{LAYER}per_layer_input_gate",
    "inputs_out": f"{LAYER}per_layer_projection",
    "inputs_out_norm": f"{LAYER}post_per_layer_input_norm",
}
EXPERTS = {
    "router": f"{LAYER}router.proj",
    "router_scale": f"{LAYER}router.scale",
    "expert_scales": f"{LAYER}router.per_expert_scale",
    "experts_in_norm": f"{LAYER}pre_feedforward_layernorm_2",
    "experts_gate_up": f"{LAYER}experts.gate_up_proj",
    "experts_down": f"{LAYER}experts.down_proj",
    "dense_norm": f"{LAYER}post_feedforward_layernorm_1",
    "experts_norm": f"{LAYER}post_feedforward_layernorm_2",
}
OF_CACHE = ("k", "v", "k_norm")
"""Roles that a layer lacks which reads another's cache."""
STORED = ("k_proj", "v_proj", "k_norm", "v_norm")
"""Tensors that checkpoints may store of it all the same."""
FULL = "full_attention"


def gemma4(config: Gemma4TextConfig) -> Family:
    """Raises KvlatheError where queries see later tokens, and where embeddings of layers
    are of other tokens than the model's."""
    family = gemma4_unified(config)
    names = dict(family.names)
    names |= EXPERTS if config.enable_moe_block else {}
    names |= _inputs(config)
    return replace(
        family,
        names=names,
        dense_names=names,
        layer_inputs=config.hidden_size_per_layer_input,
        experts=_experts(config) if config.enable_moe_block else None,
        factors={**family.factors, **halved_inputs(config)},
        settings=(*family.settings, "num_experts"),
    )


def gemma4_unified(config: Gemma4TextConfig | Gemma4UnifiedTextConfig) -> Family:
    """The 12B: without experts, and without embeddings for each layer. Raises
    KvlatheError where queries see later tokens."""
    if config.use_bidirectional_attention == "all":
        raise KvlatheError(
            "config.json sets use_bidirectional_attention",
            "an engine's queries see earlier tokens alone",
            "choose a model that writes text",
        )
    layers = range(config.num_hidden_layers)
    own = [config.per_layer_config[layer] for layer in layers]
    sources = sources_of(config)
    heads: list[HeadShape] = []
    for one, kind in zip(own, config.layer_types or (), strict=True):
        turned = _turned(config, one.head_dim) if kind == FULL and not sources else 0
        heads.append(HeadShape(one.num_key_value_heads, one.head_dim, turned))
    names = NAMES | FOUR_NORMS | QK_NORMS | {"scalar": f"{LAYER}layer_scalar"}
    wide = readers(sources) if config.use_double_wide_mlp else ()
    return Family(
        names=names,
        norm="rms",
        norm_eps=config.rms_norm_eps,
        activation=config.hidden_activation,
        kv_heads=max(one.kv_heads for one in heads),
        own_heads=() if {*heads} == {_most(config)} else tuple(heads),
        sources=sources,
        lacks=_lacks(config, sources),
        intermediate_size=config.intermediate_size,
        dense=wide,
        dense_names=names,
        dense_size=2 * config.intermediate_size,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        partial_rotary=True,
        ropes=tuple(config.layer_types or ()),
        windows=sliding_layers(config),
        scales=(1.0,) * config.num_hidden_layers,
        value_norm=True,
        factors={"embed": config.hidden_size**0.5},
        logit_softcap=config.final_logit_softcapping or 0.0,
        beside=unread(sources),
        settings=("final_logit_softcapping",),
    )


def _most(config: Gemma4TextConfig | Gemma4UnifiedTextConfig) -> HeadShape:
    """The heads of layers that override nothing."""
    return HeadShape(config.num_key_value_heads, config.head_dim)


def _turned(config: Gemma4TextConfig | Gemma4UnifiedTextConfig, head_dim: int) -> int:
    """Dims that RoPE turns of a full layer's keys, where values are what keys are made
    of, and fewer than all dims turn."""
    parameters = (config.rope_parameters or {}).get(FULL) or {}
    share = parameters.get("partial_rotary_factor", 1.0)
    if not config.attention_k_eq_v or parameters.get("rope_type") != "proportional":
        return 0
    turned = 2 * int(share * head_dim // 2)
    return turned if turned < head_dim else 0


def sources_of(
    config: Gemma3nTextConfig | Gemma4TextConfig | Gemma4UnifiedTextConfig,
) -> tuple[int, ...]:
    """The layer whose cache each layer reads: of the last ones, the last of their kind
    that has one. Empty where every layer has."""
    if not config.num_kv_shared_layers:
        return ()
    kinds = config.layer_types or []
    first = config.num_hidden_layers - config.num_kv_shared_layers
    last = {kind: layer for layer, kind in enumerate(kinds[:first])}
    if missing := {*kinds[first:]} - last.keys():
        raise KvlatheError(
            f"config.json has layers of the kind {missing.pop()} without keys and values",
            "no layer before them has any of that kind",
            "correct config.json",
        )
    return (*range(first), *(last[kind] for kind in kinds[first:]))


def readers(sources: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(layer for layer, source in enumerate(sources) if source != layer)


def _lacks(
    config: Gemma4TextConfig | Gemma4UnifiedTextConfig, sources: tuple[int, ...]
) -> Mapping[int, tuple[str, ...]]:
    lacked: dict[int, tuple[str, ...]] = {}
    if config.attention_k_eq_v:
        kinds = enumerate(config.layer_types or ())
        lacked = {layer: ("v",) for layer, kind in kinds if kind == FULL}
    return lacked | dict.fromkeys(readers(sources), OF_CACHE)


def unread(sources: tuple[int, ...]) -> tuple[str, ...]:
    """Stored tensors that no layer reads, as their names begin."""
    inside = ("", "language_model.")
    return tuple(
        f"{part}layers.{layer}.self_attn.{name}"
        for part in inside
        for layer in readers(sources)
        for name in STORED
    )


def _inputs(config: Gemma4TextConfig) -> Mapping[str, str]:
    if not config.hidden_size_per_layer_input:
        return {}
    if config.vocab_size_per_layer_input != config.vocab_size:
        raise KvlatheError(
            f"config.json has vocab_size_per_layer_input {config.vocab_size_per_layer_input}",
            f"the model's tokens are {config.vocab_size}",
            "correct config.json",
        )
    return INPUTS


def _experts(config: Gemma4TextConfig) -> Experts:
    return Experts(
        count=config.num_experts or 0,
        chosen=config.top_k_experts or 0,
        intermediate_size=config.moe_intermediate_size or 0,
        normalized=True,
        stacked=True,
        out_in=True,
        halves=True,
        beside=True,
    )


def halved_inputs(
    config: Gemma3nTextConfig | Gemma4TextConfig,
) -> Mapping[str, float]:
    """Tokens' own inputs of layers and those of their hidden states count half each, in
    squares: 1/sqrt(2) is in either."""
    half = 0.5**0.5
    return {
        "inputs_embed": half * config.hidden_size_per_layer_input**0.5,
        "inputs_project": config.hidden_size**-0.5,
        "inputs_norm": half,
    }
