"""Llama 2 and 3.x, Yi, and the names that Mistral and Qwen share with them."""

from __future__ import annotations

from typing import Protocol

from kvlathe.export.families.family import Family


class LlamaLike(Protocol):
    """Fields that are read of a configuration; other families spell them alike."""

    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def hidden_act(self) -> str: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int | None: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def attention_bias(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...


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


def llama(config: LlamaLike) -> Family:
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
