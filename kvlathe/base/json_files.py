"""JSON files of a checkpoint's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvlathe.base.errors import KvlatheError

REPLACE = "replace it with the checkpoint's own file"


def read_object(path: Path, data: bytes | None = None) -> dict[str, Any]:
    """The JSON object in ``path``, or in the ``data`` that were read of it; empty if
    there is no such file. Raises KvlatheError where it holds anything else."""
    if data is None and not path.is_file():
        return {}
    try:
        value = json.loads((path.read_bytes() if data is None else data).decode())
    except RecursionError as error:
        raise KvlatheError(
            f"{path} cannot be read", "it is nested too deep", REPLACE
        ) from error
    except (OSError, ValueError) as error:
        raise KvlatheError(f"{path} cannot be read", str(error), REPLACE) from error
    if not isinstance(value, dict):
        raise KvlatheError(f"{path} cannot be read", "it is not a JSON object", REPLACE)
    return value
