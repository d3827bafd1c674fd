"""Tiers by age on a GPU: newest tokens in one format, older ones in another. Logits are
those of the CPU on random ragged steps, and texts do not depend on where a sequence is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvlathe.engines.build import BuildConfig, build
from kvlathe.plan.kernel_forms import UNPROVEN
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native import library as native
from tests.native.library import Library
from tests.native.pairs import engine_pair
from tests.support.aged_laws import Engine, Way, random_steps
from tests.support.runtime_cases import MODEL, forced

PLANS = {
    "2 bit": "hack:bits=2,recent=128",
    "3 bit": "hack:bits=3,recent=64,sink=0",
    "8 bit before 4": "hack:bits=4,recent=256,recent_bits=8",
}
CHUNK = 128
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_seq_len": 1024,
    "max_batch_size": 4,
    "prefill_chunk": CHUNK,
    "max_num_tokens": 4 * CHUNK,
    "measure": False,
}
NEAR, CLOSE = 4e-2, 4e-3
"""Shares of the largest logit: two tokens that are a tie, and the root mean square of what
differs. A number that was rounded otherwise to 16 bits may get another of four codes: on
CPUs, with 16-bit pages and with 32-bit ones, that is 1e-3, and 13e-3 without newest tokens
in more bits."""


@pytest.mark.parametrize("plan", PLANS)
def test_logits_of_random_ragged_steps_are_those_of_the_cpu(
    plan: str, library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    monkeypatch.setenv(UNPROVEN, "1")
    asked = {**OPTIONS, "compression": PLANS[plan]}
    with engine_pair(tmp_path, library.path, asked) as pair:
        for seed in range(4):
            texts, schedule = random_steps(seed, CHUNK)
            found, expected = (forced(llm, texts, schedule) for llm in pair)
            for ours, theirs in zip(found, expected, strict=True):
                apart = np.abs(ours - theirs) / np.abs(theirs).max()
                alike = (ours.argmax(-1) == theirs.argmax(-1)).mean()
                rms = np.sqrt((apart**2).mean())
                print(f"{plan} {seed}: {apart.max():.1e} {rms:.1e} {alike:.3f}")
                assert rms <= CLOSE and alike >= 0.98


@pytest.fixture(scope="module")
def engine(
    library: Library, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(UNPROVEN, "1")
        patch.setenv("KVLATHE_LIBRARY", str(library.path.resolve()))
        native.find.cache_clear()
        folder = tmp_path_factory.mktemp("aged") / "engine"
        asked: dict[str, Any] = {**OPTIONS, "backend": "cuda", "dtype": "float16"}
        asked["compression"] = PLANS["2 bit"]
        made = build(BuildConfig(MODEL, folder, use_cache=False, **asked))

        def loaded(size: int, share: bool) -> LLM:
            return LLM.load(made, cache_bytes=size, share_prefixes=share)

        yield Engine(loaded, NEAR)
    native.find.cache_clear()


def test_texts_together_and_guessed_are_those_alone(engine: Engine) -> None:
    engine.together_and_guessed()


def test_texts_behind_a_prefix_are_those_alone(engine: Engine) -> None:
    engine.behind_prefixes()


@pytest.mark.parametrize("way", ["computed again", "kept on the host"])
def test_preempted_texts_are_those_alone(
    engine: Engine, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.preempted(way, monkeypatch)


def test_a_sequence_goes_on_in_another_pool(engine: Engine) -> None:
    engine.moved()
