"""Models that are a GGUF file: the one that a path or a folder means."""

from __future__ import annotations

from pathlib import Path

from kvlathe.base.errors import KvlatheError

SUFFIX = ".gguf"
PROJECTOR = "mmproj"
"""Begins the name of a file that turns images into tokens, and is no model."""


def gguf_of(model: Path) -> Path | None:
    """The GGUF file that ``model`` means: itself, or the one in a folder without
    safetensors. None where it means none. Raises KvlatheError for several."""
    if model.suffix == SUFFIX and not model.is_dir():
        return model
    if not model.is_dir() or any(model.glob("*.safetensors")):
        return None
    found = [path for path in sorted(model.glob(f"*{SUFFIX}")) if is_model(path.name)]
    if len(found) > 1:
        raise several(str(model), [path.name for path in found])
    return found[0] if found else None


def is_model(name: str) -> bool:
    """Whether a file of this name may be one."""
    return name.endswith(SUFFIX) and PROJECTOR not in name


def several(where: str, names: list[str]) -> KvlatheError:
    """The refusal of a choice among GGUF files."""
    return KvlatheError(
        f"{where} holds {len(names)} GGUF files",
        f"a model is one of them: {', '.join(names)}",
        f"name one: {where}/{names[0]}",
    )
