"""Tiny random-weight Hugging Face checkpoints of every family, and full-rank plans and
bases to fold them with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from kvlathe.export.bases.basis import Basis, LaneBasis
from kvlathe.export.model.spec import DecoderSpec
from kvlathe.plan.formats import Bits, Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane, ModelShape
from kvlathe.plan.lives import KEEP, Window
from kvlathe.plan.plan import CompressionPlan

torch.set_num_threads(1)  # tiny matrices: threads would only wait for one another
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
LATENT_YARN = {"mscale": 0.7, "mscale_all_dim": 0.7}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 64}
SMALL = ("hidden_size", "intermediate_size", "num_attention_heads")
SMALL += ("image_size", "patch_size")
QUARTER: dict[str, Any] = {"partial_rotary_factor": 0.25}
PHI = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

TEMPERATURE: dict[str, Any] = {"rope_theta": 1e5, "llama_4_scaling_beta": 0.3}
TWO_ROPES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
}
ONE_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": None,
}
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
SPACE: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_state": 12,
    "mamba_d_head": 32,
}
OLD: dict[str, Any] = {
    "vocab_size": 97,
    "n_embd": 128,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
}
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

HAS_BOUND = hasattr(transformers.GptOssConfig, "swiglu_limit")
BOUNDED: dict[str, Any] = {"swiglu_limit": 1.0} if HAS_BOUND else {}
"""An older transformers computes with 7, whatever the config says."""


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


def latent(**more: object) -> dict[str, Any]:
    """Settings of heads that share a latent: 4 of 16 + 8 dims, values of 20."""
    own = {"kv_lora_rank": 32, "q_lora_rank": 40, "qk_nope_head_dim": 16}
    own |= {"qk_rope_head_dim": 8, "v_head_dim": 20, "rope_theta": 1e4}
    return sizes(64, 4, 4) | own | more


def longrope(planes: int) -> dict[str, Any]:
    factors = np.linspace(1.0, 4.0, planes).round(3).tolist()
    return LONG | {"short_factor": factors, "long_factor": [2.5 * f for f in factors]}


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", sizes(64, 4, 2, rope_theta=1e5)),
    "llama-llama3-tied": (
        "Llama",
        sizes(
            96,
            4,
            4,
            rope_theta=5e5,
            tie_word_embeddings=True,
            rope_scaling=LLAMA3 | {"original_max_position_embeddings": 64},
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
    "stablelm": ("StableLm", sizes(80, 5, 5, use_qkv_bias=True, **QUARTER)),
    "stablelm-parallel-gqa": (
        "StableLm",
        sizes(160, 4, 2, use_parallel_residual=True, **QUARTER),
    ),
    "falcon-7b": (
        "Falcon",
        {
            "vocab_size": 97,
            "hidden_size": 168,
            "num_hidden_layers": 2,
            "num_attention_heads": 7,
        },
    ),
    "falcon-40b": (
        "Falcon",
        {
            "vocab_size": 97,
            "hidden_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_kv_heads": 2,
        }
        | {
            "new_decoder_architecture": True,
            "tie_word_embeddings": False,
            "ffn_hidden_size": 100,
        },
    ),
    "falcon-11b-one-norm": (
        "Falcon",
        {
            "vocab_size": 97,
            "hidden_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "bias": True,
        }
        | {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-rw": (
        "Falcon",
        {
            "vocab_size": 97,
            "hidden_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "bias": True,
        }
        | {"multi_query": False, "parallel_attn": False},
    ),
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
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "gemma3-untied": (
        "Gemma3Text",
        sizes(32, 2, 1, 256, final_logit_softcapping=5.0, tie_word_embeddings=False),
    ),
    "gemma3-images": (
        "Gemma3",
        {"text_config": sizes(48, 4, 2, 32, sliding_window=20)}
        | {"vision_config": dict.fromkeys(SMALL, 8) | {"num_hidden_layers": 1}},
    ),
    "gemma4-experts": ("Gemma4Text", gemma4(**GEMMA_EXPERTS)),
    "gemma4-shared": ("Gemma4Text", gemma4(**SHARED)),
    "gemma4": ("Gemma4Text", gemma4()),
    "gemma4_unified": ("Gemma4UnifiedText", GEMMA_UNIFIED),
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
    "phi": ("Phi", sizes(64, 4, 2, partial_rotary_factor=0.5)),
    "phi-norms": (
        "Phi",
        sizes(64, 4, 2, partial_rotary_factor=0.5, qk_layernorm=True),
    ),
    "gpt_neox": ("GPTNeoX", sizes(64, 4, 4)),
    "gpt_neox-sequential": (
        "GPTNeoX",
        sizes(64, 4, 4, use_parallel_residual=False, rotary_pct=1.0),
    ),
    "opt": ("OPT", sizes(64, 4, 4, ffn_dim=88, word_embed_proj_dim=64)),
    "gpt2": (
        "GPT2",
        {"vocab_size": 97, "n_embd": 60, "n_layer": 2, "n_head": 3, "n_positions": 512},
    ),
    "gpt2-scaled": (
        "GPT2",
        {
            "vocab_size": 97,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 512,
            "n_inner": 70,
            "activation_function": "relu",
        }
        | {
            "scale_attn_by_inverse_layer_idx": True,
            "scale_attn_weights": False,
            "tie_word_embeddings": False,
        },
    ),
    "ministral": (
        "Ministral",
        sizes(64, 4, 2, 32, num_hidden_layers=3, sliding_window=24)
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "ministral3": (
        "Ministral3",
        sizes(64, 4, 2, 32, rope_parameters=YARN | TEMPERATURE),
    ),
    "mistral4-images": (
        "Mistral3",
        {
            "text_config": latent(first_k_dense_replace=1, **GROUPED)
            | {"model_type": "mistral4"}
            | {"rope_parameters": YARN | LATENT_YARN | TEMPERATURE},
            "vision_config": dict.fromkeys(SMALL, 8)
            | {"model_type": "pixtral", "num_hidden_layers": 1},
        },
    ),
    "ministral3-images": (
        "Mistral3",
        {
            "text_config": sizes(64, 4, 2, 32, rope_parameters=YARN | TEMPERATURE)
            | {"model_type": "ministral3"},
            "vision_config": dict.fromkeys(SMALL, 8)
            | {"model_type": "pixtral", "num_hidden_layers": 1},
        },
    ),
    "ministral3-images-untied": (
        "Mistral3",
        {
            "tie_word_embeddings": False,
            "text_config": sizes(64, 4, 2, 32, rope_parameters=YARN | TEMPERATURE)
            | {"model_type": "ministral3"},
            "vision_config": dict.fromkeys(SMALL, 8)
            | {"model_type": "pixtral", "num_hidden_layers": 1},
        },
    ),
    "cwm": (
        "Cwm",
        sizes(64, 4, 2, 32, num_hidden_layers=3, sliding_window=24)
        | {
            "rope_parameters": LLAMA3
            | {"original_max_position_embeddings": 64, "rope_theta": 1e5}
        },
    ),
    "internlm3": ("InternLM3", sizes(64, 4, 2, 32, qkv_bias=True, bias=True)),
    "iquestcoder": ("IQuestCoder", sizes(64, 4, 2, 32)),
    "apertus": (
        "Apertus",
        sizes(
            64,
            4,
            2,
            rope_parameters=LLAMA3
            | {"original_max_position_embeddings": 64, "rope_theta": 1e5},
        ),
    ),
    "jais2": ("Jais2", sizes(128, 4, 2)),
    "olmo": ("Olmo", sizes(128, 4, 2)),
    "nanochat": ("NanoChat", sizes(128, 4, 2, final_logit_softcapping=4.0)),
    "vaultgemma": (
        "VaultGemma",
        sizes(48, 4, 2, 32, num_hidden_layers=3, sliding_window=20)
        | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0}
        | {"final_logit_softcapping": 4.0},
    ),
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
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
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
    "cohere_compass_text": (
        "CohereCompassText",
        sizes(128, 4, 2, num_hidden_layers=3, sliding_window=24, **PHI)
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"rope_parameters": ONE_ROPE, "logit_scale": 0.75},
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
    "hy_v3": (
        "HYV3",
        sizes(64, 4, 2, 32, num_hidden_layers=3, num_experts=6, num_shared_experts=2)
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 24},
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
    "persimmon": ("Persimmon", sizes(128, 4, 4)),
    "biogpt": ("BioGpt", sizes(128, 4, 4)),
    "xglm": (
        "XGLM",
        {"vocab_size": 97, "d_model": 128, "num_layers": 2, "attention_heads": 4}
        | {"ffn_dim": 88, "max_position_embeddings": 512},
    ),
    "gptj": ("GPTJ", OLD | {"rotary_dim": 8}),
    "codegen": ("CodeGen", OLD | {"rotary_dim": 8, "n_head": 8, "n_embd": 256}),
    "gpt_neo": (
        "GPTNeo",
        {"vocab_size": 97, "hidden_size": 128, "num_layers": 2, "num_heads": 4}
        | {"max_position_embeddings": 512, "window_size": 24}
        | {"attention_types": [[["global", "local"], 1]]},
    ),
    "gpt_bigcode": ("GPTBigCode", OLD),
    "gpt_bigcode-heads": ("GPTBigCode", OLD | {"multi_query": False}),
}
"""Every family and every setting that changes what it computes: name -> (transformers
class prefix, config)."""


OWN_HEADS = tuple(
    name
    for name, (prefix, settings) in FAMILIES.items()
    if "kv_lora_rank" not in settings.get("text_config", settings)
    and not prefix.startswith("Gemma4")
)
"""Those whose heads have keys and values of their own, alike in all layers."""
STATEFUL = ("Lfm", "Qwen3Next", "Qwen3_5", "GraniteMoeHybrid", "Bamba", "NemotronH")
STATEFUL += ("FalconH1",)
"""Beginnings of the names of models whose layers keep states."""
GATED = ("Afmoe", "Lfm3", "Qwen3Next", "Qwen3_5")
"""Those of models with gates of outputs."""


def kind_of(name: str) -> str:
    """The transformers class prefix of checkpoint ``name`` of FAMILIES."""
    return FAMILIES[name][0]


WITH_STATES = tuple(x for x in FAMILIES if kind_of(x).startswith(STATEFUL))
ON_GPUS = tuple(
    name
    for name in FAMILIES
    if name not in WITH_STATES and not kind_of(name).startswith("Gemma4")
)
"""Those that one GPU runs."""
UNGATED = tuple(x for x in OWN_HEADS if not kind_of(x).startswith(GATED))


def make(folder: Path, name: str, seed: int = 0, **save: object) -> PreTrainedModel:
    """Write checkpoint ``name`` of FAMILIES to ``folder``; return the reference model,
    float32."""
    kind, settings = FAMILIES[name]
    return make_model(folder, kind, settings, seed, **save)


def make_model(
    folder: Path, kind: str, settings: dict[str, Any], seed: int = 0, **save: object
) -> PreTrainedModel:
    """Random weights large enough that every one of them matters: biases and norms
    too."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(
        **settings, attn_implementation="eager"
    )
    part = "text_config" in settings
    of_kind = AutoModelForImageTextToText if part else AutoModelForCausalLM
    model = of_kind.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if name.endswith("A_log"):  # states remember for long
                parameter.copy_(noise - 3)
            elif parameter.ndim == 1:
                parameter.copy_(
                    0.3 * noise if name.endswith("bias") else 1 + 0.3 * noise
                )
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.3 * torch.randn_like(buffer))
            if name.endswith("correction_bias"):  # a router's, which training fits
                buffer.copy_(0.3 * torch.randn_like(buffer))
    model.save_pretrained(folder, **save)
    vocabulary = config.get_text_config().vocab_size
    words = {f"t{i}": i for i in range(vocabulary)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "t0")).save(
        str(Path(folder) / "tokenizer.json")
    )
    return model


def full_plan(
    shape: ModelShape, rope: bool = True, projected: bool = False, bits: Bits = 32
) -> CompressionPlan:
    """Every dim of every lane kept, ranks rounded up to 16; one group, page 16."""
    kind = "full" if rope else "none"
    lanes: list[Lane] = []
    for layer, head in shape.places:
        d, of_value = shape.heads(layer).head_dim, shape.value_dim(layer)
        ranks = -(-d // 16) * 16, -(-of_value // 16) * 16
        lanes.append(Lane(layer, head, d, *ranks, kind, projected=projected))
    groups = (Group(tuple(range(len(lanes))), Tier(bits, bits)),)
    return CompressionPlan(
        shape, tuple(lanes), groups, page_tokens=16, prefill_chunk=32
    )


def whole_plan(
    spec: DecoderSpec, projected: bool = False, bits: Bits = 32
) -> CompressionPlan:
    """The full plan of a model, with the windows of its layers."""
    plan = full_plan(spec.shape, spec.rope is not None, projected, bits)
    by_window: dict[int, list[int]] = {}
    for i, lane in enumerate(plan.lanes):
        by_window.setdefault(spec.windows[lane.layer], []).append(i)
    groups = []
    for window, lanes in by_window.items():
        life = Window.of_tokens(window, plan.page_tokens) if window else KEEP
        groups.append(Group(tuple(lanes), Tier(bits, bits), life=life))
    return dataclasses.replace(plan, groups=tuple(groups))


def random_basis(plan: CompressionPlan, seed: int, orthogonal: bool) -> Basis:
    """Full-rank bases with random centres for every lane: orthogonal (a = b), or any
    invertible a with b = a^-T."""
    rng = np.random.default_rng(seed)
    centred = float(plan.model.shifts)

    def pair(d: int) -> tuple[np.ndarray, np.ndarray]:
        u, v = (np.linalg.qr(rng.normal(size=(d, d)))[0] for _ in range(2))
        if orthogonal:
            return u, u
        scales = rng.uniform(0.5, 2.0, d)
        return u * scales @ v, u / scales @ v

    basis = Basis()
    for lane in plan.lanes:
        d = plan.model.heads(lane.layer).head_dim
        (a, b), (a_v, o_v) = pair(d), pair(d)
        centre_k, centre_v = centred * rng.normal(size=(2, d))
        qk = (
            (a, b, centre_k)
            if lane.projected or lane.rope == "none"
            else (None, None, None)
        )
        basis[lane.layer, lane.head] = LaneBasis(
            *qk, a_v=a_v, o_v=o_v.T, centre_v=centre_v
        )
    return basis
