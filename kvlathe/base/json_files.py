"""JSON files of a checkpoint's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvlathe.base.errors import KvlatheError

REPLACE = "replace it with the checkpoint's own file"


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; empty if there is no such file. Raises KvlatheError
    where it holds anything else."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except RecursionError as error:
        raise KvlatheError(
            f"{path} cannot be read", "it is nested too deep", REPLACE
        ) from error
    except (OSError, ValueError) as error:
        raise KvlatheError(f"{path} cannot be read", str(error), REPLACE) from error
    if not isinstance(value, dict):
        raise KvlatheError(f"{path} cannot be read", "it is not a JSON object", REPLACE)
    return value
