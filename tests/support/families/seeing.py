"""Settings of models that also read images, whose text has a record of its own. Parts
that see are as small as they can be: no test runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from tests.support.families.sizes import (
    DELTA,
    GRANITE,
    GROUPED,
    MIDDLE_FULL,
    ONE_ROPE,
    PHI,
    sizes,
)

WIDTH = 128
"""Dims of hidden states: parts that see make numbers of as many dims."""
SMALLER = {
    **dict.fromkeys(
        (
            *("hidden_size", "embed_dim", "intermediate_size", "mlp_dim"),
            *("output_channels", "encoder_hidden_size", "projection_dim"),
        ),
        16,
    ),
    **dict.fromkeys(("num_hidden_layers", "depth", "num_layers"), 1),
    **dict.fromkeys(("encoder_layers", "num_res_blocks"), 1),
    **dict.fromkeys(("encoder_ffn_dim", "d_model", "output_dim"), 16),
    **dict.fromkeys(("num_attention_heads", "num_heads", "num_key_value_heads"), 2),
    "encoder_attention_heads": 2,
    **dict.fromkeys(("image_size", "crop_size"), 28),
    **dict.fromkeys(("patch_size", "window_size"), 14),
    **dict.fromkeys(("out_hidden_size", "text_hidden_size"), WIDTH),
    **dict.fromkeys(("num_position_embeddings", "vocab_size"), 9),
}
"""Sizes of parts that see -> small ones."""


def sections(*planes: int, **more: object) -> dict[str, Any]:
    """Positions in three sections of a head, which are the same in text."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(planes)}
    return {"rope_parameters": rope | more}


