"""Phi 1, 1.5 and 2, GPT-NeoX and Pythia, OPT, BioGPT, XGLM and Persimmon: layer norms
and biases, plain MLPs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from kvlathe.base.errors import KvlatheError
from kvlathe.export.families.family import Family

if TYPE_CHECKING:
    from transformers import (
        BioGptConfig,
        GPTNeoXConfig,
        GPTNeoXJapaneseConfig,
        OPTConfig,
        PersimmonConfig,
        PhiConfig,
        XGLMConfig,
    )

PHI_NAMES = {
    "embed": "model.embed_tokens",
    "attn_norm": "model.layers.{i}.input_layernorm",
    "q": "model.layers.{i}.self_attn.q_proj",
    "k": "model.layers.{i}.self_attn.k_proj",
    "v": "model.layers.{i}.self_attn.v_proj",
    "o": "model.layers.{i}.self_attn.dense",
    "up": "model.layers.{i}.mlp.fc1",
    "down": "model.layers.{i}.mlp.fc2",
    "norm": "model.final_layernorm",
    "head": "lm_head",
}
NEOX_NAMES = {
    "embed": "gpt_neox.embed_in",
    "attn_norm": "gpt_neox.layers.{i}.input_layernorm",
    "qkv": "gpt_neox.layers.{i}.attention.query_key_value",
    "o": "gpt_neox.layers.{i}.attention.dense",
    "mlp_norm": "gpt_neox.layers.{i}.post_attention_layernorm",
    "up": "gpt_neox.layers.{i}.mlp.dense_h_to_4h",
    "down": "gpt_neox.layers.{i}.mlp.dense_4h_to_h",
    "norm": "gpt_neox.final_layer_norm",
    "head": "embed_out",
}
OPT_NAMES = {
    "embed": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "attn_norm": "model.decoder.layers.{i}.self_attn_layer_norm",
    "q": "model.decoder.layers.{i}.self_attn.q_proj",
    "k": "model.decoder.layers.{i}.self_attn.k_proj",
    "v": "model.decoder.layers.{i}.self_attn.v_proj",
    "o": "model.decoder.layers.{i}.self_attn.out_proj",
    "mlp_norm": "model.decoder.layers.{i}.final_layer_norm",
    "up": "model.decoder.layers.{i}.fc1",
    "down": "model.decoder.layers.{i}.fc2",
    "norm": "model.decoder.final_layer_norm",
    "head": "lm_head",
}
XGLM_NAMES = {
    role: name.replace("model.decoder.", "model.") for role, name in OPT_NAMES.items()
} | {"norm": "model.layer_norm"}
BIOGPT_NAMES = {
    role: name.replace("model.", "biogpt.") for role, name in XGLM_NAMES.items()
} | {"head": "output_projection"}
PERSIMMON_NAMES = {
    "embed": "model.embed_tokens",
    "attn_norm": "model.layers.{i}.input_layernorm",
    "qkv": "model.layers.{i}.self_attn.query_key_value",
    "o": "model.layers.{i}.self_attn.dense",
    "mlp_norm": "model.layers.{i}.post_attention_layernorm",
    "up": "model.layers.{i}.mlp.dense_h_to_4h",
    "down": "model.layers.{i}.mlp.dense_4h_to_h",
    "norm": "model.final_layernorm",
    "head": "lm_head",
}
HEAD_NORMS = {
    "q_norm": "model.layers.{i}.self_attn.q_layernorm",
    "k_norm": "model.layers.{i}.self_attn.k_layernorm",
}
OPT_ROWS = 2
"""Rows at the start of the table of positions that belong to no token."""
LAYER_NORM_EPS = 1e-5
"""torch's own, which OPT leaves."""


class Older(Protocol):
    """Fields that are read of a configuration; these families spell them alike."""

    @property
    def hidden_act(self) -> str: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...


def phi(config: PhiConfig) -> Family:
    """Raises KvlatheError for a tied head, which has a bias beside it."""
    if config.tie_word_embeddings:
        raise KvlatheError(
            "config.json sets tie_word_embeddings",
            "the head has a bias that no embedding has",
            "choose a Phi with a head of its own",
        )
    return replace(
        _biased(config),
        names=PHI_NAMES | (HEAD_NORMS if config.qk_layernorm else {}),
        norm_eps=config.layer_norm_eps,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_bias=True,
        parallel=True,
        partial_rotary=True,
        qk_norm="layer",
    )


