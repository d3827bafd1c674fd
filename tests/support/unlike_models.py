"""Small models of Gemma 4 whose heads are as wide as people's, with scores that are as
large: norms of random queries would make the softmax choose one token, and halves would
choose another."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from tests.support.checkpoints import make_model
from tests.support.families.gemma import GEMMA_EXPERTS, SHARED, gemma4

WIDE = {
    "num_attention_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
}
MODELS = {
    "31B": gemma4(**WIDE, num_key_value_heads=4),
    "E2B": gemma4(**WIDE, **SHARED, num_key_value_heads=1),
    "narrow": gemma4(),
    "narrow E2B": gemma4(**SHARED),
    "experts": gemma4(**GEMMA_EXPERTS),
}
"""By whose heads they have. Values are a part of keys of 640 in full layers of the 31B,
and groups of 2 and 8 query heads share a KV head."""


def make_unlike(folder: Path, name: str) -> PreTrainedModel:
    """Write the checkpoint MODELS[``name``] to ``folder``; return the reference model,
    float32."""
    model = make_model(folder, "Gemma4Text", MODELS[name])
    with torch.no_grad():
        for layer in model.get_submodule("model.layers").children():
            weight = layer.get_parameter("self_attn.q_norm.weight")
            weight.mul_(len(weight) ** -0.5)
    model.save_pretrained(folder)
    return model
