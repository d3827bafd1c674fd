"""The names that ``import kvlathe`` offers, and what it costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvlathe

COST = """
import sys
import kvlathe
heavy = {"numpy", "torch", "onnxruntime"} & set(sys.modules)
assert not heavy, heavy
assert kvlathe.SamplingParams(stop="a").stop_strings == ("a",)
"""


def test_importing_the_package_loads_no_library() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COST], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


QUIET = """
import os, pathlib, sys, time
import kvlathe
import onnxruntime
time.sleep(0.5)
home = pathlib.Path(os.environ["HOME"])
print([str(path) for path in home.rglob("*")])
"""


def test_onnx_runtime_tells_nobody_of_the_machine(tmp_path: Path) -> None:
    """Its wheels keep what they will send under ~/.cache."""
    home = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    home.pop("ORT_DISABLE_TELEMETRY", None)
    command = [sys.executable, "-c", QUIET]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=home, check=True
    )
    assert done.stdout == "[]\n"


def test_public_names_are_those_of_their_modules() -> None:
    from kvlathe.engines.build import build
    from kvlathe.engines.config import BuildConfig
    from kvlathe.runtime.async_engine import AsyncEngine
    from kvlathe.runtime.llm import LLM
    from kvlathe.runtime.text.sampling_params import SamplingParams
    from kvlathe.runtime.text.structure import Structure

    public = (kvlathe.LLM, kvlathe.AsyncEngine, kvlathe.SamplingParams, kvlathe.build)
    assert public == (LLM, AsyncEngine, SamplingParams, build)
    assert kvlathe.Structure is Structure and kvlathe.BuildConfig is BuildConfig
    assert set(kvlathe.__all__) <= set(dir(kvlathe))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = kvlathe.Nothing
