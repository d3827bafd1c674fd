"""Qwen2 and 2.5 (biases on q, k, v) and Qwen3 (RMS norm of each head's q and k before
RoPE)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvlathe.export.families.family import Family
from kvlathe.export.families.llama import NAMES, biased, gated
from kvlathe.export.families.windows import sliding_layers

if TYPE_CHECKING:
    from transformers import Qwen2Config, Qwen3Config
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig

QK_NORMS = {
    "q_norm": "model.layers.{i}.self_attn.q_norm",
    "k_norm": "model.layers.{i}.self_attn.k_norm",
}


def qwen2(config: Qwen2Config) -> Family:
    return replace(
        gated(config),
        qkv_bias=True,
        windows=sliding_layers(config),
    )


def qwen3(config: Qwen3Config) -> Family:
    return replace(qwen3_vl(config), windows=sliding_layers(config))


def qwen3_vl(config: Qwen3Config | Qwen3VLTextConfig) -> Family:
    """Qwen3 without windows: the text of Qwen3-VL. Its RoPE has sections for three
    positions, which are the same number where all tokens are text."""
    return replace(
        biased(config),
        names=NAMES | QK_NORMS,
    )
