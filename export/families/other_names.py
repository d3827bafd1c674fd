"""Model types that published folders say, with code of their own, and transformers reads
as another one: how their settings become that one's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from kvlathe.base.errors import KvlatheError


@dataclass(frozen=True, slots=True)
class OtherName:
    """``known``: the model type that transformers has. ``text``: the key of the settings
    of the part for text, where it is one of several; its type is ``kind``, or as they
    say. ``record``: the key of the family, where tensors are stored in another way."""

    known: str
    text: str = ""
    kind: str = ""
    record: str = ""


OTHER_NAMES: Mapping[str, OtherName] = {
    "deepseek_vl_v2": OtherName(
        "deepseek_ocr2", "language_config", "deepseek_ocr2_text"
    ),
    "h2ovl_chat": OtherName("internvl", "llm_config"),
    "internlm2": OtherName("llama", record="internlm2"),
    "internvl_chat": OtherName("internvl", "llm_config"),
    "kimi_k2": OtherName("deepseek_v3"),
}
RECORD = "kvlathe_record"
"""The setting that names a record, where it is not that of the model type."""


OLD_ROPES = {"su": "longrope"}
"""Old names of rotations, as the first folders of Phi-3 have them."""


def _with_known_rope(raw: Mapping[str, object]) -> Mapping[str, object]:
    rope = raw.get("rope_scaling")
    if not isinstance(rope, dict):
        return raw
    said = cast("Mapping[str, object]", rope)
    known = OLD_ROPES.get(str(said.get("type")))
    return raw if known is None else {**raw, "rope_scaling": {**said, "type": known}}


def as_known(raw: Mapping[str, object]) -> dict[str, object]:
    """The settings of a config.json as transformers would have them. Raises KvlatheError
    for DeepSeek-VL2, whose heads share a latent."""
    raw = _with_known_rope(raw)
    given = raw.get("model_type")
    other = OTHER_NAMES.get(given) if isinstance(given, str) else None
    if other is None:
        return dict(raw)
    if not other.text:
        known = {**raw, "model_type": other.known}
        return known | {RECORD: other.record} if other.record else known
    part = raw.get(other.text)
    text = dict(cast("Mapping[str, object]", part)) if isinstance(part, dict) else {}
    if other.kind and text.get("use_mla", True):
        raise KvlatheError(
            f"the heads of this {given} share a latent",
            "no record has such heads inside a model that reads images",
            "choose DeepSeek-OCR, whose heads have keys and values of their own",
        )
    text["model_type"] = other.kind or text.get("model_type")
    known: dict[str, object] = {"model_type": other.known}
    known["text_config"] = as_known(text)
    for name in ("quantization_config", "tie_word_embeddings"):
        if found := text.pop(name, None) or raw.get(name):
            known[name] = found
    return known
