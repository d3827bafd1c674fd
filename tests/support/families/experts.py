"""Settings of models with experts."""

from __future__ import annotations

from typing import Any

import transformers

from tests.support.families.sizes import (
    GRANITE,
    GROUPED,
    MIDDLE_FULL,
    PHI,
    TWO_ROPES,
    YARN,
    sizes,
)

HAS_BOUND = hasattr(transformers.GptOssConfig, "swiglu_limit")

BOUNDED: dict[str, Any] = {"swiglu_limit": 1.0} if HAS_BOUND else {}
"""An older transformers computes with 7, whatever the config says."""


EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": (
        "Mixtral",
        sizes(64, 4, 2, num_local_experts=5, num_experts_per_tok=2, sliding_window=24),
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        sizes(64, 4, 2, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24)
        | {"shared_expert_intermediate_size": 40},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        sizes(48, 4, 2, 24, num_experts=6, num_experts_per_tok=2)
        | {"moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "olmoe": ("Olmoe", sizes(64, 4, 4, num_experts=5, num_experts_per_tok=2)),
    "gpt_oss": (
        "GptOss",
        sizes(64, 4, 2, 16, num_local_experts=5, num_experts_per_tok=2)
        | {"num_hidden_layers": 3, "sliding_window": 20}
        | {"rope_scaling": YARN}
        | BOUNDED,
    ),
    "granitemoe": (
        "GraniteMoe",
        sizes(128, 4, 2, num_local_experts=5, num_experts_per_tok=2, **GRANITE),
    ),
    "granitemoeshared": (
        "GraniteMoeShared",
        sizes(128, 4, 2, num_local_experts=5, num_experts_per_tok=2, **GRANITE)
        | {"shared_intermediate_size": 40},
    ),
    "granitemoe_swa": (
        "GraniteMoeSWA",
        sizes(128, 4, 2, num_local_experts=5, num_experts_per_tok=2, **GRANITE)
        | {"num_hidden_layers": 3, "sliding_window": 24}
        | {"shared_intermediate_size": 40, "layer_rope_theta": [0, 1e4, 1e5]},
    ),
    "qwen3_moe-some-plain": (
        "Qwen3Moe",
        sizes(48, 4, 2, 32, num_experts=6, num_experts_per_tok=2)
        | {"num_hidden_layers": 3, "moe_intermediate_size": 24}
        | {"mlp_only_layers": [0], "decoder_sparse_step": 1},
    ),
    "mellum": (
        "Mellum",
        sizes(48, 4, 2, 32, num_experts=6, num_experts_per_tok=2)
        | {"num_hidden_layers": 3, "moe_intermediate_size": 24, "sliding_window": 24}
        | MIDDLE_FULL
        | {"mlp_layer_types": ["dense", "sparse", "sparse"]}
        | {"rope_parameters": TWO_ROPES},
    ),
    "flex_olmo": (
        "FlexOlmo",
        sizes(128, 4, 2, num_experts=5, num_experts_per_tok=2, **PHI),
    ),
    "aria_text": (
        "AriaText",
        sizes(128, 4, 2, moe_num_experts=5, moe_topk=2, moe_num_shared_experts=2),
    ),
    "phimoe": (
        "Phimoe",
        sizes(128, 4, 2, num_local_experts=5, attention_bias=True, lm_head_bias=True)
        | {"sliding_window": 40, "router_jitter_noise": 0.1},
    ),
    "cohere2_moe": (
        "Cohere2Moe",
        sizes(64, 4, 2, 32, num_hidden_layers=4, sliding_window=24, **PHI)
        | {"num_experts": 5, "num_experts_per_tok": 2, "num_shared_experts": 2}
        | {"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 56}
        | {"sliding_window_pattern": 2, "logit_scale": 0.75},
    ),
    "cohere2_moe-sigmoid": (
        "Cohere2Moe",
        sizes(64, 4, 2, 32, sliding_window=24, rms_norm_eps=1e-5, **PHI)
        | {"num_experts": 5, "num_experts_per_tok": 2, "num_shared_experts": 1}
        | {"shared_expert_combination_strategy": "sum", "norm_topk_prob": False}
        | {"expert_selection_fn": "sigmoid", "logit_scale": 1.0},
    ),
    "glm4_moe": (
        "Glm4Moe",
        sizes(64, 4, 2, 32, num_hidden_layers=3, use_qk_norm=True, **GROUPED)
        | {"n_shared_experts": 1, "first_k_dense_replace": 1, "attention_bias": True},
    ),
    "glm4_moe-plain": (
        "Glm4Moe",
        sizes(64, 4, 2, 32, **GROUPED)
        | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "solar_open": (
        "SolarOpen",
        sizes(64, 4, 2, 32, n_shared_experts=2, **GROUPED),
    ),
    "dots1": (
        "Dots1",
        sizes(64, 4, 2, 32, num_hidden_layers=3, n_shared_experts=2, **GROUPED)
        | {"first_k_dense_replace": 1, "sliding_window": 24, "max_window_layers": 2},
    ),
    "exaone_moe": (
        "ExaoneMoe",
        sizes(64, 4, 2, 32, num_hidden_layers=4, sliding_window=24, num_experts=8)
        | {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
        | {"n_group": 4, "topk_group": 2, "num_shared_experts": 2},
    ),
    "hunyuan_moe": (
        "HunYuanMoEV1",
        sizes(64, 4, 2, 32, num_experts=5, moe_topk=2),
    ),
    "flint": (
        "Flint",
        sizes(64, 4, 2, 32, num_hidden_layers=3, num_experts=6, num_experts_per_tok=2)
        | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
        | {"mlp_only_layers": [0], "sliding_window": 24}
        | MIDDLE_FULL,
    ),
    "hy_v3": (
        "HYV3",
        sizes(64, 4, 2, 32, num_hidden_layers=3, num_experts=6, num_shared_experts=2)
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        sizes(64, 8, 2, 24, num_hidden_layers=3, num_experts_per_tok=3)
        | {"n_routed_experts": 8, "moe_intermediate_size": 24, "v_head_dim": 16}
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
        | {"sliding_window": 24, "rope_parameters": TWO_ROPES}
        | MIDDLE_FULL,
    ),
    "minimax_m2": (
        "MiniMaxM2",
        sizes(64, 4, 2, 32, num_local_experts=6, num_experts_per_tok=2, rotary_dim=8),
    ),
    "afmoe": (
        "Afmoe",
        sizes(64, 4, 2, 32, num_hidden_layers=4, sliding_window=24, num_experts=6)
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "route_scale": 1.5}
        | {"global_attn_every_n_layers": 2, "mup_enabled": True},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        sizes(64, 4, 2, 32, num_hidden_layers=3, moe_num_experts=6, use_bias=True)
        | {"moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1}
        | {"tie_word_embeddings": False},
    ),
    "ernie4_5_moe-alone": (
        "Ernie4_5_Moe",
        sizes(64, 4, 2, 32, num_hidden_layers=4, moe_num_experts=6)
        | {"moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 0}
        | {"moe_layer_interval": 2},
    ),
    "kolibri1": (
        "Kolibri1",
        sizes(64, 4, 2, 32, num_hidden_layers=3, num_experts=6, num_experts_per_tok=2)
        | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
        | {"sliding_window": 24, "norm_topk_prob": True}
        | MIDDLE_FULL,
    ),
    "laguna": (
        "Laguna",
        sizes(64, 4, 2, 32, num_hidden_layers=3, num_experts=6, num_experts_per_tok=2)
        | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
        | {"num_attention_heads_per_layer": [6, 4, 6], "sliding_window": 24}
        | MIDDLE_FULL
        | {"rope_parameters": TWO_ROPES, "moe_routed_scaling_factor": 1.5},
    ),
    "laguna-dims": (
        "Laguna",
        sizes(64, 4, 2, 16, num_experts=6, num_experts_per_tok=2, sliding_window=0)
        | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
        | {"gating": "per-element"},
    ),
    "llama4": (
        "Llama4Text",
        sizes(64, 4, 2, 32, num_hidden_layers=4, num_local_experts=5)
        | {"num_experts_per_tok": 2, "intermediate_size_mlp": 56, "moe_layers": [1, 3]}
        | {"no_rope_layer_interval": 2, "attention_chunk_size": 512}
        | {"floor_scale": 20, "attn_scale": 0.4},
    ),
    "llama4-plain": (
        "Llama4Text",
        sizes(64, 4, 2, 16, num_local_experts=4, use_qk_norm=False)
        | {"attn_temperature_tuning": False, "no_rope_layer_interval": 2},
    ),
}