def gpt_neox(config: GPTNeoXConfig) -> Family:
    return replace(
        _biased(config),
        names=NEOX_NAMES,
        norm_eps=config.layer_norm_eps,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        parallel=config.use_parallel_residual,
        grouped_qkv=True,
        partial_rotary=True,
    )


def gpt_neox_japanese(config: GPTNeoXJapaneseConfig) -> Family:
    """Maps have no biases, but for the last layer's W_O."""
    names = NEOX_NAMES.items()
    return Family(
        names={x: at.replace("gpt_neox", "gpt_neox_japanese") for x, at in names}
        | {"norm": "gpt_neox_japanese.final_layer_norm"},
        norm="layer",
        norm_eps=config.layer_norm_eps,
        activation=config.hidden_act,
        kv_heads=config.num_attention_heads,
        intermediate_size=int(config.hidden_size * config.intermediate_multiple_size),
        out_bias=True,
        out_bias_in=(config.num_hidden_layers - 1,),
        grouped_qkv=True,
        partial_rotary=True,
        spellings={"attention.dense.bias": "attention.dense_bias"},
    )


def opt(config: OPTConfig) -> Family:
    """Raises KvlatheError for the 350M model, whose norms come after each block and
    whose embeddings are projected."""
    narrow = config.word_embed_proj_dim not in (None, config.hidden_size)
    endless = config.to_dict().get("_remove_final_layer_norm")
    if narrow or endless or not config.do_layer_norm_before:
        raise KvlatheError(
            "the checkpoint is an OPT that normalizes after its blocks",
            "the decoder normalizes before them",
            "choose another OPT",
        )
    if not config.layer_norm_elementwise_affine:
        raise KvlatheError(
            "the checkpoint's norms have no weights",
            "the decoder's have",
            "choose another OPT",
        )
    return Family(
        names=OPT_NAMES,
        norm="layer",
        norm_eps=LAYER_NORM_EPS,
        activation=config.activation_function,
        kv_heads=config.num_attention_heads,
        intermediate_size=config.ffn_dim,
        qkv_bias=config.enable_bias,
        out_bias=config.enable_bias,
        mlp_bias=config.enable_bias,
        position_offset=OPT_ROWS,
    )


def biogpt(config: BioGptConfig) -> Family:
    """Embeddings are scaled."""
    scale = config.hidden_size**0.5 if config.scale_embedding else 1.0
    return replace(
        _biased(config),
        names=BIOGPT_NAMES,
        position_offset=OPT_ROWS,
        factors={"embed": scale},
    )


def xglm(config: XGLMConfig) -> Family:
    """Positions are sines. Raises KvlatheError for cross-attention."""
    if config.add_cross_attention:
        raise KvlatheError(
            "the checkpoint has cross-attention",
            "only decoders are supported",
            "choose a plain XGLM",
        )
    scale = config.d_model**0.5 if config.scale_embedding else 1.0
    return Family(
        names=XGLM_NAMES,
        norm="layer",
        norm_eps=LAYER_NORM_EPS,
        activation=config.activation_function,
        kv_heads=config.attention_heads,
        intermediate_size=config.ffn_dim,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        position_offset=OPT_ROWS,
        sinusoidal=True,
        factors={"embed": scale},
    )


def persimmon(config: PersimmonConfig) -> Family:
    """RoPE on a part of each head, and QK-norms that are layer norms."""
    return replace(
        _biased(config),
        names=PERSIMMON_NAMES | (HEAD_NORMS if config.qk_layernorm else {}),
        norm_eps=config.layer_norm_eps,
        grouped_qkv=True,
        partial_rotary=True,
        qk_norm="layer",
    )


def _biased(config: Older) -> Family:
    """Layer norms, a KV head for each query head, a plain MLP, biases everywhere."""
    return Family(
        names={},
        norm="layer",
        norm_eps=LAYER_NORM_EPS,
        activation=config.hidden_act,
        kv_heads=config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )
