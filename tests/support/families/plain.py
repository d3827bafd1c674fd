"""Settings of models with one MLP a layer and heads of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.families.sizes import (
    GRANITE,
    MIDDLE_FULL,
    ONE_ROPE,
    PHI,
    TEMPERATURE,
    YARN,
    sizes,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

LONG = {"rope_type": "longrope", "original_max_position_embeddings": 64}


def longrope(planes: int) -> dict[str, Any]:
    factors = np.linspace(1.0, 4.0, planes).round(3).tolist()
    return LONG | {"short_factor": factors, "long_factor": [2.5 * f for f in factors]}


PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", sizes(64, 4, 2, rope_theta=1e5)),
    "llama-llama3-tied": (
        "Llama",
        sizes(
            96,
            4,
            4,
            rope_theta=5e5,
            tie_word_embeddings=True,
            rope_scaling=LLAMA3,
        ),
    ),
    "llama-biased-d80-mqa": (
        "Llama",
        sizes(70, 5, 1, 80, attention_bias=True, mlp_bias=True),
    ),
    "llama-linear": (
        "Llama",
        sizes(56, 7, 1, 24, rope_scaling={"type": "linear", "factor": 3.0}),
    ),
    "llama-dynamic": (
        "Llama",
        sizes(64, 2, 2, rope_scaling={"type": "dynamic", "factor": 2.0}),
    ),
    "mistral-d24": ("Mistral", sizes(60, 6, 2, 24, sliding_window=None)),
    "mistral-window": ("Mistral", sizes(64, 4, 2, sliding_window=40)),
    "qwen2-yarn": (
        "Qwen2",
        sizes(
            64,
            4,
            2,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ),
    "qwen2-g7": ("Qwen2", sizes(112, 14, 2, 16, tie_word_embeddings=True)),
    "qwen2-some-windows": (
        "Qwen2",
        sizes(
            64,
            4,
            2,
            num_hidden_layers=3,
            use_sliding_window=True,
            sliding_window=33,
            max_window_layers=1,
        ),
    ),
    "qwen3": ("Qwen3", sizes(48, 6, 3, 40)),
    "qwen3-biased": ("Qwen3", sizes(48, 4, 1, 32, attention_bias=True)),
    "phi3": ("Phi3", sizes(64, 4, 4, **PHI)),
    "phi3-window": ("Phi3", sizes(64, 4, 2, sliding_window=16, **PHI)),
    "phi3-longrope": (
        "Phi3",
        sizes(
            96,
            4,
            2,
            rope_scaling=longrope(12),
            original_max_position_embeddings=64,
            **PHI,
        ),
    ),
    "phi4-mini-partial": (
        "Phi3",
        sizes(
            96,
            3,
            1,
            partial_rotary_factor=0.75,
            rope_scaling=longrope(12),
            original_max_position_embeddings=64,
            **PHI,
        ),
    ),
    "olmo2": ("Olmo2", sizes(64, 4, 2, pad_token_id=0)),
    "olmo3": (
        "Olmo3",
        sizes(64, 4, 2, sliding_window=24, pad_token_id=0, rope_scaling=YARN)
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "exaone4": ("Exaone4", sizes(64, 4, 2, num_hidden_layers=4, sliding_window=24)),
    "exaone4-whole": (
        "Exaone4",
        sizes(64, 4, 2, sliding_window=None, layer_types=["full_attention"] * 2),
    ),
    "glm": ("Glm", sizes(64, 4, 2, 16, pad_token_id=0)),
    "glm4": ("Glm4", sizes(64, 4, 2, 16, pad_token_id=0)),
    "granite": (
        "Granite",
        sizes(64, 4, 2, embedding_multiplier=6.0, residual_multiplier=0.4)
        | {"attention_multiplier": 0.2, "logits_scaling": 2.5},
    ),
    "granite-tied": (
        "Granite",
        sizes(64, 4, 2, embedding_multiplier=6.0, tie_word_embeddings=True),
    ),
    "smollm3": ("SmolLM3", sizes(64, 4, 2, num_hidden_layers=4, **PHI)),
    "smollm3-window": (
        "SmolLM3",
        sizes(64, 4, 2, num_hidden_layers=4, sliding_window=24, **PHI)
        | {"use_sliding_window": True, "no_rope_layers": [1, 0, 1, 0]},
    ),
    "helium": ("Helium", sizes(64, 4, 2, 16)),
    "ernie4_5": ("Ernie4_5", sizes(64, 4, 2, 16, use_bias=True)),
    "seed_oss": ("SeedOss", sizes(64, 4, 2, 16)),
    "arcee": ("Arcee", sizes(64, 4, 2)),
    "nemotron": ("Nemotron", sizes(64, 4, 2)),
    "starcoder2": ("Starcoder2", sizes(64, 4, 2, sliding_window=24)),
    "cohere": ("Cohere", sizes(64, 4, 2, logit_scale=0.75, **PHI)),
    "cohere-untied": (
        "Cohere",
        sizes(64, 4, 2, tie_word_embeddings=False, logit_scale=2.0, **PHI),
    ),
    "cohere2": (
        "Cohere2",
        sizes(64, 4, 2, num_hidden_layers=4, sliding_window=24, **PHI)
        | {"logit_scale": 0.75},
    ),
    "ministral": (
        "Ministral",
        sizes(64, 4, 2, 32, num_hidden_layers=3, sliding_window=24) | MIDDLE_FULL,
    ),
    "ministral3": (
        "Ministral3",
        sizes(64, 4, 2, 32, rope_parameters=YARN | TEMPERATURE),
    ),
    "cwm": (
        "Cwm",
        sizes(64, 4, 2, 32, num_hidden_layers=3, sliding_window=24)
        | {"rope_parameters": LLAMA3 | {"rope_theta": 1e5}},
    ),
    "internlm3": ("InternLM3", sizes(64, 4, 2, 32, qkv_bias=True, bias=True)),
    "iquestcoder": ("IQuestCoder", sizes(64, 4, 2, 32)),
    "apertus": (
        "Apertus",
        sizes(
            64,
            4,
            2,
            rope_parameters=LLAMA3 | {"rope_theta": 1e5},
        ),
    ),
    "hunyuan": ("HunYuanDenseV1", sizes(64, 4, 2, 16, attention_bias=True)),
    "hunyuan-stretched": (
        "HunYuanDenseV1",
        sizes(64, 4, 2, 32)
        | {"rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    ),
    "jais2": ("Jais2", sizes(128, 4, 2)),
    "olmo": ("Olmo", sizes(128, 4, 2)),
    "nanochat": ("NanoChat", sizes(128, 4, 2, final_logit_softcapping=4.0)),
    "hyperclovax": (
        "HyperCLOVAX",
        sizes(128, 4, 2, embedding_multiplier=6.0, residual_multiplier=0.4)
        | {"attention_multiplier": 0.2, "logits_scaling": 0.5},
    ),
    "hyperclovax-without-norms": (
        "HyperCLOVAX",
        sizes(128, 4, 2, residual_multiplier=0.4, use_post_norm=False),
    ),
    "granite_swa": (
        "GraniteSWA",
        sizes(128, 4, 2, num_hidden_layers=3, sliding_window=24, **GRANITE)
        | {"layer_rope_theta": [1e4, 0, 1e5]},
    ),
    "cohere_compass_text": (
        "CohereCompassText",
        sizes(128, 4, 2, num_hidden_layers=3, sliding_window=24, **PHI)
        | MIDDLE_FULL
        | {"rope_parameters": ONE_ROPE, "logit_scale": 0.75},
    ),
}
