"""Falcon: 7B (parallel block, one KV head), 40B, 180B, 11B (grouped fused qkv, two
norms or one), RW without ALiBi."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlathe.base.errors import KvlatheError
from kvlathe.export.families.family import Family

if TYPE_CHECKING:
    from transformers import FalconConfig

NAMES = {
    "embed": "transformer.word_embeddings",
    "qkv": "transformer.h.{i}.self_attention.query_key_value",
    "o": "transformer.h.{i}.self_attention.dense",
    "up": "transformer.h.{i}.mlp.dense_h_to_4h",
    "down": "transformer.h.{i}.mlp.dense_4h_to_h",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
ONE_NORM = {"attn_norm": "transformer.h.{i}.input_layernorm"}
TWO_NORMS = {
    "attn_norm": "transformer.h.{i}.ln_attn",
    "mlp_norm": "transformer.h.{i}.ln_mlp",
}
SEQUENTIAL = ONE_NORM | {"mlp_norm": "transformer.h.{i}.post_attention_layernorm"}


def falcon(config: FalconConfig) -> Family:
    """Raises KvlatheError for ALiBi and for norms that the released code has no meaning
    for."""
    if config.alibi:
        raise KvlatheError(
            "the checkpoint uses ALiBi positions",
            "they add a bias by distance to every score, which attention here does not",
            "choose a Falcon checkpoint with rotary positions",
        )
    new, bias = bool(config.new_decoder_architecture), bool(config.bias)
    if config.new_decoder_architecture:
        kv_heads = config.num_kv_heads or config.num_attention_heads
    else:
        kv_heads = 1 if config.multi_query else config.num_attention_heads
    return Family(
        names=NAMES | _norms(config, new),
        norm="layer",
        norm_eps=config.layer_norm_epsilon or 0.0,
        activation=config.activation or "gelu",
        kv_heads=kv_heads,
        intermediate_size=config.ffn_hidden_size or 4 * config.hidden_size,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        parallel=new or bool(config.parallel_attn),
        grouped_qkv=True,
    )


def _norms(config: FalconConfig, new: bool) -> dict[str, str]:
    norms = config.num_ln_in_parallel_attn or (2 if new else 1)
    if not config.parallel_attn and not new:
        return SEQUENTIAL
    if norms not in (1, 2) or (norms == 2 and not new) or not config.parallel_attn:
        raise KvlatheError(
            f"config.json asks for {norms} norms with parallel_attn {config.parallel_attn}",
            f"Falcon has no such block where new_decoder_architecture is {new}",
            "correct config.json",
        )
    return TWO_NORMS if norms == 2 else ONE_NORM
