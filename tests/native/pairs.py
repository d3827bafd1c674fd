"""Engines of one plan on the GPU and on the CPU."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvlathe.engines.build import BuildConfig, build
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native import library as native

MODEL = Path(__file__).resolve().parents[2] / "models" / "lathe-5m"


@contextmanager
def engine_pair(
    folder: Path, library: Path, options: dict[str, Any], model: Path = MODEL
) -> Generator[tuple[LLM, LLM]]:
    """``model`` built with ``options`` for the cuda backend and for onnxruntime, both
    with 16-bit hot pages: the same plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLATHE_LIBRARY", str(library.resolve()))
        native.find.cache_clear()
        engines: list[LLM] = []
        try:
            for backend, dtype in (("cuda", "float16"), ("onnxruntime", "float32")):
                asked = BuildConfig(
                    model,
                    folder / backend,
                    backend=backend,
                    dtype=dtype,
                    kv_bits=16,
                    use_cache=False,
                    **options,
                )
                engines.append(LLM.load(build(asked)))
            yield engines[0], engines[1]
        finally:
            for engine in engines:
                engine.close()
    native.find.cache_clear()
