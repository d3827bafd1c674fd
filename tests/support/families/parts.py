"""Settings of models that also read images or hear."""

from __future__ import annotations

from typing import Any

from tests.support.families.gemma import GEMMA_UNIFIED, SHARED, gemma4
from tests.support.families.sizes import (
    DELTA,
    GROUPED,
    LATENT_YARN,
    MIDDLE_FULL,
    PHI,
    TEMPERATURE,
    TWO_ROPES,
    YARN,
    latent,
    sizes,
)

SMALL = ("hidden_size", "intermediate_size", "num_attention_heads")
SMALL += ("image_size", "patch_size")

PIXTRAL = dict.fromkeys(SMALL, 8) | {"model_type": "pixtral", "num_hidden_layers": 1}
MINISTRAL3: dict[str, Any] = {
    "text_config": sizes(64, 4, 2, 32, rope_parameters=YARN | TEMPERATURE)
    | {"model_type": "ministral3"},
    "vision_config": PIXTRAL,
}

INDEXED: dict[str, Any] = {
    "layer_types": ["full_attention", "minimax_m3_sparse", "full_attention"],
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_block_size": 128,
    "index_topk_blocks": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}
    | {"partial_rotary_factor": 0.5},
}
"""An indexer that chooses all blocks, and RoPE on a half of each head."""
SMALL_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "crop_size": 28,
}

SMALL_AUDIO: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_blocks": 2,
    "num_attention_heads": 2,
    "ext_pw_out_channel": 16,
    "depthwise_separable_out_channel": 16,
    "nemo_conv_channels": 16,
}

SMALL_CODES: dict[str, Any] = {
    "codebook_size": 8,
    "base_channels": 32,
    "channel_multiplier": [1, 1],
    "num_res_blocks": 1,
    "hidden_size": 32,
}

SMALL_SAM: dict[str, Any] = {
    "hidden_size": 16,
    "output_channels": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "global_attn_indexes": [0],
    "mlp_dim": 16,
}

SECTIONS: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}
    | {"mrope_section": [4, 2, 2]}
}


def seeing(text: dict[str, Any]) -> dict[str, Any]:
    """Settings of a Qwen that also reads images: positions in three sections of a head,
    which are the same in text."""
    return {
        "text_config": text,
        "vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 32}
        | {"num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16},
    }


PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3-images": (
        "Gemma3",
        {"text_config": sizes(48, 4, 2, 32, sliding_window=20)}
        | {"vision_config": dict.fromkeys(SMALL, 8) | {"num_hidden_layers": 1}},
    ),
    "gemma4_unified-images": (
        "Gemma4Unified",
        {
            "text_config": GEMMA_UNIFIED,
            "vision_config": None,
            "audio_config": None,
        },
    ),
    "gemma4-images": (
        "Gemma4",
        {
            "text_config": gemma4(**SHARED),
            "vision_config": None,
            "audio_config": None,
        },
    ),
    "mistral4-images": (
        "Mistral3",
        {
            "text_config": latent(first_k_dense_replace=1, **GROUPED)
            | {"model_type": "mistral4"}
            | {"rope_parameters": YARN | LATENT_YARN | TEMPERATURE},
            "vision_config": PIXTRAL,
        },
    ),
    "ministral3-images": (
        "Mistral3",
        MINISTRAL3,
    ),
    "ministral3-images-untied": (
        "Mistral3",
        MINISTRAL3 | {"tie_word_embeddings": False},
    ),
    "minimax_m3_vl": (
        "MiniMaxM3VL",
        {
            "text_config": sizes(64, 4, 2, 32, num_hidden_layers=3, **INDEXED)
            | {"num_local_experts": 6, "num_experts_per_tok": 2, "swiglu_limit": 0.8}
            | {"dense_intermediate_size": 56, "shared_intermediate_size": 40}
            | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
            "vision_config": dict.fromkeys(SMALL, 16)
            | {"num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 8},
            "projector_hidden_size": 16,
        },
    ),
    "step3p7": (
        "Step3p7",
        {
            "text_config": sizes(64, 4, 2, 32, num_hidden_layers=3, sliding_window=24)
            | {"n_routed_experts": 6, "num_experts_per_tok": 2}
            | {"moe_intermediate_size": 24, "share_expert_dim": 40}
            | {"mlp_layer_types": ["dense", "sparse", "sparse"]}
            | {"num_sliding_attention_heads": 6}
            | MIDDLE_FULL
            | {"query_pre_attn_scalar": 24, "moe_router_scaling_factor": 0.7}
            | {"swiglu_limits": [0, 0, 0.3], "rope_parameters": TWO_ROPES}
            | {"swiglu_limits_shared": [0.4, 0, 0.6]},
            "vision_config": dict.fromkeys(SMALL, 16)
            | {"num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 8}
            | {"mlp_ratio": 1.0},
        },
    ),
    "qwen3_5": (
        "Qwen3_5",
        seeing(
            sizes(64, 4, 2, 16, num_hidden_layers=2, full_attention_interval=2, **DELTA)
        ),
    ),
    **{
        name: (prefix, seeing(sizes(64, 4, 2, num_hidden_layers=2, **more)))
        for name, prefix, more in (
            ("qwen2_vl", "Qwen2VL", SECTIONS),
            ("qwen2_5_vl", "Qwen2_5_VL", SECTIONS),
            ("qwen3_vl", "Qwen3VL", {"head_dim": 32, **SECTIONS}),
        )
    },
    "phi4_multimodal": (
        "Phi4Multimodal",
        sizes(128, 4, 2, **PHI)
        | {"vision_config": SMALL_VISION, "audio_config": SMALL_AUDIO},
    ),
    "emu3": (
        "Emu3",
        {
            "text_config": sizes(128, 4, 2, **PHI),
            "vq_config": SMALL_CODES,
            "vocabulary_map": {f"<|visual token {i:06d}|>": i for i in range(8)}
            | {"<|extra_200|>": 9},
        },
    ),
    "got_ocr2": (
        "GotOcr2",
        {
            "text_config": sizes(128, 4, 2) | {"model_type": "qwen2"},
            "vision_config": SMALL_SAM,
        },
    ),
    "fuyu": (
        "Fuyu",
        {
            "text_config": sizes(128, 4, 4) | {"model_type": "persimmon"},
            "image_size": 8,
            "patch_size": 4,
        },
    ),
}
