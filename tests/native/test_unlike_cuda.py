"""The cuda backend on a GPU with models whose layers differ (Gemma 4): heads of two
shapes, values that are a part of their keys, caches that several layers read, embeddings
for each layer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvlathe.runtime.llm import LLM
from kvlathe.runtime.sessions.torch_cuda.session import TorchSession
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.native.library import Library
from tests.native.pairs import engine_pair
from tests.support.unlike_models import make_unlike

PLANS = ("none", "hack:bits=8", "hack:bits=4")
CASES = [
    *(("31B", plan) for plan in PLANS),
    *(("E2B", plan) for plan in PLANS),
    ("narrow", "none"),
    ("narrow E2B", "none"),
    ("narrow E2B", "hack:bits=8"),
    ("narrow E2B", "auto"),
    ("experts", "none"),
]
MOST = {"none": 0.03, "auto": 0.2}
"""Errors of nearly all rows as shares of the largest logit; 0.08 otherwise. A number that
is rounded otherwise to 16 bit may get another of four codes. Single rows are worse
conditioned: at 4 bits one of the E2B's has 0.27 on a GPU and on a CPU in halves alike."""
TOKENS, NEW = 300, 40
GREEDY = SamplingParams(NEW, temperature=0.0, ignore_eos=True)


def ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 97, count).tolist()


@pytest.fixture(scope="module", params=CASES, ids=lambda case: " ".join(case))
def pair(
    request: pytest.FixtureRequest,
    library: Library,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[LLM, LLM]]:
    """The same plan on the GPU and on the CPU, both with 16-bit hot pages."""
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    name, compression = request.param
    folder = tmp_path_factory.mktemp("engines")
    make_unlike(folder / "model", name)
    options = {
        "compression": compression,
        "device": "cpu",
        "max_batch_size": 4,
        "max_seq_len": 512,
        "prefill_chunk": 128,
        "measure": False,
    }
    if compression == "auto":
        options |= {"compression_ratio": 0.6, "calibration": "random"}
    with engine_pair(folder, library.path, options, folder / "model") as engines:
        assert isinstance(engines[0].session, TorchSession)
        yield engines


def test_logits_of_unlike_layers_are_those_of_the_cpu(
    pair: tuple[LLM, LLM], request: pytest.FixtureRequest
) -> None:
    """Prompts in chunks, longer than every window. Of experts most rows: a near tie of
    the router is decided otherwise in halves."""
    prompt = ids(TOKENS, 1)
    on_gpu, on_cpu = (llm.logits(prompt, range(TOKENS)) for llm in pair)
    errors, largest = np.abs(on_gpu - on_cpu), np.abs(on_cpu).max()
    name, compression = request.node.callspec.params["pair"]
    assert np.median(errors.max(-1)) <= 2e-2 * largest
    assert (on_gpu.argmax(-1) == on_cpu.argmax(-1)).mean() >= 0.93
    if name != "experts":
        assert errors.mean() <= 5e-3 * largest
        most = MOST.get(compression, 0.08) * largest
        assert np.quantile(errors.max(-1), 0.97) <= most


def test_answers_of_unlike_layers_are_those_of_the_cpu(
    pair: tuple[LLM, LLM],
) -> None:
    """Four requests at once, through chunks, graphs of shrinking batches and seals: each
    token is the CPU's best after what came before it, or as good within halves."""
    prompts = [ids(n, n) for n in (90, 17, 150, 64)]
    on_gpu, on_cpu = pair
    answers = [answer.token_ids for answer in on_gpu.generate(prompts, GREEDY)]
    alike = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = prompt + answer
        said = on_cpu.logits(whole, range(len(prompt) - 1, len(whole) - 1))
        own = said[np.arange(NEW), answer]
        near = said.max(-1) - own <= 5e-2 * np.abs(said).max()
        alike += int(near.sum())
    assert alike >= 0.95 * NEW * len(prompts)


def test_a_request_does_not_depend_on_its_neighbours(pair: tuple[LLM, LLM]) -> None:
    prompts = [ids(n, n) for n in (90, 17, 150, 64)]
    llm = pair[0]
    alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    together = [answer.token_ids for answer in llm.generate(prompts, GREEDY)]
    assert sum(a == b for a, b in zip(alone, together, strict=True)) >= 3
