"""Settings that tiny models of several families share."""

from __future__ import annotations

from typing import Any

YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}

MIDDLE_FULL = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]
}
"""The middle one of three layers has no window."""

ONE_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": None,
}

TWO_ROPES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
}

LATENT_YARN = {"mscale": 0.7, "mscale_all_dim": 0.7}

PHI = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

TEMPERATURE: dict[str, Any] = {"rope_theta": 1e5, "llama_4_scaling_beta": 0.3}

GRANITE: dict[str, Any] = {
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.8,
}

GROUPED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}

DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}


def sizes(
    hidden: int, heads: int, kv_heads: int, head_dim: int | None = None, **more: object
) -> dict[str, Any]:
    """Settings under the names that most families share."""
    given = {"head_dim": head_dim} if head_dim else {}
    shared = {
        "vocab_size": 97,
        "num_hidden_layers": 2,
        "intermediate_size": 88,
        "max_position_embeddings": 512,
    }
    return (
        shared
        | {
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
        }
        | given
        | more
    )


def latent(**more: object) -> dict[str, Any]:
    """Settings of heads that share a latent: 4 of 16 + 8 dims, values of 20."""
    own = {"kv_lora_rank": 32, "q_lora_rank": 40, "qk_nope_head_dim": 16}
    own |= {"qk_rope_head_dim": 8, "v_head_dim": 20, "rope_theta": 1e4}
    return sizes(64, 4, 4) | own | more
