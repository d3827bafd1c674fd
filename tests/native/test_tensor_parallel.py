"""Engines on two and on four GPUs, over NCCL, beside the same engines on one: logits,
text, graphs, and a worker that dies."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvlathe.base.errors import DeviceLost
from kvlathe.engines.build import BuildConfig, build
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native import library as native
from kvlathe.runtime.sessions.torch_cuda.shards.parallel import LeaderSession
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.native.library import Library
from tests.support.checkpoints import make_model
from tests.support.families import FAMILIES
from tests.support.runtime_cases import MODEL, text

GPUS = (2, 4)
NAMES = ("llama", "qwen2-g7", "qwen3", "falcon-40b", "gpt2", "olmo2")
MOST = {"gpt2": 3, "olmo2": 2}
"""Shards that a model takes: one a query head, or a KV head (docs/scale.md)."""
PLANS: dict[str, dict[str, Any]] = {
    "none": {},
    "8 bit": {"compression": "hack:bits=8"},
    "shards": {"compression": "fdc+hack:bits=8", "removal_rate": 0.15},
}
CLOSE = 0.02
"""A share of the largest logit: sums are rounded to 16 bit in another order."""


@pytest.fixture(scope="module", params=GPUS)
def num_shards(request: pytest.FixtureRequest, library: Library) -> int:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted: int = request.param
    if count < wanted or not library.has_cuda:
        pytest.skip(f"{count} GPUs, and {wanted} are needed, with a library for them")
    return wanted


@pytest.fixture(autouse=True)
def used(num_shards: int, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLATHE_LIBRARY", str(library.path.resolve()))
    native.find.cache_clear()


def engine_of(model: Path, folder: Path, **asked: Any) -> Path:  # noqa: ANN401
    fixed: dict[str, Any] = {"backend": "cuda", "dtype": "float16", "device": "cpu"}
    fixed |= {"max_batch_size": 4, "max_seq_len": 1024, "prefill_chunk": 128}
    return build(BuildConfig(model, folder, use_cache=False, **fixed | asked))


def load(engine: Path, num_shards: int, share_prefixes: bool = False) -> LLM:
    size = 1 << 26
    return LLM.load(
        engine, size, share_prefixes=share_prefixes, tensor_parallel_size=num_shards
    )


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_families_are_those_of_one_gpu(
    name: str, num_shards: int, tmp_path: Path
) -> None:
    kind, settings = FAMILIES[name]
    if num_shards > MOST.get(name, num_shards):
        pytest.skip(f"{name} takes {MOST[name]} shards at most")
    make_model(tmp_path / "model", kind, settings)
    engine = engine_of(tmp_path / "model", tmp_path / "engine", max_seq_len=300)
    ids = np.random.default_rng(0).integers(3, 97, 200).tolist()
    found: list[np.ndarray] = []
    for gpus in (1, num_shards):
        with load(engine, gpus) as llm:
            found.append(llm.logits(ids, range(200)))
    assert np.abs(found[0] - found[1]).max() < CLOSE * np.abs(found[0]).max()


@pytest.mark.parametrize("plan", PLANS)
def test_text_is_that_of_one_gpu(plan: str, num_shards: int, tmp_path: Path) -> None:
    """Prompts in chunks, decode graphs with collectives inside, sampling; the second
    time prefixes are shared. Rounding may change an answer where two tokens are close,
    so each is followed as far as one GPU's own choice is clear."""
    engine = engine_of(MODEL, tmp_path / "engine", **PLANS[plan])
    prompts = [list(text(n, 40 * i)) for i, n in enumerate((700, 30, 200))]
    params = SamplingParams(max_new_tokens=32, ignore_eos=True)
    with load(engine, num_shards, share_prefixes=True) as llm:
        assert isinstance(llm.session, LeaderSession)
        llm.session.warm_up()
        answers = [llm.generate(prompts, params) for _ in range(2)]
        drawn = SamplingParams(max_new_tokens=16, temperature=0.8, top_p=0.9, seed=3)
        twice = [llm.generate(prompts, drawn) for _ in range(2)]
    assert [x.token_ids for x in twice[0]] == [x.token_ids for x in twice[1]]
    with load(engine, 1) as one:
        for answer, prompt in zip(answers[0], prompts, strict=True):
            whole = prompt + answer.token_ids
            rows = range(len(prompt) - 1, len(whole) - 1)
            logits = one.logits(whole, rows)
            own = logits[np.arange(len(rows)), answer.token_ids]
            most = CLOSE * np.abs(logits).max()
            assert (logits.max(1) - own < 2 * most).all()


def test_a_dead_worker_ends_requests_in_words(num_shards: int, tmp_path: Path) -> None:
    engine = engine_of(MODEL, tmp_path / "engine")
    params = SamplingParams(max_new_tokens=900, ignore_eos=True)
    llm = load(engine, num_shards)
    session = llm.session
    assert isinstance(session, LeaderSession)
    request = llm.thread.submit([llm.sequence(list(text(30)), params)])
    time.sleep(1)
    session.workers.followers[0].process.kill()
    started = time.monotonic()
    with pytest.raises(
        DeviceLost, match=rf"worker 1 of {num_shards} has ended.*SIGKILL"
    ):
        llm.thread.wait(request)
    assert time.monotonic() - started < 30
    llm.close()
