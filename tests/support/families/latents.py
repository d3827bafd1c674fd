"""Settings of models whose heads share a latent."""

from __future__ import annotations

from typing import Any

from tests.support.families.sizes import GROUPED, LATENT_YARN, YARN, latent

INDEXED = {"index_topk": 512, "index_head_dim": 16, "index_n_heads": 2}
"""An indexer that chooses as many tokens as the model has positions."""

LATENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": (
        "DeepseekV2",
        latent(q_lora_rank=None, num_hidden_layers=3, **GROUPED)
        | {"topk_method": "group_limited_greedy", "first_k_dense_replace": 1},
    ),
    "deepseek_v2-greedy": (
        "DeepseekV2",
        latent(rope_scaling=YARN | LATENT_YARN, attention_bias=True, **GROUPED),
    ),
    "deepseek_v3": (
        "DeepseekV3",
        latent(num_hidden_layers=3, attention_bias=True, **GROUPED)
        | {"first_k_dense_replace": 1, "rope_scaling": YARN | LATENT_YARN},
    ),
    "deepseek_v3-halves": (
        "DeepseekV3",
        latent(q_lora_rank=None, rope_interleave=False, kv_lora_rank=24, **GROUPED)
        | {"first_k_dense_replace": 2, "norm_topk_prob": False},
    ),
    "deepseek_v32": (
        "DeepseekV32",
        latent(num_hidden_layers=3, **GROUPED)
        | {"first_k_dense_replace": 1, "rope_scaling": YARN | LATENT_YARN}
        | INDEXED,
    ),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        latent(num_hidden_layers=3, **GROUPED)
        | {"first_k_dense_replace": 1, "index_topk_pattern": "FSF"}
        | INDEXED,
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        latent(num_hidden_layers=3, **GROUPED),
    ),
    "axk1": ("AXK1", latent(num_hidden_layers=3, **GROUPED)),
    "youtu": ("Youtu", latent(attention_bias=True)),
    "minicpm3": (
        "MiniCPM3",
        latent(scale_emb=3, scale_depth=1.1, dim_model_base=32),
    ),
}
