"""GPT-J and CodeGen (a parallel block with one norm, RoPE of neighbouring dims), GPT-Neo
(windows in every other layer), GPT-BigCode (one KV head): layer norms, plain MLPs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvlathe.base.errors import KvlatheError
from kvlathe.export.families.family import Family
from kvlathe.export.families.gpt2 import gpt2

if TYPE_CHECKING:
    from transformers import (
        CodeGenConfig,
        GPTBigCodeConfig,
        GPTJConfig,
        GPTNeoConfig,
    )

AROUND = {
    "embed": "transformer.wte",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "attn_norm": "transformer.h.{i}.ln_1",
}
GPTJ_NAMES = AROUND | {
    "q": "transformer.h.{i}.attn.q_proj",
    "k": "transformer.h.{i}.attn.k_proj",
    "v": "transformer.h.{i}.attn.v_proj",
    "o": "transformer.h.{i}.attn.out_proj",
    "up": "transformer.h.{i}.mlp.fc_in",
    "down": "transformer.h.{i}.mlp.fc_out",
}
CODEGEN_NAMES = {
    role: name for role, name in GPTJ_NAMES.items() if role not in ("q", "k", "v")
} | {"qkv": "transformer.h.{i}.attn.qkv_proj"}
LEARNED = AROUND | {
    "positions": "transformer.wpe",
    "mlp_norm": "transformer.h.{i}.ln_2",
    "up": "transformer.h.{i}.mlp.c_fc",
    "down": "transformer.h.{i}.mlp.c_proj",
}
NEO_NAMES = LEARNED | {
    "q": "transformer.h.{i}.attn.attention.q_proj",
    "k": "transformer.h.{i}.attn.attention.k_proj",
    "v": "transformer.h.{i}.attn.attention.v_proj",
    "o": "transformer.h.{i}.attn.attention.out_proj",
}
BASE = 10000.0
"""The base of RoPE, which the models have and their configurations do not."""
BLOCKS = 4
"""Blocks of CodeGen's qkv."""


def gptj(config: GPTJConfig) -> Family:
    """Raises as ``_parallel``."""
    return _parallel(config, GPTJ_NAMES)


def codegen(config: CodeGenConfig) -> Family:
    """GPT-J with a fused qkv in blocks. Raises as ``_parallel``."""
    return replace(_parallel(config, CODEGEN_NAMES), qkv_blocks=BLOCKS)


def _parallel(config: GPTJConfig | CodeGenConfig, names: dict[str, str]) -> Family:
    """Raises KvlatheError for a tied head, which has a bias beside it."""
    if config.tie_word_embeddings:
        raise KvlatheError(
            "config.json sets tie_word_embeddings",
            "the head has a bias that no embedding has",
            "choose a model with a head of its own",
        )
    share = config.rotary_dim * config.n_head / config.n_embd
    return Family(
        names=names,
        norm="layer",
        norm_eps=config.layer_norm_epsilon,
        activation=config.activation_function,
        kv_heads=config.n_head,
        intermediate_size=config.n_inner or 4 * config.n_embd,
        mlp_bias=True,
        head_bias=True,
        parallel=True,
        partial_rotary=True,
        interleaved=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": BASE,
            "partial_rotary_factor": share,
        },
    )


def gpt_neo(config: GPTNeoConfig) -> Family:
    """Scores are not scaled."""
    kinds = config.attention_layers
    return Family(
        names=NEO_NAMES,
        norm="layer",
        norm_eps=config.layer_norm_epsilon,
        activation=config.activation_function,
        kv_heads=config.num_heads,
        intermediate_size=config.intermediate_size or 4 * config.hidden_size,
        out_bias=True,
        mlp_bias=True,
        windows=tuple(config.window_size if kind == "local" else 0 for kind in kinds),
        scales=(1.0,) * config.num_layers,
    )


def gpt_bigcode(config: GPTBigCodeConfig) -> Family:
    """GPT-2 with one KV head, or many, and weights stored [out, in]. Raises KvlatheError
    for cross-attention."""
    return replace(
        gpt2(config),
        kv_heads=1 if config.multi_query else config.n_head,
        grouped_qkv=not config.multi_query,
        in_out=False,
    )
