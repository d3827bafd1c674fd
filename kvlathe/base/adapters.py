"""Requests for LoRA adapters: a folder, and the factor with which it is added."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from kvlathe.base.errors import KvlatheError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
"""Suffixes of files of weights whose reading can run code hidden in them."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A folder as PEFT writes it. ``weight`` multiplies what it adds."""

    folder: Path
    weight: float = 1.0

    @property
    def files(self) -> tuple[Path, Path]:
        """All that is read of the folder."""
        return self.folder / CONFIG, self.folder / WEIGHTS


def read_adapter(asked: str | Path) -> Adapter:
    """``DIR`` or ``DIR=0.5``. Raises KvlatheError for a weight that is no number, and
    for a path that cannot be one."""
    text = str(asked)
    folder, divider, number = text.rpartition("=")
    try:
        is_folder = Path(text).is_dir()
    except OSError as error:
        raise KvlatheError(
            f"--lora {text} cannot be used",
            str(error),
            "give a folder that can be read",
        ) from error
    if is_folder or not divider:
        return Adapter(Path(text))
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise KvlatheError(
            f"--lora {text} cannot be used",
            f"{number!r} is no number",
            "give DIR or DIR=WEIGHT",
        )
    return Adapter(Path(folder), weight)
