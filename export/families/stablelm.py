"""StableLM 2 (1.6B), StableLM 3B and Stable Code: layer norms, RoPE on a part of each
head, and in some models a parallel block with one norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlathe.base.errors import KvlatheError
from kvlathe.export.families.family import Family
from kvlathe.export.families.llama import NAMES

if TYPE_CHECKING:
    from transformers import StableLmConfig


def stablelm(config: StableLmConfig) -> Family:
    """Raises KvlatheError for layer norms of single heads (the 12B model)."""
    if config.qk_layernorm:
        raise KvlatheError(
            "the checkpoint normalizes each head's queries and keys by a norm of its own",
            "the decoder has one QK-norm for all heads of a layer",
            "choose a StableLM without qk_layernorm",
        )
    parallel = bool(config.use_parallel_residual)
    names = {
        role: name
        for role, name in NAMES.items()
        if not (parallel and role == "mlp_norm")
    }
    return Family(
        names=names,
        norm="layer",
        norm_eps=config.layer_norm_eps,
        activation=config.hidden_act,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        qkv_bias=bool(config.use_qkv_bias),
        parallel=parallel,
        partial_rotary=True,
    )
