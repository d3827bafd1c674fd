"""LoRA adapters of the cuda backend on a GPU: logits and answers of the CPU's engine of
the same plan, mixed in one batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvlathe.runtime.llm import LLM
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.native.library import Library
from tests.native.pairs import MODEL, engine_pair
from tests.support.adapters import write_adapter

PROMPTS = [
    "def main():\n",
    "# How to install\n\nRun ",
    "The cache of keys and values " * 30,
    "import numpy as np\n\n\nclass ",
]
RANKS = {"red": 8, "green": 5, "blue": 16}
NAMES = (None, *RANKS)
PLANS: dict[str, dict[str, Any]] = {
    "none": {},
    "projected": {"compression": "fdc", "removal_rate": 0.15},
    "4 bit": {"compression": "hack:bits=4"},
}
CLOSE = {"4 bit": 4e-2}
"""Shares of the largest logit; 1e-2 otherwise, as without adapters."""
LIMITS: dict[str, Any] = {
    "device": "cpu",  # of the build: both engines have the same plan
    "max_batch_size": 8,
    "max_seq_len": 1024,
    "prefill_chunk": 128,
    "measure": False,
    "enable_lora": True,
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    for seed, (name, rank) in enumerate(RANKS.items()):
        write_adapter(
            folder / name,
            model,
            seed,
            rank_of=lambda _, rank=rank: rank,
            r=rank,
            lora_alpha=rank / 4,
        )
    return folder


@pytest.fixture(scope="module", params=PLANS)
def pair(
    request: pytest.FixtureRequest,
    library: Library,
    adapters: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[LLM, LLM]]:
    """On the GPU and on the CPU, with the same adapters."""
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    folder = tmp_path_factory.mktemp("engines")
    options = {**LIMITS, **PLANS[request.param]}
    with engine_pair(folder, library.path, options) as engines:
        for engine in engines:
            for name in RANKS:
                engine.load_adapter(name, adapters / name)
        yield engines


def test_logits_with_adapters_are_those_of_the_cpu(
    pair: tuple[LLM, LLM], request: pytest.FixtureRequest
) -> None:
    tokens = pair[1].encode(PROMPTS[2])[:200]
    close = CLOSE.get(request.node.callspec.params["pair"], 1e-2)
    plain = pair[1].logits(tokens, range(len(tokens)))
    for name in NAMES:
        ours, theirs = (
            llm.logits(tokens, range(len(tokens)), adapter=name) for llm in pair
        )
        assert np.abs(ours - theirs).max() <= close * np.abs(theirs).max()
        if name is not None:
            assert np.abs(theirs - plain).max() > 0.1 * np.abs(plain).max()


def test_graphs_decode_mixes_of_adapters(pair: tuple[LLM, LLM]) -> None:
    """Eight answers with every adapter and none, each as it is alone: greedy tokens,
    but where two are as likely."""
    ours = pair[0]
    prompts = [*PROMPTS, *reversed(PROMPTS)]
    asked = [
        SamplingParams(max_new_tokens=48, ignore_eos=True, adapter=NAMES[i % 4])
        for i in range(len(prompts))
    ]
    together = [answer.token_ids for answer in ours.generate(prompts, asked)]
    same = 0
    for prompt, params, tokens in zip(prompts, asked, together, strict=True):
        alone = ours.generate([prompt], params)[0].token_ids
        assert alone[:8] == tokens[:8]
        same += alone == tokens
    assert same >= 6
    texts = {tuple(ours.generate([PROMPTS[1]], one)[0].token_ids) for one in asked[:4]}
    assert len(texts) == 4


def test_adapters_come_back_after_a_sleep(
    pair: tuple[LLM, LLM], adapters: Path
) -> None:
    """And stay what they were when another one is loaded."""
    ours = pair[0]
    params = SamplingParams(max_new_tokens=16, ignore_eos=True, adapter="red")
    before = ours.generate(PROMPTS[:1], params)[0].token_ids
    ours.sleep()
    ours.wake_up()
    assert ours.generate(PROMPTS[:1], params)[0].token_ids == before
    ours.load_adapter("late", adapters / "green")
    assert ours.generate(PROMPTS[:1], params)[0].token_ids == before
    ours.unload_adapter("late")


def test_an_adapter_is_taken_after_answers_that_all_had_another(
    library: Library, adapters: Path, tmp_path: Path
) -> None:
    """Graphs with adapters are all that there are, and go as the second one comes."""
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    params = [SamplingParams(16, ignore_eos=True, adapter=x) for x in ("red", "green")]
    with engine_pair(tmp_path, library.path, LIMITS) as (ours, _):
        answers: list[list[int]] = []
        for one in params:
            ours.load_adapter(str(one.adapter), adapters / str(one.adapter))
            answers.append(ours.generate(PROMPTS[:1], one)[0].token_ids)
        again = [ours.generate(PROMPTS[:1], one)[0].token_ids for one in params]
    assert again == answers and answers[0] != answers[1]
