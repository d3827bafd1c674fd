"""Settings of models whose layers keep states."""

from __future__ import annotations

from typing import Any

from tests.support.families.sizes import DELTA, GRANITE, GROUPED, PHI, sizes

STILL = {"rope_type": "default", "rope_theta": None}
"""RoPE of a model whose positions do not turn."""
SPACE: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_state": 12,
    "mamba_d_head": 32,
}


HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (
        "Lfm2",
        sizes(64, 4, 2, num_hidden_layers=5, conv_L_cache=4, conv_bias=True)
        | {"layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"]}
        | {"block_multiple_of": 8},
    ),
    "lfm3": (
        "Lfm3",
        sizes(64, 4, 2, 16, num_hidden_layers=4, sliding_window=24, conv_L_cache=5)
        | {"layer_types": ["conv", "full_attention", "sliding_attention", "conv"]}
        | PHI,
    ),
    "lfm3-plain": (
        "Lfm3",
        sizes(64, 4, 2, 16, num_hidden_layers=2, use_sandwich_norm=False)
        | {"layer_types": ["conv", "full_attention"], "use_attention_gate": False}
        | PHI,
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        sizes(64, 4, 2, num_hidden_layers=4, num_experts=6, num_experts_per_tok=2)
        | {"layer_types": ["conv", "full_attention", "conv", "conv"]}
        | {"moe_intermediate_size": 24, "num_dense_layers": 1},
    ),
    "qwen3_next": (
        "Qwen3Next",
        sizes(64, 4, 2, 16, num_hidden_layers=5, full_attention_interval=2, **DELTA)
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"shared_expert_intermediate_size": 32, "mlp_only_layers": [1]}
        | {"attention_bias": True},
    ),
    "olmo_hybrid": (
        "OlmoHybrid",
        sizes(64, 4, 2, num_hidden_layers=4, pad_token_id=0, **DELTA)
        | {"linear_key_head_dim": 20, "linear_value_head_dim": 10},
    ),
    "olmo_hybrid-still": (
        "OlmoHybrid",
        sizes(64, 4, 2, pad_token_id=0, **DELTA)
        | {"linear_key_head_dim": 20, "linear_value_head_dim": 10}
        | {"linear_allow_neg_eigval": False, "rope_parameters": STILL}
        | {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "qwen3_5_text": (
        "Qwen3_5Text",
        sizes(64, 4, 2, 16, num_hidden_layers=4, full_attention_interval=2, **DELTA),
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeText",
        sizes(64, 4, 2, 16, num_hidden_layers=3, full_attention_interval=2, **DELTA)
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"shared_expert_intermediate_size": 32},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        sizes(64, 4, 2, num_hidden_layers=4, **SPACE, **GRANITE)
        | {
            "layer_types": [
                *["linear_attention"] * 2,
                "full_attention",
                *["linear_attention"],
            ]
        }
        | {"num_local_experts": 6, "num_experts_per_tok": 2, "mamba_proj_bias": True}
        | {"shared_intermediate_size": 40, "mamba_n_groups": 2},
    ),
    "granitemoehybrid-dense": (
        "GraniteMoeHybrid",
        sizes(64, 4, 2, num_hidden_layers=3, **SPACE, **GRANITE)
        | {"layer_types": [*["linear_attention"] * 2, "full_attention"]}
        | {"num_local_experts": 0, "shared_intermediate_size": 40}
        | {"position_embedding_type": "rope", "time_step_limit": (0.1, 0.6)},
    ),
    "bamba": (
        "Bamba",
        sizes(64, 4, 2, num_hidden_layers=4, attn_layer_indices=[1, 3], **SPACE)
        | {"mamba_n_groups": 2},
    ),
    "falcon_h1": (
        "FalconH1",
        sizes(64, 4, 2, num_hidden_layers=3, mamba_d_ssm=64, **SPACE)
        | {"mamba_d_head": 16, "mamba_n_groups": 2, "mamba_rms_norm": True}
        | {
            "embedding_multiplier": 1.3,
            "lm_head_multiplier": 0.7,
            "key_multiplier": 0.8,
        }
        | {"attention_in_multiplier": 1.2, "attention_out_multiplier": 0.9}
        | {"ssm_in_multiplier": 1.1, "ssm_out_multiplier": 0.6}
        | {"mlp_multipliers": [0.9, 1.4], "ssm_multipliers": [0.8, 1.1, 0.9, 1.2, 0.7]},
    ),
    "falcon_h1-plain": (
        "FalconH1",
        sizes(64, 4, 2, mamba_d_ssm=64, **SPACE)
        | {"mamba_d_head": 16, "tie_word_embeddings": True, "lm_head_multiplier": 0.7},
    ),
    "nemotron_h": (
        "NemotronH",
        sizes(64, 4, 2, 16, ssm_state_size=12, mamba_num_heads=4, mamba_head_dim=16)
        | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}
        | {"n_groups": 2, "use_bias": True, "mlp_bias": True},
    ),
    "nemotron_h-experts": (
        "NemotronH",
        sizes(64, 4, 2, 16, ssm_state_size=12, mamba_num_heads=4, mamba_head_dim=16)
        | {"layers_block_type": ["moe", "linear_attention", "full_attention", "mlp"]}
        | GROUPED
        | {"moe_shared_expert_intermediate_size": 40, "n_groups": 1},
    ),
    "nemotron_h-latent": (
        "NemotronH",
        sizes(64, 4, 2, 16, ssm_state_size=12, mamba_num_heads=4, mamba_head_dim=16)
        | {"layers_block_type": ["moe", "linear_attention", "full_attention", "moe"]}
        | GROUPED
        | {"moe_shared_expert_intermediate_size": 40, "n_groups": 2}
        | {"moe_latent_size": 24},  # transformers' grouped product takes 16 bytes
    ),
}
