"""Engines whose layers keep states on a GPU: whatever runs beside a sequence, and
wherever it stops and goes on, its text is the same, but where the model itself has a near
tie. Their logits are those of transformers (test_families_cuda.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvlathe.engines.build import BuildConfig, build
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.memory import states_room
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native import library as native
from tests.native.library import Library
from tests.support.checkpoints import make
from tests.support.drafts import Reader, trying
from tests.support.preemption import preempt_all

NAMES = (
    "qwen3_next",
    "qwen3_5_text",
    "nemotron_h",
    "granitemoehybrid",
    "lfm2",
    "falcon_h1",
)
CODED = ("qwen3_5_text", "falcon_h1")
BATCH, CHUNK, ANSWER, LONGEST = 6, 64, 32, 256
NEAR = 0.02
"""A share of the largest logit: two tokens that differ by less are a near tie in
halves."""

Texts = list[tuple[int, ...]]


def prompts() -> list[list[int]]:
    """24, some of which begin alike: within a block, and past two."""
    draw = np.random.default_rng(5)
    found = [draw.integers(3, 97, n).tolist() for n in draw.integers(1, 180, 24)]
    found[4] = found[3][:20] + found[4]
    found[7] = (found[6] * 3)[:150]
    found[8] = found[7][:140] + found[8][:40]
    return found


def texts(llm: LLM, asked: list[list[int]]) -> Texts:
    answers = llm.generate(asked, max_new_tokens=ANSWER, ignore_eos=True)
    return [tuple(answer.token_ids) for answer in answers]


class Judge:
    """``model`` says whether two texts are one."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.parted, self.seen = model, 0, 0

    @torch.inference_mode()
    def alike(self, asked: list[list[int]], found: Texts, expected: Texts) -> None:
        for prompt, one, other in zip(asked, found, expected, strict=True):
            self.seen += 1
            if one == other:
                continue
            self.parted += 1
            end = next(i for i in range(ANSWER) if one[i] != other[i])
            ids = torch.tensor([[*prompt, *one[:end]]])
            logits = self.model(ids).logits[0, -1]
            apart = logits.max() - torch.minimum(logits[one[end]], logits[other[end]])
            assert apart <= NEAR * logits.abs().max()


@pytest.fixture
def gpu(library: Library, monkeypatch: pytest.MonkeyPatch) -> Library:
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    monkeypatch.setenv("KVLATHE_LIBRARY", str(library.path.resolve()))
    native.find.cache_clear()
    return library


@pytest.mark.parametrize(
    ("name", "method"),
    [*[(name, "none") for name in NAMES], *[(name, "hack:bits=8") for name in CODED]],
)
def test_texts_are_equal_alone_together_speculated_with_prefixes_and_preempted(
    name: str,
    method: str,
    gpu: Library,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make(tmp_path / "model", name)
    config = BuildConfig(
        tmp_path / "model",
        tmp_path / "engine",
        backend="cuda",
        dtype="float16",
        device="cpu",
        compression=method,
        use_cache=False,
        measure=False,
        max_seq_len=LONGEST,
        max_batch_size=BATCH,
        prefill_chunk=CHUNK,
    )
    folder, asked, judge = build(config), prompts(), Judge(model)
    small = 1 << 26
    with LLM.load(folder, cache_bytes=small) as llm:
        alone = [texts(llm, [one])[0] for one in asked]
        judge.alike(asked, texts(llm, asked), alone)
        whole = [[*one, *answer] for one, answer in zip(asked, alone, strict=True)]
        made = llm.engine.speculate(trying(Reader(3, 0.2, whole)))
        judge.alike(asked, texts(llm, asked), alone)
        assert made.drafted > made.accepted > 100
        layout = CacheLayout(llm.plan)
    with LLM.load(folder, cache_bytes=small, share_prefixes=True) as llm:
        prefixes = llm.engine.scheduler.prefixes
        assert prefixes is not None
        judge.alike(asked, [texts(llm, [one])[0] for one in asked], alone)
        assert prefixes.hits >= 2 * CHUNK
        judge.alike(asked, texts(llm, asked), alone)
    size = states_room(layout, BATCH) + int(layout.bytes_for(LONGEST) * 2.2)
    preempted = 0
    for recomputes in (True, False):
        with LLM.load(folder, cache_bytes=size, share_prefixes=recomputes) as llm:
            scheduler = llm.engine.scheduler
            preempt_all(scheduler, recomputes, monkeypatch)
            judge.alike(asked, texts(llm, asked), alone)
            preempted += scheduler.preemptions
    assert preempted > 4
    print(f"{name} {method}: {judge.parted} of {judge.seen} texts part at a near tie")
