"""The backend of docs/extending/backend.md builds, runs, and refuses as the page says."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvlathe.base import machine
from kvlathe.base.errors import KvlatheError
from kvlathe.engines import backends
from kvlathe.engines.build import BuildConfig, build
from kvlathe.plan import manifest as manifests
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.sessions import registry
from kvlathe.runtime.sessions.host.onnx import OrtSession
from kvlathe.runtime.text.sampler import SamplingParams
from tests.docs.test_extending import blocks

NAME = "optimized"
Reference = Callable[[str], tuple[Path, object]]


@pytest.fixture
def optimized(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The backend of the page, registered as the page does it."""
    (_, code), (_, info), (_, files), (_, runner) = blocks("backend.md")
    target = types.ModuleType(f"kvlathe.engines.targets.{NAME}")
    exec(code, vars(target))
    monkeypatch.setitem(sys.modules, target.__name__, target)
    known: dict[str, Any] = {**vars(registry), "machine": machine}
    known |= {"BackendInfo": backends.BackendInfo, "OrtSession": OrtSession}
    for block, table in (
        (info, backends.BACKENDS),
        (files, manifests.GRAPHS),
        (runner, registry.RUNNERS),
    ):
        exec(block, known)
        name = block.split(" =")[0]
        monkeypatch.setitem(table, NAME, known[name][NAME])
    return target


@pytest.mark.slow
def test_the_backend_of_the_page_answers_as_onnxruntime_does(
    optimized: types.ModuleType,
    reference: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVLATHE_CACHE", str(tmp_path / "cache"))
    model = reference("llama-dynamic")[0]
    folders = {
        name: build(BuildConfig(model, tmp_path / name, backend=name))
        for name in ("onnxruntime", NAME)
    }
    greedy = SamplingParams(max_new_tokens=8)
    answers = [
        next(iter(LLM.load(folder).generate([[5, 6, 7, 8]], greedy))).token_ids
        for folder in folders.values()
    ]
    assert answers[0] == answers[1]
    graphs = [(folder / "model.onnx").read_bytes() for folder in folders.values()]
    assert graphs[0] != graphs[1]


def test_the_backend_of_the_page_refuses_in_words(optimized: types.ModuleType) -> None:
    staged = types.SimpleNamespace(stages=(1, 2))
    with pytest.raises(KvlatheError, match="more than one graph"):
        optimized.check_plan(NAME, staged)
