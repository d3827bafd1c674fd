"""Llama 2 and 3.x, Yi, and the names that Mistral and Qwen share with them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from kvlathe.export.families.family import Family

if TYPE_CHECKING:
    from transformers import MllamaTextConfig


class Heads(Protocol):
    """Fields that are read of a configuration; most families spell them alike."""

    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def hidden_act(self) -> str: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int | None: ...


class Gated(Heads, Protocol):
    @property
    def intermediate_size(self) -> int: ...


class Biased(Gated, Protocol):
    @property
    def attention_bias(self) -> bool: ...


class LlamaLike(Biased, Protocol):
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

IMAGE_ROWS = 8
"""Rows that Llama 3.2 Vision's embeddings have past the vocabulary."""


def of_columns(config: Heads, columns: int) -> Family:
    """RMS norms, attention, a gated MLP of ``columns``, no biases."""
    return Family(
        names=NAMES,
        norm="rms",
        norm_eps=config.rms_norm_eps,
        activation=config.hidden_act,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        intermediate_size=columns,
    )


def gated(config: Gated) -> Family:
    return of_columns(config, config.intermediate_size)


def biased(config: Biased) -> Family:
    """``gated`` where attention may have biases."""
    bias = config.attention_bias
    return replace(gated(config), qkv_bias=bias, out_bias=bias)


def llama(config: LlamaLike) -> Family:
    return replace(biased(config), mlp_bias=config.mlp_bias)


def mllama(config: MllamaTextConfig) -> Family:
    """The text of Llama 3.2 Vision: layers that attend an image do nothing where there
    is none. Its table has rows of images past the vocabulary."""
    of_images = config.cross_attention_layers or ()
    return replace(
        gated(config),
        more_rows=IMAGE_ROWS,
        lacks=dict.fromkeys(of_images, tuple(NAMES)),
        beside=tuple(f"layers.{layer}." for layer in of_images),
    )
