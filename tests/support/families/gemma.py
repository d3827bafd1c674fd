"""Settings of Gemma 1 to 4."""

from __future__ import annotations

from typing import Any

from tests.support.families.sizes import MIDDLE_FULL, sizes


def gemma4(**more: object) -> dict[str, Any]:
    """Settings of Gemma 4: windows of 20, and full layers with fewer and wider heads."""
    kinds = ["sliding_attention", "full_attention"] * 2
    own = {"layer_types": kinds, "num_hidden_layers": 4, "sliding_window": 20}
    own |= {"global_head_dim": 48, "num_global_key_value_heads": 1, "pad_token_id": 0}
    own |= {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
    own |= {"final_logit_softcapping": 4.0}
    return sizes(48, 4, 2, 24) | own | more


SHARED = {
    "num_kv_shared_layers": 2,
    "attention_k_eq_v": False,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
}
"""Layers that read another's cache, and are given embeddings of their own."""

GEMMA_UNIFIED = {x: y for x, y in gemma4().items() if "_per_layer_input" not in x}


GEMMA_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}


GEMMA_3N: dict[str, Any] = sizes(48, 4, 2, 24, num_hidden_layers=5) | {
    "layer_types": ["sliding_attention"] * 2
    + ["full_attention"]
    + MIDDLE_FULL["layer_types"][:2],
    "activation_sparsity_pattern": [0.95, 0.6, 0.0, 0.0, 0.4],
    "num_kv_shared_layers": 2,
    "sliding_window": 20,
    "laurel_rank": 8,
    "vocab_size_per_layer_input": 90,
    "hidden_size_per_layer_input": 8,
    "final_logit_softcapping": 4.0,
}
"""Fewer rows of embeddings for each layer than words."""

GEMMA: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", sizes(48, 4, 1, 32)),
    "gemma2": (
        "Gemma2",
        sizes(48, 4, 2, 32, num_hidden_layers=3, sliding_window=20)
        | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0}
        | {"final_logit_softcapping": 4.0},
    ),
    "gemma3": (
        "Gemma3Text",
        sizes(
            48,
            4,
            2,
            32,
            num_hidden_layers=3,
            sliding_window=20,
            query_pre_attn_scalar=24,
        )
        | MIDDLE_FULL
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "gemma3-untied": (
        "Gemma3Text",
        sizes(32, 2, 1, 256, final_logit_softcapping=5.0, tie_word_embeddings=False),
    ),
    "gemma3n": ("Gemma3nText", GEMMA_3N),
    "gemma4-experts": ("Gemma4Text", gemma4(**GEMMA_EXPERTS)),
    "gemma4-shared": ("Gemma4Text", gemma4(**SHARED)),
    "gemma4": ("Gemma4Text", gemma4()),
    "gemma4_unified": ("Gemma4UnifiedText", GEMMA_UNIFIED),
    "vaultgemma": (
        "VaultGemma",
        sizes(48, 4, 2, 32, num_hidden_layers=3, sliding_window=20)
        | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0}
        | {"final_logit_softcapping": 4.0},
    ),
}
