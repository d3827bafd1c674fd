"""gpt-oss: sinks beside the scores, windows in every other layer, experts with biases
and a bounded SwiGLU, stored as numbers or in MXFP4."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvlathe.export.families.experts import COUNTS, WITHOUT_MLP
from kvlathe.export.families.family import Experts, Family
from kvlathe.export.families.llama import biased
from kvlathe.export.families.windows import sliding_layers

if TYPE_CHECKING:
    from transformers import GptOssConfig

OWN = {
    "sinks": "model.layers.{i}.self_attn.sinks",
    "router": "model.layers.{i}.mlp.router",
    "experts_gate_up": "model.layers.{i}.mlp.experts.gate_up_proj",
    "experts_down": "model.layers.{i}.mlp.experts.down_proj",
}


ALPHA, LIMIT = 1.702, 7.0
"""Constants of the SwiGLU. An older transformers has them in its model, and not in its
config."""


def gpt_oss(config: GptOssConfig) -> Family:
    quantized = getattr(config, "quantization_config", None)
    experts = Experts(
        count=config.num_local_experts,
        chosen=config.num_experts_per_tok,
        intermediate_size=config.intermediate_size,
        normalized=True,
        stacked=True,
        biased=True,
        mxfp4=bool(quantized),
        alpha=getattr(config, "swiglu_alpha", ALPHA),
        limit=getattr(config, "swiglu_limit", LIMIT),
    )
    return replace(
        biased(config),
        names=WITHOUT_MLP | OWN,
        windows=sliding_layers(config),
        experts=experts,
        settings=COUNTS,
    )
