"""The supported checkpoint families, by the ``model_type`` of config.json. A new one is
one function (docs/extending/model_family.md)."""

from __future__ import annotations

from kvlathe.export.families.falcon import falcon
from kvlathe.export.families.family import Family
from kvlathe.export.families.gpt2 import gpt2
from kvlathe.export.families.llama import llama
from kvlathe.export.families.mistral import mistral
from kvlathe.export.families.phi3 import phi3
from kvlathe.export.families.qwen import qwen2, qwen3
from kvlathe.export.families.stablelm import stablelm

FAMILIES = {
    "falcon": falcon,
    "gpt2": gpt2,
    "llama": llama,
    "mistral": mistral,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "stablelm": stablelm,
}

__all__ = ["FAMILIES", "Family"]
