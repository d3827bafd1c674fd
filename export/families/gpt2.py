"""GPT-1 and GPT-2: learned positions, no RoPE, biases everywhere, fused qkv, weights stored [in,
out]."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlathe.base.errors import KvlatheError
from kvlathe.export.families.family import Family

if TYPE_CHECKING:
    from transformers import GPT2Config, GPTBigCodeConfig, OpenAIGPTConfig

NAMES = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "attn_norm": "transformer.h.{i}.ln_1",
    "qkv": "transformer.h.{i}.attn.c_attn",
    "o": "transformer.h.{i}.attn.c_proj",
    "mlp_norm": "transformer.h.{i}.ln_2",
    "up": "transformer.h.{i}.mlp.c_fc",
    "down": "transformer.h.{i}.mlp.c_proj",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}


GPT1_NAMES = {
    role: name for role, name in NAMES.items() if role not in ("attn_norm", "mlp_norm")
} | {
    "embed": "transformer.tokens_embed",
    "positions": "transformer.positions_embed",
    "attn_sum_norm": "transformer.h.{i}.ln_1",
    "mlp_sum_norm": "transformer.h.{i}.ln_2",
}
ACTIVATIONS = {"gelu": "gelu_new", "silu": "silu", "swish": "silu", "relu": "relu"}
"""GPT-1's names of activations -> those of all others."""


def openai_gpt(config: OpenAIGPTConfig) -> Family:
    """Norms of GPT-1 follow the sums with the residual. The last layer's is the one that
    the head reads."""
    last = config.n_layer - 1
    return Family(
        names=GPT1_NAMES | {"norm": f"transformer.h.{last}.ln_2"},
        norm="layer",
        norm_eps=config.layer_norm_epsilon,
        activation=ACTIVATIONS.get(config.afn, config.afn),
        kv_heads=config.n_head,
        intermediate_size=4 * config.n_embd,
        lacks={last: ("mlp_sum_norm",)},
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        in_out=True,
    )


def gpt2(config: GPT2Config | GPTBigCodeConfig) -> Family:
    """Raises KvlatheError for cross-attention."""
    if config.add_cross_attention:
        raise KvlatheError(
            "the checkpoint has cross-attention",
            "only decoders are supported",
            "choose a plain decoder",
        )
    return Family(
        names=NAMES,
        norm="layer",
        norm_eps=config.layer_norm_epsilon,
        activation=config.activation_function,
        kv_heads=config.n_head,
        intermediate_size=config.n_inner or 4 * config.n_embd,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        in_out=True,
        scales=tuple(_scale(config, layer) for layer in range(config.n_layer)),
    )


def _scale(config: GPT2Config | GPTBigCodeConfig, layer: int) -> float:
    by_width = (config.n_embd // config.n_head) ** -0.5
    scale = by_width if config.scale_attn_weights else 1.0
    # BigCode's configuration has no such field.
    by_layer = getattr(config, "scale_attn_by_inverse_layer_idx", False)
    return scale / (layer + 1) if by_layer else scale
