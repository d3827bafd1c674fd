"""kvlathe compresses the KV cache of a decoder LLM, exports it as an engine, and serves
it.

The public API: ``LLM``, ``SamplingParams``, ``Structure``, ``AsyncEngine``, ``build`` and
its ``BuildConfig``.
Each is imported when it is first used, so that ``import kvlathe`` loads no library.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from kvlathe.base.package import __version__

if TYPE_CHECKING:
    from kvlathe.engines.build import build
    from kvlathe.engines.config import BuildConfig
    from kvlathe.runtime.async_engine import AsyncEngine
    from kvlathe.runtime.llm import LLM
    from kvlathe.runtime.text.sampling_params import SamplingParams
    from kvlathe.runtime.text.structure import Structure

# ONNX Runtime's wheels from 1.31 on tell their maker of machine and process, from the
# moment that they are imported. Whoever wants that sets it to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = [
    "LLM",
    "AsyncEngine",
    "BuildConfig",
    "SamplingParams",
    "Structure",
    "__version__",
    "build",
]

_MODULES = {
    "LLM": "kvlathe.runtime.llm",
    "AsyncEngine": "kvlathe.runtime.async_engine",
    "SamplingParams": "kvlathe.runtime.text.sampling_params",
    "Structure": "kvlathe.runtime.text.structure",
    "build": "kvlathe.engines.build",
    "BuildConfig": "kvlathe.engines.config",
}
"""Public name -> the module that defines it."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
