"""The cuda backend end to end on a GPU: the logits and the tokens of the onnxruntime
engine of the same plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvlathe.runtime.cache.page_table import PageTable
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.sessions.gpu.session import DeviceSession
from kvlathe.runtime.sessions.protocols import StepPlan
from kvlathe.runtime.sessions.torch_cuda.compute import TorchCompute
from kvlathe.runtime.sessions.torch_cuda.session import TorchSession
from kvlathe.runtime.text.sampler import Request, Sampler, rows_of
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.native.library import Library
from tests.native.pairs import engine_pair
from tests.support.session_laws import (
    device_session,
    next_step,
    pages_move_and_come_back,
)

PROMPTS = [
    "def main():\n",
    "# How to install\n\nRun ",
    "The cache of keys and values " * 30,
    "import numpy as np\n\n\nclass ",
]
PLANS: dict[str, dict[str, Any]] = {
    "none": {},
    "projected": {"compression": "fdc", "removal_rate": 0.15},
    "8 bit": {"compression": "fdc+hack:bits=8", "removal_rate": 0.15},
    "chosen": {"compression": "auto", "compression_ratio": 0.8},
    "window": {"compression": "window:sink=64,recent=128"},
    "window of codes": {"compression": "hack:bits=8+window:sink=64,recent=64"},
    "kivi": {"compression": "kivi"},
    "3 bit": {"compression": "hack:bits=3"},
    "fixed levels": {"compression": "turboquant:bits=3"},
}
CLOSE = {"chosen": 4e-2, "kivi": 4e-2, "3 bit": 4e-2, "fixed levels": 4e-2}
"""Shares of the largest logit; 1e-2 otherwise. Numbers that were rounded otherwise to
16 bit may get another of four codes. Twice what an H200 gave on three texts: 2.0e-2; 8
bit 6.3e-3, projected 2.7e-3."""
GREEDY = rows_of([Request(Sampler(SamplingParams()), [], 0)])
LIMITS: dict[str, Any] = {
    "device": "cpu",  # of the build: both engines have the same plan
    "max_batch_size": 4,
    "max_seq_len": 1024,
    "prefill_chunk": 128,
}


@pytest.fixture(scope="module", params=PLANS)
def pair(
    request: pytest.FixtureRequest,
    library: Library,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[LLM, LLM]]:
    """The same plan on the GPU and on the CPU, both with 16-bit hot pages."""
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    options = {**LIMITS, **PLANS[request.param]}
    folder = tmp_path_factory.mktemp("engines")
    with engine_pair(folder, library.path, options) as engines:
        assert isinstance(engines[0].session, DeviceSession)
        assert isinstance(engines[0].session.compute, TorchCompute)
        yield engines


def test_logits_are_those_of_the_cpu(
    pair: tuple[LLM, LLM], request: pytest.FixtureRequest
) -> None:
    """Across chunks and sealed pages, relative to the largest logit."""
    tokens = pair[1].encode(PROMPTS[2])[:300]
    on_gpu, on_cpu = (llm.logits(tokens, range(len(tokens))) for llm in pair)
    close = CLOSE.get(request.node.callspec.params["pair"], 1e-2)
    assert np.abs(on_gpu - on_cpu).max() <= close * np.abs(on_cpu).max()
    alike = (on_gpu.argmax(-1) == on_cpu.argmax(-1)).mean()
    assert alike >= 0.98


def test_answers_are_those_of_the_cpu(pair: tuple[LLM, LLM]) -> None:
    """Four requests at once, through prefill chunks, graphs of shrinking batches and
    seals: greedy tokens."""
    params = SamplingParams(max_new_tokens=100, temperature=0.0, ignore_eos=True)
    on_gpu, on_cpu = (
        [answer.token_ids for answer in llm.generate(PROMPTS, params)] for llm in pair
    )
    assert all(len(tokens) == 100 for tokens in on_gpu)
    same = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), 100)
        for x, y in zip(on_gpu, on_cpu, strict=True)
    ]
    assert sorted(same)[1:] == [100] * 3 or min(same) >= 60, same


def test_a_request_does_not_depend_on_its_neighbours(pair: tuple[LLM, LLM]) -> None:
    params = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)
    alone = [pair[0].generate(prompt, params)[0].token_ids for prompt in PROMPTS]
    assert (
        sum(
            a == b.token_ids
            for a, b in zip(alone, pair[0].generate(PROMPTS, params), strict=True)
        )
        >= 3
    )


def test_penalties_by_counts_are_those_of_the_host(pair: tuple[LLM, LLM]) -> None:
    llm = pair[0]
    session = llm.session
    assert isinstance(session, TorchSession)
    params = [
        SamplingParams(
            max_new_tokens=60,
            temperature=0.7,
            seed=seed,
            presence_penalty=seed / 2,
            frequency_penalty=0.2,
            repetition_penalty=1.2,
            ignore_eos=True,
        )
        for seed in range(len(PROMPTS))
    ]
    counted = [answer.token_ids for answer in llm.generate(PROMPTS, params)]
    assert session._counts is not None
    every = session.capabilities
    session.capabilities = every - {"counts_tokens"}  # the host changes logits
    try:
        host = [answer.token_ids for answer in llm.generate(PROMPTS, params)]
    finally:
        session.capabilities = every
    alike = [a == b for a, b in zip(counted, host, strict=True)]
    assert sum(alike) >= 3, "one may part where a draw falls on a rounding"


def test_pages_move_and_come_back(pair: tuple[LLM, LLM]) -> None:
    pages_move_and_come_back(device_session(pair[0]))


def _known(
    llm: LLM, session: TorchSession, table: PageTable
) -> tuple[list[int], list[StepPlan]]:
    """Tokens of greedy steps, each known before the next, and the steps."""
    tokens, steps = [7], []
    for _ in range(12):
        steps.append(next_step(llm, table, tokens[-1]))
        tokens.append(session.start(steps[-1])(GREEDY).result().token(0))
    return tokens[1:], steps


def test_steps_follow_each_other_on_the_gpu(pair: tuple[LLM, LLM]) -> None:
    """Steps whose tokens the host never knows give what known ones give."""
    llm = pair[0]
    session, table = llm.session, llm.pool.open()
    assert isinstance(session, TorchSession)
    tokens, steps = _known(llm, session, table)
    flights = [session.start(steps[0])(GREEDY)]
    for step in steps[1:]:
        unknown = np.zeros(1, np.int32)
        step = dataclasses.replace(step, input_ids=unknown, after=unknown)
        flights.append(session.start(step)(GREEDY))
    assert [flight.result().token(0) for flight in flights] == tokens
    llm.pool.release(table)


def test_a_captured_step_holds_no_attention_of_torch(pair: tuple[LLM, LLM]) -> None:
    """Kernels of a replayed decode step: ours, matrix products and elementwise ones; no
    softmax, no torch attention."""
    llm = pair[0]
    session, table = llm.session, llm.pool.open()
    step = next_step(llm, table, 9)
    session.run(step)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        session.run(step)
        torch.cuda.synchronize()
    names = " ".join(event.key for event in profile.key_averages())
    assert "attend" in names and "append_" in names
    assert not any(
        word in names.lower()
        for word in ("softmax", "sdpa", "flash", "fmha", "scaled_dot")
    )
    llm.pool.release(table)


def test_prompts_are_attended_in_tiles(pair: tuple[LLM, LLM]) -> None:
    """The first chunk of a prompt goes through the kernel for chunks."""
    llm = pair[0]
    compute = device_session(llm).compute
    assert isinstance(compute, TorchCompute)
    if not compute.attention.tiled:
        pytest.skip("this GPU attends chunks as rows")
    tokens = llm.encode(PROMPTS[2])[:100]
    llm.logits(tokens, [99])
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        llm.logits(tokens, [99])
        torch.cuda.synchronize()
    names = " ".join(event.key for event in profile.key_averages())
    assert "attend_prompt" in names
    assert not any(
        word in names.lower() for word in ("sdpa", "flash", "fmha", "scaled_dot")
    )
