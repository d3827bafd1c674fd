"""Options of ``--backend hf``: it writes an ordinary checkpoint, its heads rotated
(export/folding/rotated.py), for any engine."""

from __future__ import annotations

import dataclasses

from kvlathe.base.errors import KvlatheError
from kvlathe.engines.config import BuildConfig, check_types
from kvlathe.engines.folder import check_target

CHECKPOINT = "hf"
"""The name of the backend."""
HEARD = (
    "model",
    "output_dir",
    "backend",
    "seed",
    "use_cache",
    "command",
    "kv_bits",
)
"""Fields of a config that may be given: of the last three it needs none."""


def check_rotation(config: BuildConfig) -> None:
    """Raise KvlatheError for what an ordinary checkpoint cannot be asked for."""
    check_types(config)
    for field in dataclasses.fields(config):
        if field.name not in HEARD and getattr(config, field.name) != field.default:
            flag = field.name.replace("_", "-")
            raise KvlatheError(
                f"--{flag} with --backend {CHECKPOINT} cannot be used",
                "it writes the whole checkpoint, its heads rotated",
                "leave it out",
            )
    check_target(config.output_dir)
