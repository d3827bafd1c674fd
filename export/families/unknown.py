"""Why a model type has no record: what of it an engine cannot keep or compute, as far
as its configuration says."""

from __future__ import annotations

from collections.abc import Mapping

WIRING = "kvlathe must know how its layers are wired"
BIAS = "its scores have a bias by distance (ALiBi), which attention here does not add"
SUMMARIES = (
    "its layers attend summaries of blocks of tokens beside a window, and pages hold "
    "tokens alone"
)
LATENT = "its heads share one latent (MLA), in a way that no record says"
INDEXER = (
    "an indexer chooses the tokens that each query sees (sparse attention), by keys of "
    "its own, which no page holds"
)
TWICE = "a layer has two attentions, and experts that pass by the second"
STATE = "some of its layers keep a state, in a way that no record says"
EXPERTS = "its MLPs choose among experts, in a way that no record says"
CHUNKS = "the attention of most layers begins anew at every chunk of tokens, which no life keeps"
NO_CACHE = "none of its layers has keys and values: there is no cache"
DIM_DECAYS = (
    "its delta rules forget each dim of a key at a rate of its own, and a state here has "
    "one rate for each head"
)
NUMBER_DECAYS = (
    "each number of its states decays at a rate of its own (Mamba-1), and a state here "
    "has one rate for each head"
)
TWO_INPUTS = (
    "its attention reads embeddings beside hidden states, by weights that layers share"
)
DIFFERENCE = "what a head attends is the difference of two softmaxes"
INNER_NORMS = "a norm stands between attention and W_O, where no basis can be folded"
CLIPPED = "it bounds q, k and v"
CODER = "it is an encoder, or needs one"

BY_TYPE: Mapping[str, str] = {
    **dict.fromkeys(("bloom", "mpt"), BIAS),
    "longcat_flash": TWICE,
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), NO_CACHE),
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), DIM_DECAYS),
    **dict.fromkeys(("jamba", "zamba"), NUMBER_DECAYS),
    "bitnet": INNER_NORMS,
    "deepseek_v4": SUMMARIES,
    "dbrx": CLIPPED,
    "diffllama": DIFFERENCE,
    "recurrent_gemma": STATE,
    "zamba2": TWO_INPUTS,
}
BY_SETTING: Mapping[str, str] = {
    "index_topk": INDEXER,
    "kv_lora_rank": LATENT,
    "mamba_d_state": STATE,
    "mamba_d_conv": STATE,
    "linear_num_key_heads": STATE,
    "linear_attn_config": STATE,
    "conv_L_cache": STATE,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "encoder_layers": CODER,
    "type_vocab_size": CODER,
}
"""Settings that only such models have."""
STATEFUL = ("linear_attention", "mamba", "conv", "recurrent")
"""Kinds of layers."""


def why_unknown(raw: Mapping[str, object]) -> str:
    """The reason why a config.json's model type is none of ours."""
    kind = str(raw.get("model_type"))
    if kind in BY_TYPE:
        return BY_TYPE[kind]
    layers = raw.get("layer_types")
    if isinstance(layers, list) and set(STATEFUL) & {str(layer) for layer in layers}:
        return STATE
    for setting, reason in BY_SETTING.items():
        if raw.get(setting):
            return reason
    return WIRING
