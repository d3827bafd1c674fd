"""Gemma 1, 2 and 3 (text): scaled embeddings, norms that multiply by 1 + weight; in 2 and
3 a norm before and after each block and layers with windows, in 3 another RoPE there and
QK-norms."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvlathe.base.errors import KvlatheError
from kvlathe.export.families.family import Family
from kvlathe.export.families.llama import NAMES, biased
from kvlathe.export.families.qwen import QK_NORMS
from kvlathe.export.families.windows import sliding_layers

if TYPE_CHECKING:
    from transformers import (
        Gemma2Config,
        Gemma3TextConfig,
        GemmaConfig,
        VaultGemmaConfig,
    )

FOUR_NORMS = {
    "attn_out_norm": "model.layers.{i}.post_attention_layernorm",
    "mlp_norm": "model.layers.{i}.pre_feedforward_layernorm",
    "mlp_out_norm": "model.layers.{i}.post_feedforward_layernorm",
}
SCALES = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")


def gemma(config: GemmaConfig) -> Family:
    return replace(
        biased(config),
        norm_offset=1.0,
        factors=_embedding(config.hidden_size),
    )


def gemma2(config: Gemma2Config) -> Family:
    return _later(config, NAMES | FOUR_NORMS)


def vaultgemma(config: VaultGemmaConfig) -> Family:
    """Gemma 2 without norms of outputs."""
    return _later(config, NAMES | {"mlp_norm": FOUR_NORMS["mlp_norm"]})


def gemma3(config: Gemma3TextConfig) -> Family:
    """Raises KvlatheError where queries see later tokens."""
    if config.use_bidirectional_attention:
        raise KvlatheError(
            "config.json sets use_bidirectional_attention",
            "an engine's queries see earlier tokens alone",
            "choose a model that writes text",
        )
    return _later(
        config, NAMES | FOUR_NORMS | QK_NORMS, tuple(config.layer_types or ())
    )


def _later(
    config: Gemma2Config | Gemma3TextConfig | VaultGemmaConfig,
    names: dict[str, str],
    ropes: tuple[str, ...] = (),
) -> Family:
    scale = config.query_pre_attn_scalar**-0.5
    return Family(
        names=names,
        norm="rms",
        norm_eps=config.rms_norm_eps,
        norm_offset=1.0,
        activation=config.hidden_activation,
        kv_heads=config.num_key_value_heads,
        intermediate_size=config.intermediate_size,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        windows=sliding_layers(config),
        scales=(scale,) * config.num_hidden_layers,
        ropes=ropes,
        factors=_embedding(config.hidden_size),
        attn_softcap=config.attn_logit_softcapping or 0.0,
        logit_softcap=config.final_logit_softcapping or 0.0,
        settings=SCALES,
    )


def _embedding(hidden_size: int) -> dict[str, float]:
    return {"embed": hidden_size**0.5}
