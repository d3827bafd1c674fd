"""Mistral and Ministral, InternLM 2, SmolLM3, Helium, Ernie 4.5, Arcee, Seed-OSS, Nemotron,
StarCoder2, Apertus, Jais 2, OLMo, CWM and NanoChat: Llama with a few differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kvlathe.base.errors import KvlatheError
from kvlathe.export.families.family import Family
from kvlathe.export.families.llama import NAMES, biased, gated, llama
from kvlathe.export.families.qwen import QK_NORMS
from kvlathe.export.families.windows import every_layer, sliding_layers
from kvlathe.layers.temperature import Temperature

if TYPE_CHECKING:
    from transformers import (
        ApertusConfig,
        ArceeConfig,
        CwmConfig,
        Ernie4_5Config,
        HeliumConfig,
        Jais2Config,
        LlamaConfig,
        Ministral3Config,
        MinistralConfig,
        MistralConfig,
        NanoChatConfig,
        NemotronConfig,
        OlmoConfig,
        SeedOssConfig,
        SmolLM3Config,
        Starcoder2Config,
    )


OLMO_EPS = 1e-5
PLAIN_MLP = {role: name for role, name in NAMES.items() if role != "gate"}
STARCODER_MLP = {
    "up": "model.layers.{i}.mlp.c_fc",
    "down": "model.layers.{i}.mlp.c_proj",
}
INTERNLM2 = {
    "embed": "model.tok_embeddings",
    "attn_norm": "model.layers.{i}.attention_norm",
    "qkv": "model.layers.{i}.attention.wqkv",
    "o": "model.layers.{i}.attention.wo",
    "mlp_norm": "model.layers.{i}.ffn_norm",
    "gate": "model.layers.{i}.feed_forward.w1",
    "up": "model.layers.{i}.feed_forward.w3",
    "down": "model.layers.{i}.feed_forward.w2",
    "norm": "model.norm",
    "head": "output",
}


def mistral(config: MistralConfig) -> Family:
    """Llama without biases. The first release has a window in every layer."""
    return replace(gated(config), windows=every_layer(config))


def ministral(config: MinistralConfig) -> Family:
    """Mistral with windows in some layers."""
    return replace(gated(config), windows=sliding_layers(config))


def ministral3(config: Ministral3Config) -> Family:
    """Mistral whose queries grow with their positions."""
    return replace(
        gated(config),
        windows=every_layer(config),
        temperature=temperature_of(config.rope_parameters),
    )


def temperature_of(rope: Mapping[str, object] | None) -> Temperature | None:
    """The growth of queries, which Mistral's configurations have beside RoPE."""
    names = "llama_4_scaling_beta", "original_max_position_embeddings"
    beta, length = (float(str((rope or {}).get(name) or 0)) for name in names)
    return Temperature(beta, length) if beta and length else None


def internlm2(config: LlamaConfig) -> Family:
    """Llama under names of its own; q, k and v lie in one tensor, KV head by KV head.
    What its configurations call ``bias`` is of attention."""
    bias = bool(getattr(config, "bias", False))
    return replace(
        gated(config),
        names=INTERNLM2,
        qkv_bias=bias,
        out_bias=bias,
        grouped_qkv=True,
    )


def cwm(config: CwmConfig) -> Family:
    """Llama with windows in most layers."""
    return replace(gated(config), windows=sliding_layers(config))


def smollm3(config: SmolLM3Config) -> Family:
    """Some layers have no positions."""
    return replace(
        llama(config),
        windows=sliding_layers(config),
        ropes=tuple("" if turns else None for turns in config.no_rope_layers or ()),
        settings=("no_rope_layers",),
    )


def apertus(config: ApertusConfig) -> Family:
    """QK-norms, and a plain MLP whose activation is learned (xIELU)."""
    own = {
        "attn_norm": "model.layers.{i}.attention_layernorm",
        "mlp_norm": "model.layers.{i}.feedforward_layernorm",
    }
    if config.hidden_act == "xielu":
        own["curve"] = "model.layers.{i}.mlp.act_fn"
    return replace(
        biased(config),
        names=PLAIN_MLP | QK_NORMS | own,
    )


def jais2(config: Jais2Config) -> Family:
    """Layer norms and a plain MLP."""
    return Family(
        names=PLAIN_MLP,
        norm="layer",
        norm_eps=config.layer_norm_eps,
        activation=config.hidden_act,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )


def olmo(config: OlmoConfig) -> Family:
    """Layer norms without weights. Raises KvlatheError for clipped q, k and v."""
    if config.clip_qkv is not None:
        raise KvlatheError(
            f"config.json sets clip_qkv to {config.clip_qkv:g}",
            "no record bounds q, k and v",
            "choose another checkpoint",
        )
    return Family(
        names=NAMES,
        norm="layer",
        norm_eps=OLMO_EPS,
        norm_weight=False,
        norm_bias=False,
        activation=config.hidden_act,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )


def nanochat(config: NanoChatConfig) -> Family:
    """Norms without weights, one of them before the first layer; RoPE that turns
    against its usual sense. QK-norms follow RoPE there: as they have no weights, their
    order does not matter. Raises KvlatheError for a tied head."""
    if config.tie_word_embeddings:
        raise KvlatheError(
            "config.json sets tie_word_embeddings",
            "the norm of embeddings becomes a part of them, and is none of the head",
            "choose a NanoChat with a head of its own",
        )
    own = {"up": "model.layers.{i}.mlp.fc1", "down": "model.layers.{i}.mlp.fc2"}
    return replace(
        biased(config),
        names=PLAIN_MLP | QK_NORMS | own,
        norm_weight=False,
        qk_norm_weight=False,
        embed_norm=True,
        backward=True,
        logit_softcap=config.final_logit_softcapping or 0.0,
        settings=("final_logit_softcapping",),
    )


def helium(config: HeliumConfig) -> Family:
    return replace(llama(config), out_bias=False, interleaved=True)


def ernie(config: Ernie4_5Config) -> Family:
    return replace(
        gated(config),
        qkv_bias=bool(config.use_bias),
        out_bias=bool(config.use_bias),
        mlp_bias=bool(config.use_bias),
        interleaved=True,
    )


def paddleocr_vl(config: Ernie4_5Config) -> Family:
    """Ernie 4.5 whose RoPE turns halves of a head: the text of PaddleOCR-VL."""
    return replace(ernie(config), interleaved=False)


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
