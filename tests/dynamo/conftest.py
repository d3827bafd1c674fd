"""Engines and the same ones alone, for tests with a real Dynamo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from kvlathe.runtime.llm import LLM
from tests.support.triton_server import ROOT


@pytest.fixture(scope="session")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``engine_of(compression)``: lathe-5m with small blocks, so that prompts have
    some."""
    pytest.importorskip("torch")
    from kvlathe.engines.build import build
    from kvlathe.engines.config import BuildConfig

    @cache
    def made(compression: str) -> Path:
        target = tmp_path_factory.mktemp("engines") / "engine"
        request = BuildConfig(
            ROOT / "models/lathe-5m",
            target,
            compression,
            max_batch_size=8,
            max_seq_len=1024,
            tokens_per_block=64,
            prefill_chunk=64,
        )
        return build(request)

    return made


@pytest.fixture(scope="session")
def alone(engine_of: Callable[[str], Path]) -> Iterator[Callable[[str], LLM]]:
    """The same engine in this process: what each request gives by itself."""

    @cache
    def loaded(compression: str) -> LLM:
        return LLM.load(engine_of(compression), threads=1)

    yield loaded
