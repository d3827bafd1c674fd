"""A draft engine on a GPU, for a model on one GPU and on two: guesses change no text, and
those of an engine that is nearly the model's are mostly right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvlathe.engines.build import BuildConfig, build
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native import library as native
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.native.library import Library
from tests.support.drafts import whatever_is_guessed
from tests.support.runtime_cases import MODEL, text

CLOSE = 0.02
"""A share of the largest logit: sums are rounded to 16 bit in another order."""
GREEDY = SamplingParams(max_new_tokens=48, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "backend": "cuda",
    "dtype": "float16",
    "max_batch_size": 8,
    "max_seq_len": 1024,
    "prefill_chunk": 128,
    "measure": False,
}
AGAIN = [*text(40), *text(60, 300), *text(40)]
PROMPTS = [AGAIN, list(text(150, 20)), AGAIN[7:], list(text(500, 9))]


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("guesser", ["ngram", "draft"])
def test_guesses_of_a_gpu_change_no_greedy_text(
    guesser: str,
    gpus: int,
    library: Library,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The draft engine has 8-bit pages of the same model. Rounding may change an answer
    where two tokens are close, so each is followed as far as the model's own choice is
    clear."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < gpus or not library.has_cuda:
        pytest.skip(f"{count} GPUs, and {gpus} are needed, with a library for them")
    monkeypatch.setenv("KVLATHE_LIBRARY", str(library.path.resolve()))
    native.find.cache_clear()
    engine = build(BuildConfig(MODEL, tmp_path / "engine", **OPTIONS))
    if guesser == "draft":
        smaller: dict[str, Any] = {**OPTIONS, "compression": "hack:bits=8"}
        guesser = str(build(BuildConfig(MODEL, tmp_path / "draft", **smaller)))
    with LLM.load(engine, 1 << 27, tensor_parallel_size=gpus) as llm:
        llm.speculate(guesser, 4)
        made = whatever_is_guessed(llm.engine.scheduler.speculation)
        answers = llm.generate(PROMPTS, GREEDY)
        assert made.failures == 0 and made.accepted > made.drafted / 3 > 10
    with LLM.load(engine, 1 << 27) as llm:
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            whole = prompt + answer.token_ids
            logits = llm.logits(whole, range(len(prompt) - 1, len(whole) - 1))
            own = logits[np.arange(len(logits)), answer.token_ids]
            most = 2 * CLOSE * np.abs(logits).max()
            assert (logits.max(1) - own < most).all()
