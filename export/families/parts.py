"""Models that also read images or hear, of which the part that reads and writes text is
run. That part has a record of its own, by its model type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BESIDE = (
    *(
        "vision_tower",
        "vision_model",
        "vision_encoder",
        "vision_embed_tokens",
        "visual",
    ),
    *("high_res_vision", "image_tower", "video_tower", "audio_tower", "vqmodel"),
    *("multi_modal_projector", "mm_projector", "vision_projector", "vision_projection"),
    *("projector", "connector", "aligner", "merger", "mlp1", "mlp_AR"),
    *("embed_vision", "embed_audio", "visual_embeddings_table", "image_newline"),
    *(
        "patch_merge_mlp",
        "vit_large_projector",
        "layerwise_projectors",
        "spatial_projectors",
        "mtp.",
    ),
    *("qformer", "query_tokens", "language_projection", "generation_"),
    *("vit.", "resampler", "talker", "token2wav", "code2wav"),
    *("sam_model", "qwen2_model", "view_sep"),
)
"""Beginnings of the names of tensors of other parts: what sees, hears, or guesses further
tokens."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """The text of a larger model: ``inside`` names it in the names of tensors."""

    inside: str = "language_model"
    beside: tuple[str, ...] = BESIDE


TEXT_PARTS: Mapping[str, TextPart] = {
    **dict.fromkeys(
        (
            *("aria", "aya_vision", "blip-2", "cohere2_vision", "cohere_compass"),
            *("deepseek_ocr2", "deepseek_vl", "deepseek_vl_hybrid"),
            *("ernie4_5_vl_moe", "exaone4_5"),
            *("fuyu", "glmga", "instructblip", "instructblipvideo", "janus"),
            *(
                "gemma3",
                "gemma3n",
                "gemma4",
                "gemma4_unified",
                "glm46v",
                "glm4v",
                "glm4v_moe",
            ),
            *("glm_ocr", "got_ocr2", "hunyuan_vl"),
            "hyperclovax_vision_v2",
            *("internvl", "kimi_k25", "lfm2_vl", "lfm3_vl", "lighton_ocr"),
            *("llama4", "llava", "mllama"),
            *("llava_next", "llava_next_video", "llava_onevision", "minicpm_ocr"),
            "minimax_m3_vl",
            *("minicpmv4_6", "minicpmv4_7", "mistral3"),
            *("moss_transcribe_diarize", "ovis2"),
            *("pp_chart2table", "qwen2_audio", "voxtral"),
            *("paddleocr_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_5"),
            *("qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "video_llama_3"),
            *("video_llava", "vipllava"),
        ),
        TextPart(),
    ),
    **dict.fromkeys(
        ("emu3", "granite_docling", "idefics2", "idefics3", "smolvlm"),
        TextPart("text_model"),
    ),
    **dict.fromkeys(
        ("granite_speech", "granite_speech_plus"),
        TextPart(beside=(*BESIDE, "encoder.")),
    ),
    **dict.fromkeys(
        (
            *("qwen2_5_omni", "qwen2_5_omni_thinker"),
            *("qwen3_omni_moe", "qwen3_omni_moe_thinker"),
        ),
        TextPart("thinker"),
    ),
    "step3p7": TextPart(""),
}
