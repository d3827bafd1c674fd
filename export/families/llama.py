"""Llama 2 and 3.x, Yi, and the names that Mistral and Qwen share with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlathe.export.families.family import Family

if TYPE_CHECKING:
    from transformers import LlamaConfig

NAMES = {
    "embed": "model.embed_tokens",
    "attn_norm": "model.layers.{i}.input_layernorm",
    "q": "model.layers.{i}.self_attn.q_proj",
    "k": "model.layers.{i}.self_attn.k_proj",
    "v": "model.layers.{i}.self_attn.v_proj",
    "o": "model.layers.{i}.self_attn.o_proj",
    "mlp_norm": "model.layers.{i}.post_attention_layernorm",
    "gate": "model.layers.{i}.mlp.gate_proj",
    "up": "model.layers.{i}.mlp.up_proj",
    "down": "model.layers.{i}.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}


def llama(config: LlamaConfig) -> Family:
    return Family(
        names=NAMES,
        norm="rms",
        norm_eps=config.rms_norm_eps,
        activation=config.hidden_act,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )
