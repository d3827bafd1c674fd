"""Configurations as folders on the Hugging Face Hub have them: fields that are missing, old
names, parts in parts. Sizes are those of the published models."""

from __future__ import annotations

from typing import Any

import pytest

from kvlathe.export.families import as_known
from kvlathe.export.model.scaled_config import Scaling, Scheme
from kvlathe.export.model.spec import DecoderSpec, spec_of
from kvlathe.export.model.stored_codes import read_codes


def config(kind: str, *sizes: int, **more: object) -> dict[str, Any]:
    """Settings of layers, heads, KV heads, hidden size, columns of MLPs and positions."""
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    names += ("hidden_size", "intermediate_size", "max_position_embeddings")
    given = dict(zip(names, sizes, strict=True))
    return {"model_type": kind, "vocab_size": 32000} | given | more


def spec(raw: dict[str, Any], served: int | None = None) -> DecoderSpec:
    return spec_of(as_known(raw), served)


YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
YARN |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
DEEPSEEK = config("deepseek_v3", 61, 128, 128, 7168, 18432, 163840) | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "rope_scaling": YARN,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "ep_size": 1,
    "num_nextn_predict_layers": 1,
    "topk_method": "noaux_tc",
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MINIMAX = config("minimax_m2", 62, 48, 8, 3072, 1536, 196608) | {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "rotary_dim": 64,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "use_mtp": True,
    "use_routing_bias": True,
    "use_qk_norm": True,
    "shared_intermediate_size": 0,
    "quantization_config": FP8
    | {"fmt": "float8_e4m3fn", "activation_scheme": "dynamic"}
    | {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
}
GEMMA_3N = {
    "model_type": "gemma3n",
    "architectures": ["Gemma3nForConditionalGeneration"],
    "text_config": config("gemma3n_text", 30, 8, 2, 2048, 0, 32768)
    | {"intermediate_size": [8192] * 30, "query_pre_attn_scalar": 256}
    | {"activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20}
    | {"layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6}
    | {"rope_local_base_freq": 1e4, "rope_theta": 1e6, "rope_scaling": None}
    | {"num_kv_shared_layers": 10, "altup_lr_multiplier": 1.0, "head_dim": 256}
    | {"vocab_size": 262400},
}
NEMOTRON = config("nemotron_h", 8, 32, 2, 4096, 2688, 262144) | {
    "architectures": ["NemotronHForCausalLM"],
    "hybrid_override_pattern": "MEMEMEM*",
    "head_dim": 128,
    "n_groups": 8,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "n_group": 1,
    "moe_intermediate_size": 2688,
    "moe_latent_size": 1024,
    "topk_group": 1,
    "moe_shared_expert_intermediate_size": 5376,
    "mlp_hidden_act": "relu2",
    "conv_kernel": 4,
    "use_mamba_kernels": True,
    "partial_rotary_factor": 1.0,
}
LONGROPE: dict[str, Any] = {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48}
PHI = config("phi3", 32, 32, 32, 3072, 8192, 131072) | {
    "original_max_position_embeddings": 4096,
    "sliding_window": 262144,
    "rope_scaling": LONGROPE | {"type": "longrope"},
}
OLD_PHI = PHI | {"rope_scaling": LONGROPE | {"type": "su"}}
OF_QWEN = {"type": "mrope", "mrope_section": [16, 24, 24]}
QWEN_VL = config("qwen2_vl", 28, 28, 4, 3584, 18944, 32768, rope_scaling=OF_QWEN)
QWEN_VL |= {"vision_config": {"depth": 32, "embed_dim": 1280}, "vocab_size": 152064}
QWEN_VL |= {"use_sliding_window": False, "sliding_window": 32768}
LLAVA = {"model_type": "llava", "text_config": {"model_type": "llama"}}
LFM = config("lfm2", 16, 32, 8, 2048, 12288, 128000) | {
    "block_auto_adjust_ff_dim": True,
    "block_multiple_of": 256,
    "num_heads": 32,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "conv_L_cache": 3,
}
FALCON = config("falcon", 32, 71, 1, 4544, 0, 2048) | {
    "multi_query": True,
    "parallel_attn": True,
    "alibi": False,
    "bias": False,
}
CHAT = {
    "model_type": "internvl_chat",
    "architectures": ["InternVLChatModel"],
    "llm_config": config("qwen2", 24, 14, 2, 896, 4864, 32768)
    | {"rope_scaling": {"type": "dynamic", "factor": 2.0, "rope_type": "dynamic"}},
}
FIRST_LLAMA = {"model_type": "llama", "architectures": ["LLaMAForCausalLM"]}
FIRST_LLAMA |= {"max_sequence_length": 2048, "pad_token_id": -1}
PUBLISHED: dict[str, tuple[dict[str, Any], tuple[int, int, int, int]]] = {
    "DeepSeek R1": (DEEPSEEK | {"quantization_config": FP8}, (61, 128, 1, 576)),
    "Falcon 7B": (FALCON, (32, 71, 1, 64)),
    "Gemma 3n E2B": (GEMMA_3N, (30, 8, 2, 256)),
    "InternVL 3": (CHAT, (24, 14, 2, 64)),
    "LFM2": (LFM, (16, 32, 8, 64)),
    "LLaVA 1.5": (LLAVA, (32, 32, 32, 128)),
    "Llama 1": (FIRST_LLAMA, (32, 32, 32, 128)),
    "MiniMax M2": (MINIMAX, (62, 48, 8, 128)),
    "Nemotron 3 Super": (NEMOTRON, (8, 32, 2, 128)),
    "Phi 3, first form": (OLD_PHI, (32, 32, 32, 96)),
    "Phi 3.5": (PHI, (32, 32, 32, 96)),
    "Qwen2 VL": (QWEN_VL, (28, 28, 4, 128)),
}
"""Settings -> layers, query heads, KV heads and head dims."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read(name: str) -> None:
    raw, sizes = PUBLISHED[name]
    found = spec(raw)
    assert (found.layers, found.query_heads, found.kv_heads, found.head_dim) == sizes


def test_e4m3_has_two_names() -> None:
    named = FP8 | {"fmt": "float8_e4m3fn"}
    forms: list[list[Scheme]] = []
    for said in (FP8, named):
        found = read_codes({"quantization_config": said})
        assert isinstance(found, Scaling)
        forms.append([rule.scheme for rule in found.rules])
    assert forms[0] == forms[1]


def test_codes_may_be_said_of_the_text_alone() -> None:
    """As Kimi K2.5 has them."""
    text = DEEPSEEK | {"model_type": "kimi_k2", "quantization_config": FP8}
    assert read_codes(as_known({"model_type": "kimi_k25", "text_config": text}))
