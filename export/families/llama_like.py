"""Mistral, Granite, SmolLM3, Helium, Ernie 4.5, Arcee, Seed-OSS, Nemotron and StarCoder2:
Llama with a few differences."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvlathe.export.families.family import Family
from kvlathe.export.families.llama import NAMES, llama
from kvlathe.export.families.windows import every_layer, sliding_layers

if TYPE_CHECKING:
    from transformers import (
        ArceeConfig,
        Ernie4_5Config,
        GraniteConfig,
        HeliumConfig,
        MistralConfig,
        NemotronConfig,
        SeedOssConfig,
        SmolLM3Config,
        Starcoder2Config,
    )


MULTIPLIERS = (
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
PLAIN_MLP = {role: name for role, name in NAMES.items() if role != "gate"}
STARCODER_MLP = {
    "up": "model.layers.{i}.mlp.c_fc",
    "down": "model.layers.{i}.mlp.c_proj",
}


def mistral(config: MistralConfig) -> Family:
    """Llama without biases. The first release has a window in every layer."""
    return Family(
        names=NAMES,
        norm="rms",
        norm_eps=config.rms_norm_eps,
        activation=config.hidden_act,
        kv_heads=config.num_key_value_heads,
        intermediate_size=config.intermediate_size,
        windows=every_layer(config),
    )


def granite(config: GraniteConfig) -> Family:
    """Multipliers of embeddings, residuals, scores and logits."""
    residual = float(config.residual_multiplier)
    factors = {
        "embed": float(config.embedding_multiplier),
        "o": residual,
        "down": residual,
        "norm": 1 / config.logits_scaling,
    }
    scales = (float(config.attention_multiplier),) * config.num_hidden_layers
    return replace(llama(config), factors=factors, scales=scales, settings=MULTIPLIERS)


def smollm3(config: SmolLM3Config) -> Family:
    """Some layers have no positions."""
    return replace(
        llama(config),
        windows=sliding_layers(config),
        ropes=tuple("" if turns else None for turns in config.no_rope_layers or ()),
        settings=("no_rope_layers",),
    )


def helium(config: HeliumConfig) -> Family:
    return replace(llama(config), out_bias=False, interleaved=True)


def ernie(config: Ernie4_5Config) -> Family:
    return Family(
        names=NAMES,
        norm="rms",
        norm_eps=config.rms_norm_eps,
        activation=config.hidden_act,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        qkv_bias=bool(config.use_bias),
        out_bias=bool(config.use_bias),
        mlp_bias=bool(config.use_bias),
        interleaved=True,
    )


def seed_oss(config: SeedOssConfig) -> Family:
    """Biases of W_O are switched apart."""
    return replace(llama(config), out_bias=config.attention_out_bias)


def arcee(config: ArceeConfig) -> Family:
    return replace(llama(config), names=PLAIN_MLP)


def nemotron(config: NemotronConfig) -> Family:
    """Layer norms that multiply by 1 + weight, and a plain MLP."""
    return Family(
        names=PLAIN_MLP,
        norm="layer",
        norm_eps=config.norm_eps,
        norm_offset=1.0,
        activation=config.hidden_act,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        partial_rotary=True,
    )


def starcoder2(config: Starcoder2Config) -> Family:
    return Family(
        names=PLAIN_MLP | STARCODER_MLP,
        norm="layer",
        norm_eps=config.norm_epsilon,
        activation=config.hidden_act,
        kv_heads=config.num_key_value_heads,
        intermediate_size=config.intermediate_size,
        qkv_bias=config.use_bias,
        out_bias=config.use_bias,
        mlp_bias=config.use_bias,
        windows=every_layer(config),
    )
