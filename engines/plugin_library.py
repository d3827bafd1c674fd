"""libkvlathe_trt.so, the TensorRT plugin: where it is, if it is built. Without it the function in the graph runs."""

from __future__ import annotations

import os
from pathlib import Path

import kvlathe
from kvlathe.errors import KvlatheError

LIBRARY = "libkvlathe_trt.so"
VARIABLE = "KVLATHE_TRT_PLUGIN"
"""Names the file to use; 0 uses none."""


def find() -> Path | None:
    """The plugin: the file that KVLATHE_TRT_PLUGIN names, beside the package, or in a checkout's build/native.

    Raises KvlatheError where the variable names a file that is not there.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen == "0":
        return None
    if chosen:
        path = Path(chosen)
        if not path.is_file():
            raise KvlatheError(
                f"{VARIABLE} names {chosen}", "there is no such file", "build it: docs/native.md says how"
            )
        return path.resolve()
    package = Path(kvlathe.__file__).resolve().parent
    places = (package / LIBRARY, package.parent / "build" / "native" / LIBRARY)
    return next((place for place in places if place.is_file()), None)
