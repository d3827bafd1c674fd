"""Phi-3, Phi-3.5 and Phi-4(-mini): fused qkv and gate_up, LongRoPE, RoPE on a part of
each head."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvlathe.export.families.family import Family
from kvlathe.export.families.llama import NAMES, gated
from kvlathe.export.families.windows import every_layer

if TYPE_CHECKING:
    from transformers import Phi3Config, Phi4MultimodalConfig

FUSED = {
    "qkv": "model.layers.{i}.self_attn.qkv_proj",
    "gate_up": "model.layers.{i}.mlp.gate_up_proj",
}
PHI3_NAMES = {
    role: name
    for role, name in NAMES.items()
    if role not in ("q", "k", "v", "gate", "up")
} | FUSED


def phi3(config: Phi3Config | Phi4MultimodalConfig) -> Family:
    return replace(
        gated(config),
        names=PHI3_NAMES,
        partial_rotary=True,
        windows=every_layer(config),
    )


def phi4_multimodal(config: Phi4MultimodalConfig) -> Family:
    """The text part of a model that also reads images and hears."""
    return replace(phi3(config), beside=("embed_tokens_extend.",))
