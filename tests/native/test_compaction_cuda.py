"""Prefixes that are compacted on a GPU: what is kept and what is answered behind it,
against the session on the CPU and against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native.cuda import CudaLibrary
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.requests import compaction
from kvlathe.runtime.sessions.torch_cuda.tokens.evicting import CompactingSession
from kvlathe.runtime.text.sampling_params import SamplingParams
from tests.native.library import Library
from tests.native.pairs import engine_pair
from tests.native.test_rules_cuda import on_gpu
from tests.support import compaction_laws as laws
from tests.support.compaction_cases import PART, PREFIX, prompt
from tests.support.prefix_cases import forget
from tests.support.ranking_laws import on_cpu

METHODS: dict[str, dict[str, Any]] = {
    "each": {"compression": "kvzip"},
    "same": {"compression": "kvzip:heads=same"},
    "4 bit": {"compression": "kvzip+hack:bits=4"},
    "projected": {"compression": "fdc+kvzip", "removal_rate": 0.15},
}
SIZES: dict[str, Any] = {
    "device": "cpu",  # of the build: both engines have the same plan
    "max_batch_size": 4,
    "max_seq_len": 2048,
    "prefill_chunk": 128,
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "PART", PART)


@pytest.fixture(scope="module")
def cuda(library: Library) -> CudaLibrary:
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    return CudaLibrary(Native.load(library.path))


def compacting(cuda: CudaLibrary, kind: str) -> LLM:
    llm = on_gpu(cuda, laws.compacting_plan(kind))
    assert isinstance(llm.session, CompactingSession)
    return laws.share_prefixes(llm)


@pytest.mark.parametrize("kind", laws.KINDS)
def test_scores_and_pairs_are_those_of_the_cpu(cuda: CudaLibrary, kind: str) -> None:
    theirs = laws.share_prefixes(on_cpu(laws.compacting_plan(kind)))
    laws.scores_and_pairs_are_those_of_the_cpu(compacting(cuda, kind), theirs, 0.4)


@pytest.mark.parametrize("kind", laws.KINDS)
@pytest.mark.parametrize("keep", [0.1, 0.25, 0.6])
def test_answers_are_those_of_attention_with_the_dropped_pairs_masked(
    cuda: CudaLibrary, kind: str, keep: float
) -> None:
    close = 2e-2 if kind == "sealed compacted" else 1e-2
    laws.answers_are_those_of_masked_attention(compacting(cuda, kind), keep, close)


@pytest.mark.parametrize("kind", laws.KINDS)
def test_compacting_nothing_changes_no_answer_on_a_gpu(
    cuda: CudaLibrary, kind: str
) -> None:
    laws.nothing_changes_where_all_pairs_stay(compacting(cuda, kind))


@pytest.mark.parametrize("kind", laws.KINDS)
def test_requests_share_the_pages_of_a_compacted_prefix_on_a_gpu(
    cuda: CudaLibrary, kind: str
) -> None:
    laws.requests_share_the_pages(compacting(cuda, kind))


@pytest.mark.parametrize("kind", laws.KINDS)
def test_requests_and_a_compaction_beside_them_come_to_what_each_does_alone(
    cuda: CudaLibrary, kind: str
) -> None:
    laws.requests_beside_a_compaction(compacting(cuda, kind), 20)


@pytest.fixture(scope="module", params=METHODS)
def pair(
    request: pytest.FixtureRequest,
    cuda: CudaLibrary,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[LLM, LLM]]:
    """Engines of the same plan on the GPU and on the CPU, with 16-bit hot pages."""
    options = {**SIZES, **METHODS[request.param]}
    folder = tmp_path_factory.mktemp("engines")
    with engine_pair(folder, cuda.path, options) as engines:
        assert isinstance(engines[0].session, CompactingSession)
        for llm in engines:
            laws.share_prefixes(llm)
        yield engines


def test_engines_keep_what_the_cpu_keeps(pair: tuple[LLM, LLM]) -> None:
    """And their logits and answers are close, greedy and side by side."""
    ids = prompt()
    kept = [laws.compacted(llm, ids[:PREFIX], 0.3)[1] for llm in pair]
    assert laws.overlap(*kept) >= 0.95
    rows = range(PREFIX, len(ids))
    found, expected = (llm.logits(ids, rows) for llm in pair)
    largest = np.abs(expected).max()
    assert np.abs(found - expected).max() <= 5e-2 * largest
    assert np.median(np.abs(found - expected)) <= 5e-3 * largest
    params = SamplingParams(max_new_tokens=60, temperature=0.0, ignore_eos=True)
    prompts = [ids, [*ids[: PREFIX + 9], 7, 8], [*ids[:PREFIX], 30]]
    ours, theirs = (
        [x.token_ids for x in llm.generate(prompts, params)] for llm in pair
    )
    assert all(len(tokens) == 60 for tokens in ours)
    for one, here, there in zip(prompts, ours, theirs, strict=True):
        forced = laws.answer_rows(one, there)
        found, expected = (llm.logits(*forced) for llm in pair)
        apart = np.abs(found - expected).max(1)
        assert np.median(apart) <= 5e-2 * largest
        count = laws.sure(expected, 2 * apart + 5e-3 * largest)
        assert here[:count] == there[:count]
    for llm in pair:
        forget(llm)
