"""OLMo 2 and 3, EXAONE 4, GLM-4: norms of what attention and MLP give, in GLM-4 beside
those of what they read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvlathe.export.families.family import Family
from kvlathe.export.families.llama import NAMES, biased, gated
from kvlathe.export.families.phi3 import PHI3_NAMES
from kvlathe.export.families.qwen import QK_NORMS
from kvlathe.export.families.windows import sliding_layers

if TYPE_CHECKING:
    from transformers import (
        Exaone4Config,
        FlexOlmoConfig,
        Glm4Config,
        GlmConfig,
        Olmo2Config,
        Olmo3Config,
    )
    from transformers.models.glm4v.configuration_glm4v import Glm4vTextConfig
    from transformers.models.glm_ocr.configuration_glm_ocr import GlmOcrTextConfig

AFTER = {
    "attn_out_norm": "model.layers.{i}.post_attention_layernorm",
    "mlp_out_norm": "model.layers.{i}.post_feedforward_layernorm",
}
BARE = {
    role: name for role, name in NAMES.items() if role not in ("attn_norm", "mlp_norm")
}
GLM_NAMES = {
    role: name for role, name in NAMES.items() if role not in ("gate", "up")
} | {"gate_up": PHI3_NAMES["gate_up"]}
GLM4_NORMS = {
    "attn_out_norm": "model.layers.{i}.post_self_attn_layernorm",
    "mlp_out_norm": "model.layers.{i}.post_mlp_layernorm",
}


def olmo2(config: Olmo2Config | Olmo3Config | FlexOlmoConfig) -> Family:
    return replace(
        biased(config),
        names=BARE | AFTER | QK_NORMS,
        wide_qk_norm=True,
    )


def olmo3(config: Olmo3Config) -> Family:
    """Layers with windows, and a RoPE of their own."""
    kinds = tuple(config.layer_types or ())
    return replace(olmo2(config), windows=sliding_layers(config), ropes=kinds)


def exaone4(config: Exaone4Config) -> Family:
    """A record of EXAONE 4. If some layers have windows, the others have no
    positions."""
    windows = sliding_layers(config)
    ropes: tuple[str | None, ...] = ()
    if config.sliding_window is not None:
        ropes = tuple("" if window else None for window in windows)
    return replace(
        gated(config),
        names=BARE | AFTER | QK_NORMS,
        windows=windows,
        ropes=ropes,
    )


def glm(config: GlmConfig | Glm4Config) -> Family:
    return replace(
        gated(config),
        names=GLM_NAMES,
        qkv_bias=config.attention_bias,
        partial_rotary=True,
        interleaved=True,
    )


def glm4v(config: Glm4vTextConfig) -> Family:
    """GLM-4 with biases of q, k and v: the text of GLM-4.1V and 4.6V."""
    return replace(glm_ocr(config), qkv_bias=True)


def glm_ocr(config: Glm4vTextConfig | GlmOcrTextConfig) -> Family:
    return replace(
        gated(config),
        names=GLM_NAMES | GLM4_NORMS,
        partial_rotary=True,
        interleaved=True,
    )


def glm4(config: Glm4Config) -> Family:
    return replace(glm(config), names=GLM_NAMES | GLM4_NORMS)
