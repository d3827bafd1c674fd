"""Models that also read images or hear, of which the part that reads and writes text is
run. That part has a record of its own, by its model type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPart:
    """The text of a larger model: ``inside`` names it in the names of tensors, those of
    other parts begin with one of ``beside``."""

    beside: tuple[str, ...]
    inside: str = "language_model"


IMAGES = TextPart(("vision_tower", "multi_modal_projector"))
TEXT_PARTS: Mapping[str, TextPart] = {
    **dict.fromkeys(("gemma3", "got_ocr2", "mistral3"), IMAGES),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), TextPart(("visual", "mtp."))),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), TextPart(("visual",))),
    **dict.fromkeys(
        ("gemma4", "gemma4_unified"),
        TextPart(("vision_tower", "audio_tower", "embed_vision", "embed_audio")),
    ),
    "emu3": TextPart(("vqmodel",), "text_model"),
    "fuyu": TextPart(("vision_embed_tokens",)),
    "kimi_k25": TextPart(("vision_tower", "mm_projector")),
}
