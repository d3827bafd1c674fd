"""Steps with several rows a sequence in CUDA graphs, on a GPU: they give what they give
without one, whether rows are attended together or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvlathe.engines.build import BuildConfig, build
from kvlathe.plan.kernel_forms import UNPROVEN
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.sessions.torch_cuda.attention.bundles import Bundling
from kvlathe.runtime.sessions.torch_cuda.session import TorchSession
from tests.native.library import Library
from tests.support.runtime_cases import MODEL, forced, text

PLANS: dict[str, dict[str, Any]] = {
    "none": {},
    "8 bit": {"compression": "hack:bits=8"},
    "4 bit": {"compression": "hack:bits=4"},
    "newest in 4 bit": {"compression": "hack:bits=2,recent=64"},
    "windows": {"compression": "window:recent=128,sink=64"},
}
OPTIONS: dict[str, Any] = {
    "backend": "cuda",
    "dtype": "float16",
    "max_seq_len": 1024,
    "prefill_chunk": 128,
    "measure": False,
}
SCHEDULE = [(128, 128, 90), (72, 100, 0), (1, 1, 1), (4, 1, 2), (4, 4, 4), (0, 0, 9)]
SCHEDULE += [(3, 5, 8), (1, 1, 1), (2, 0, 7), (6, 6, 6)]
TOKENS = [sum(column) for column in zip(*SCHEDULE, strict=True)]


@pytest.mark.parametrize("plan", PLANS)
def test_graphs_of_guesses_give_what_such_steps_give_without_one(
    plan: str, library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random rows of three sequences, whose pages are in several forms."""
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    monkeypatch.setenv("KVLATHE_LIBRARY", str(library.path))
    monkeypatch.setenv(UNPROVEN, "1")
    options: dict[str, Any] = {**OPTIONS, **PLANS[plan]}
    engine = build(BuildConfig(MODEL, tmp_path / "engine", **options))
    llm = LLM.load(engine, cache_bytes=1 << 28, device="cuda")
    session = llm.session
    assert isinstance(session, TorchSession)
    texts = [text(count, 40 * i) for i, count in enumerate(TOKENS)]
    for together in (False, True):
        monkeypatch.setattr(Bundling, "pays", lambda *_, says=together: says)
        found: list[list[np.ndarray]] = []
        for captures in (False, True, True):  # the last one replays
            session.captures_guesses = captures
            found.append(forced(llm, texts, SCHEDULE))
        for graphs in found[1:]:
            for ours, theirs in zip(graphs, found[0], strict=True):
                assert np.abs(ours - theirs).max() <= 2e-3 * np.abs(theirs).max()
    bundled = {key[3] for key in session._graphs}
    assert bundled == {None, False, True}
    llm.close()
