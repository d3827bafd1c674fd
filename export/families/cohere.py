"""Cohere Command R and its later form with windows: a parallel block with one layer norm
without bias, RoPE of neighbouring dims, scaled logits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvlathe.base.errors import KvlatheError
from kvlathe.export.families.family import Family
from kvlathe.export.families.llama import NAMES
from kvlathe.export.families.windows import sliding_layers

if TYPE_CHECKING:
    from transformers import Cohere2Config, CohereConfig

ONE_NORM = {role: name for role, name in NAMES.items() if role != "mlp_norm"}


def cohere(config: CohereConfig) -> Family:
    """Raises KvlatheError for layer norms of single heads (Command R+)."""
    if config.use_qk_norm:
        raise KvlatheError(
            "the checkpoint normalizes each head's queries and keys by a norm of its own",
            "the decoder has one QK-norm for all heads of a layer",
            "choose a model without use_qk_norm",
        )
    return _parallel(config)


def cohere2(config: Cohere2Config) -> Family:
    """Layers without a window have no positions."""
    windows = sliding_layers(config)
    ropes = tuple("" if window else None for window in windows)
    return replace(_parallel(config), windows=windows, ropes=ropes)


def _parallel(config: CohereConfig | Cohere2Config) -> Family:
    return Family(
        names=ONE_NORM,
        norm="layer",
        norm_eps=config.layer_norm_eps or 0.0,
        norm_bias=False,
        activation=config.hidden_act,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        parallel=True,
        interleaved=True,
        factors={"norm": config.logit_scale or 1.0},
        settings=("logit_scale",),
    )
