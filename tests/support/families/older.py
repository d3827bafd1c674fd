"""Settings of models before Llama, and of those wired like them."""

from __future__ import annotations

from typing import Any

from tests.support.families.sizes import sizes

QUARTER: dict[str, Any] = {"partial_rotary_factor": 0.25}

OLD: dict[str, Any] = {
    "vocab_size": 97,
    "n_embd": 128,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
}


OLDER: dict[str, tuple[str, dict[str, Any]]] = {
    "openai-gpt": ("OpenAIGPT", OLD | {"n_layer": 3}),
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
    "gpt_neox_japanese": (
        "GPTNeoXJapanese",
        {"vocab_size": 97, "hidden_size": 64, "num_attention_heads": 4}
        | {"num_hidden_layers": 3, "rotary_pct": 0.5, "max_position_embeddings": 512},
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
