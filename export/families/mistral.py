"""Mistral: Llama without biases; the first release attends through a sliding window in
every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlathe.export.families.family import Family
from kvlathe.export.families.llama import NAMES
from kvlathe.export.families.windows import every_layer

if TYPE_CHECKING:
    from transformers import MistralConfig


def mistral(config: MistralConfig) -> Family:
    return Family(
        names=NAMES,
        norm="rms",
        norm_eps=config.rms_norm_eps,
        activation=config.hidden_act,
        kv_heads=config.num_key_value_heads,
        intermediate_size=config.intermediate_size,
        windows=every_layer(config),
    )
