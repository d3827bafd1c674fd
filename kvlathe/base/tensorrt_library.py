"""TensorRT and TensorRT-RTX: what each is called here, what it says while it works, and
where our plugin for both is.

Engines are built (engines/targets/tensorrt.py) and run
(runtime/sessions/gpu/tensorrt.py) through the same two modules.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlathe.base.errors import KvlatheError
from kvlathe.base.extras import pip_install
from kvlathe.base.library_digest import check_digest
from kvlathe.base.package import FOLDER


@dataclass(frozen=True, slots=True)
class Flavour:
    """One of the two libraries: its Python module, its distribution, and how to get
    it."""

    module: str
    distribution: str
    install: str
    needs_gpu: bool


FLAVOURS = {
    "tensorrt_rtx": Flavour(
        "tensorrt_rtx_bindings",
        "tensorrt-rtx-cu13-bindings",
        f"run {pip_install('tensorrt')}",
        False,
    ),
    "tensorrt": Flavour(
        "tensorrt",
        "tensorrt",
        "run pip install tensorrt --extra-index-url https://pypi.nvidia.com",
        True,
    ),
}

PLUGIN = "libkvlathe_trt.so"
VARIABLE = "KVLATHE_TRT_PLUGIN"
"""Names the file to use; 0 uses none."""


def find_plugin() -> Path | None:
    """The plugin: the file that KVLATHE_TRT_PLUGIN names, beside the package, or in a
    checkout's build/native. None where it is not built.

    Raises KvlatheError where the variable names a file that is not there, and for one
    that is damaged.
    """
    found = _plugin()
    if found is not None:
        check_digest(found)
    return found


def _plugin() -> Path | None:
    chosen = os.environ.get(VARIABLE)
    if chosen == "0":
        return None
    if chosen:
        path = Path(chosen)
        if not path.is_file():
            raise KvlatheError(
                f"{VARIABLE} names {chosen}",
                "there is no such file",
                "build it: docs/native.md says how",
            )
        return path.resolve()
    places = (FOLDER / PLUGIN, FOLDER.parent / "build" / "native" / PLUGIN)
    return next((place for place in places if place.is_file()), None)


def logger_of(trt: Any) -> Any:  # noqa: ANN401  the module, and a logger of its own class
    """Keeps the last error, and the layer list that a builder prints when it is done
    (as its inspector would)."""

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.last_error = self.layers = ""

        def log(self, severity: Any, message: str) -> None:  # noqa: ANN401
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                self.last_error = message.replace("\n", " ")
            elif message.startswith("Layers:") and "LayerType:" in message:
                self.layers = message

    return Logger()