PLAIN = sizes(WIDTH, 4, 2)
IN_PARTS: dict[str, Any] = sizes(WIDTH, 4, 2, 32, pad_token_id=0) | sections(
    4, 2, 2, partial_rotary_factor=0.5
)
OF_OPT = {"word_embed_proj_dim": WIDTH, "ffn_dim": 88} | sizes(WIDTH, 4, 4)
OF_COHERE: dict[str, Any] = PLAIN | PHI | {"num_hidden_layers": 4, "logit_scale": 1.0}
OF_COHERE |= {"sliding_window": 24}
OF_GRANITE: dict[str, Any] = PLAIN | GRANITE | {"logits_scaling": 1.0}
"""Without a factor of logits, which transformers leaves out of models that read images
or hear."""
OF_DELTAS = sizes(WIDTH, 4, 2, 32, full_attention_interval=2, **DELTA)
TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Aria": ("aria_text", PLAIN | {"moe_num_experts": 5, "moe_topk": 2}),
    "AyaVision": ("cohere2", OF_COHERE),
    "Blip2": ("opt", OF_OPT),
    "Cohere2Vision": ("cohere2", OF_COHERE),
    "DeepseekOcr2": (
        "deepseek_ocr2_text",
        PLAIN
        | GROUPED
        | {"mlp_layer_types": ["dense", "sparse"], "num_hidden_layers": 2},
    ),
    "DeepseekVL": ("llama", PLAIN),
    "DeepseekVLHybrid": ("llama", PLAIN),
    "CohereCompass": (
        "cohere_compass_text",
        PLAIN
        | PHI
        | MIDDLE_FULL
        | {"rope_parameters": ONE_ROPE, "sliding_window": 24, "num_hidden_layers": 3},
    ),
    "Ernie4_5_VLMoe": (
        "ernie4_5_vl_moe_text",
        sizes(WIDTH, 4, 2, 32, num_hidden_layers=3, moe_num_experts=6, moe_k=2)
        | {"moe_intermediate_size": [24, 16], "moe_num_shared_experts": 2}
        | sections(5, 5, 6),
    ),
    "Exaone4_5_": ("exaone4", PLAIN | {"num_hidden_layers": 4, "sliding_window": 24}),
    "Glm4v": ("glm4v_text", IN_PARTS),
    "Glm46V": ("glm4v_text", IN_PARTS),
    "Glmga": ("glm4v_text", IN_PARTS),
    "GlmOcr": ("glm_ocr_text", IN_PARTS),
    "Glm4vMoe": (
        "glm4v_moe_text",
        IN_PARTS | GROUPED | {"first_k_dense_replace": 1, "attention_bias": True},
    ),
    "GraniteSpeech": ("granite", OF_GRANITE),
    "GraniteSpeechPlus": ("granite", OF_GRANITE),
    "HunYuanVL": ("hunyuan_vl_text", sizes(WIDTH, 4, 2, 32) | sections(8, 4, 4)),
    "HyperCLOVAXVisionV2": ("hyperclovax", PLAIN),
    "Idefics2": ("mistral", PLAIN),
    "Idefics3": ("llama", PLAIN),
    "InstructBlip": ("opt", OF_OPT),
    "InstructBlipVideo": ("opt", OF_OPT),
    "InternVL": ("qwen2", PLAIN),
    "Janus": ("llama", PLAIN),
    "Lfm2Vl": ("lfm2", PLAIN | {"layer_types": ["conv", "full_attention"]}),
    "LightOnOcr": ("qwen3", PLAIN),
    "Lfm3Vl": (
        "lfm3",
        sizes(WIDTH, 4, 2, 32, layer_types=["conv", "full_attention"]) | PHI,
    ),
    "Llama4": (
        "llama4_text",
        PLAIN
        | {"num_local_experts": 4, "intermediate_size_mlp": 56, "moe_layers": [1]}
        | {"head_dim": 32, "no_rope_layer_interval": 2, "attention_chunk_size": 512},
    ),
    "MiniCPMOcr": ("qwen3_5_text", OF_DELTAS),
    "MiniCPMV4_6": ("qwen3_5_text", OF_DELTAS),
    "MiniCPMV4_7": ("qwen3_5_text", OF_DELTAS),
    "Llava": ("llama", PLAIN),
    "LlavaNext": ("llama", PLAIN),
    "LlavaNextVideo": ("llama", PLAIN),
    "LlavaOnevision": ("qwen2", PLAIN),
    "Mllama": (
        "mllama_text_model",
        PLAIN | PHI | {"num_hidden_layers": 4, "cross_attention_layers": [1, 3]},
    ),
    "MossTranscribeDiarize": ("qwen3", sizes(WIDTH, 4, 2, 32)),
    "Ovis2": ("qwen2", PLAIN),
    "PaddleOCRVL": ("paddleocr_vl_text", sizes(WIDTH, 4, 2, 32) | sections(8, 4, 4)),
    "PPChart2Table": ("qwen2", PLAIN),
    "Qwen2_5OmniThinker": ("qwen2_5_omni_text", PLAIN | sections(8, 4, 4)),
    "Qwen2Audio": ("qwen2", PLAIN),
    "Qwen3OmniMoeThinker": (
        "qwen3_omni_moe_text",
        sizes(WIDTH, 4, 2, 32, num_experts=6, num_experts_per_tok=2)
        | {"moe_intermediate_size": 24, "mlp_only_layers": [1]}
        | sections(8, 4, 4),
    ),
    "Qwen3VLMoe": (
        "qwen3_vl_moe_text",
        sizes(WIDTH, 4, 2, 32, num_experts=6, num_experts_per_tok=2)
        | {"moe_intermediate_size": 24, "mlp_only_layers": [1]}
        | sections(8, 4, 4),
    ),
    "SmolVLM": ("llama", PLAIN),
    "VideoLlama3": ("qwen2", PLAIN),
    "VideoLlava": ("llama", PLAIN),
    "VipLlava": ("llama", PLAIN),
    "Voxtral": ("llama", PLAIN),
    "GraniteDocling": ("granite_docling_text", PLAIN | GRANITE | PHI),
}
"""transformers class prefix -> the model type of its text, and its settings."""


def settings_of(prefix: str) -> dict[str, Any]:
    """Settings of the model of a class prefix of TEXTS."""
    kind, text = TEXTS[prefix]
    make: Callable[..., PreTrainedConfig] = getattr(transformers, f"{prefix}Config")
    whole = make()
    parts: dict[str, Any] = {"text_config": text | {"model_type": kind}}
    for name in whole.sub_configs:
        part = getattr(whole, name)
        if name != "text_config" and part is not None:
            parts[name] = _smaller(part)
    return parts


def text_of(model: torch.nn.Module) -> torch.nn.Module:
    """Return the part that writes text, where the whole model asks for images."""
    return model.get_submodule("language_model" if hasattr(model, "qformer") else "")


def _smaller(part: PreTrainedConfig) -> dict[str, Any]:
    settings = part.to_dict()
    for name, size in SMALLER.items():
        if isinstance(settings.get(name), int):
            settings[name] = size
    if settings.get("layer_types"):
        settings["layer_types"] = settings["layer_types"][:1]
    for name in part.sub_configs:
        settings[name] = _smaller(getattr(part, name))
    return settings
