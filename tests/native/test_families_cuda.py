"""Every family through the cuda backend on a GPU, against transformers: logits of
prompts in chunks and of decoded tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvlathe.engines.build import BuildConfig, build
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native import library as native
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.native.library import Library
from tests.support.checkpoints import ON_GPUS, WITH_STATES, make_model
from tests.support.families import FAMILIES
from tests.support.families.sizes import sizes

WIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "d64-g4": ("Llama", sizes(256, 8, 2, 64)),
    "d80-mqa": ("Llama", sizes(160, 4, 1, 80)),
    "d96-g7": ("Qwen2", sizes(168, 7, 1, 96)),
    "d128-g8": ("Mistral", sizes(256, 8, 1, 128, sliding_window=None)),
    "d256-g2": ("Llama", sizes(128, 4, 2, 256)),
    "d256-g8-windows": ("Mistral", sizes(128, 8, 1, 256, sliding_window=40)),
    "d512-mqa": ("Llama", sizes(128, 4, 1, 512)),
}
"""Heads as large as people's."""
MODELS = {name: FAMILIES[name] for name in (*ON_GPUS, *WITH_STATES)} | WIDE
TOKENS = 150
NEW = 20
HALVES = 3
"""Times the error of transformers in float16 on the same GPU that ours may have: pages
and products are rounded in another order."""
ROUTED_ALIKE = 0.85
"""The least share of a model's tokens that experts get alike: the others' router has a
near tie, which halves decide otherwise than float32, in transformers too."""
LEAST = 2e-3
"""A share of the largest logit: below this an error in halves says nothing."""

Logits = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def gpu(library: Library) -> Library:
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    return library


@torch.inference_mode()
def references(model: torch.nn.Module, ids: list[int]) -> tuple[Logits, Logits]:
    """[tokens, vocab] of transformers, in float32 on the CPU and in float16 on the
    GPU."""
    exact = model(torch.tensor([ids])).logits[0]
    on_gpu = model.to(device="cuda", dtype=torch.float16)
    halves = on_gpu(torch.tensor([ids], device="cuda")).logits[0]
    return exact.numpy(), halves.float().cpu().numpy()


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(
    name: str, gpu: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLATHE_LIBRARY", str(gpu.path.resolve()))
    native.find.cache_clear()
    kind, settings = MODELS[name]
    model = make_model(tmp_path / "model", kind, settings)
    asked = BuildConfig(
        tmp_path / "model",
        tmp_path / "engine",
        backend="cuda",
        dtype="float16",
        device="cpu",
        max_batch_size=2,
        max_seq_len=TOKENS + NEW,
        prefill_chunk=64,
        use_cache=False,
    )
    rng = np.random.default_rng(0)
    text = settings.get("text_config", settings)
    prompt = rng.integers(3, text["vocab_size"], TOKENS).tolist()
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True, logprobs=0)
    with LLM.load(build(asked), cache_bytes=1 << 26) as llm:
        ours = llm.logits(prompt, range(TOKENS))
        answer = llm.generate([prompt], params)[0]
    whole = prompt + answer.token_ids
    exact, halves = references(model, whole)
    most = max(LEAST * np.abs(exact).max(), HALVES * np.abs(halves - exact).max())
    close = ROUTED_ALIKE if any("experts" in key for key in settings) else 1.0
    errors = np.abs(ours - exact[:TOKENS]).max(-1)
    assert np.quantile(errors, close) <= most
    # Decoded tokens: what the model says of each after all before it.
    said = exact[TOKENS - 1 : -1]
    own = said[np.arange(NEW), answer.token_ids]
    logprobs = own - np.log(np.exp(said).sum(-1))
    assert answer.logprobs is not None
    found = [token.logprob for token in answer.logprobs]
    assert np.quantile(np.abs(found - logprobs), close) <= 2 * most
    assert np.quantile(said.max(-1) - own, close) <= 2 * most
