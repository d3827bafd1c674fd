"""ggml's names of tensors and the checkpoint's, by architecture, and what stands
between the numbers of both."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

AROUND = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
MLP = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{e}.gate_proj",
    "ffn_up_exps": "mlp.experts.{e}.up_proj",
    "ffn_down_exps": "mlp.experts.{e}.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of each plane's frequency (Llama 3)."""
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""The same of LongRoPE."""
OF_CONFIG = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
"""Tensors that are settings in a checkpoint."""
LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class Architecture:
    """One of ggml's architectures, as a checkpoint has it.

    ``layer``: name of a layer's tensor -> the checkpoint's. ``paired``: rows of q and k
    lie in pairs that RoPE turns, (2j, 2j + 1), where the checkpoint has (j, j + d/2).
    ``norm_offset``: added to the weights of norms. ``tokens_in_order``: pieces of its
    sentencepiece vocabulary merge in the order of their ids.
    """

    model_type: str
    causal_lm: str
    layer: dict[str, str] = field(default_factory=lambda: ATTENTION | MLP)
    paired: bool = False
    norm_offset: float = 0.0
    tokens_in_order: bool = False

    def named(self, name: str) -> str | None:
        """The checkpoint's name of a tensor, with ``{e}`` for its experts; None where it
        has none."""
        base, _, kind = name.rpartition(".")
        if base in AROUND:
            return f"{AROUND[base]}.{kind}"
        found = LAYER.fullmatch(name)
        if found is None or found[2] not in self.layer:
            return None
        return f"model.layers.{found[1]}.{self.layer[found[2]]}.{found[3]}"


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", paired=True),
    "granite": Architecture("granite", "GraniteForCausalLM", paired=True),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", paired=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", ATTENTION | MLP | QK_NORMS),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        ATTENTION | EXPERTS | QK_NORMS | {"ffn_gate_inp": "mlp.gate"},
    ),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {
            name: stored
            for name, stored in (ATTENTION | MLP | FUSED).items()
            if name not in ("attn_q", "attn_k", "attn_v", "ffn_gate")
        },
    ),
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        ATTENTION | MLP | FOUR_NORMS,
        norm_offset=1.0,
        tokens_in_order=True,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        ATTENTION | MLP | FOUR_NORMS | QK_NORMS,
        norm_offset=1.0,
        tokens_in_order=True,
    ),
}
"""By general.architecture. Mistral's files say llama."""
