"""The supported checkpoint families, by the ``model_type`` of config.json. A new one is
one function (docs/extending/model_family.md)."""

from __future__ import annotations

from kvlathe.export.families.cohere import cohere, cohere2
from kvlathe.export.families.experts import mixtral, olmoe, qwen2_moe, qwen3_moe
from kvlathe.export.families.falcon import falcon
from kvlathe.export.families.family import Experts, Family
from kvlathe.export.families.gemma import gemma, gemma2, gemma3, gemma3_images
from kvlathe.export.families.gpt2 import gpt2
from kvlathe.export.families.gpt_oss import gpt_oss
from kvlathe.export.families.llama import llama
from kvlathe.export.families.llama_like import (
    arcee,
    ernie,
    granite,
    helium,
    mistral,
    nemotron,
    seed_oss,
    smollm3,
    starcoder2,
)
from kvlathe.export.families.norms_after import exaone4, glm, glm4, olmo2, olmo3
from kvlathe.export.families.older import gpt_neox, opt, phi
from kvlathe.export.families.phi3 import phi3
from kvlathe.export.families.qwen import qwen2, qwen3
from kvlathe.export.families.stablelm import stablelm

FAMILIES = {
    "arcee": arcee,
    "cohere": cohere,
    "cohere2": cohere2,
    "ernie4_5": ernie,
    "exaone4": exaone4,
    "falcon": falcon,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3": gemma3_images,
    "gemma3_text": gemma3,
    "glm": glm,
    "glm4": glm4,
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "gpt_oss": gpt_oss,
    "granite": granite,
    "helium": helium,
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "nemotron": nemotron,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "olmoe": olmoe,
    "opt": opt,
    "phi": phi,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "seed_oss": seed_oss,
    "smollm3": smollm3,
    "stablelm": stablelm,
    "starcoder2": starcoder2,
}

__all__ = ["FAMILIES", "Experts", "Family"]
