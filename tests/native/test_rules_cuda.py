"""Token rules on a GPU: the kernels that observe and move tokens, and whole engines of every
method that ranks tokens, against the session on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.weights_file import wiring
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native.cuda import CudaLibrary
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.sessions.torch_cuda.compute import session_of
from kvlathe.runtime.sessions.torch_cuda.device import TorchDevice
from kvlathe.runtime.sessions.torch_cuda.model.decoder import TorchDecoder
from kvlathe.runtime.sessions.torch_cuda.model.rows import NativeRows
from kvlathe.runtime.sessions.torch_cuda.tokens.evicting import EvictingSession
from kvlathe.runtime.sessions.torch_cuda.tokens.stages import StagedSession
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.native.library import Library
from tests.native.pairs import engine_pair
from tests.support import staged_cases
from tests.support.formula_laws import Watched, likeness
from tests.support.observed_cases import Observation, observations
from tests.support.ranking_laws import (
    KINDS,
    OTHER_TOKEN,
    a_step_that_is_rolled_back_leaves_no_score,
    arena_bytes,
    moves_are_those_of_the_host,
    on_cpu,
    ranked_plan,
    scores_are_those_of_the_host,
    tokens_stay_as_on_the_cpu,
)
from tests.support.runtime_cases import LIMITS, MODEL, text

METHODS: dict[str, dict[str, Any]] = {
    "h2o": {"compression": "h2o:budget=128"},
    "snapkv": {"compression": "snapkv:budget=128"},
    "keyformer": {"compression": "keyformer:budget=128"},
    "tova": {"compression": "tova:budget=128"},
    "keydiff": {"compression": "keydiff:budget=128"},
    "keydiff of codes": {"compression": "keydiff:budget=128+hack:bits=4"},
    "knorm": {"compression": "fdc+knorm:budget=128", "removal_rate": 0.15},
    "zipcache": {"compression": "zipcache"},
    "zipcache by token": {"compression": "zipcache:keys=token,values=token"},
    "projected": {"compression": "fdc+h2o:budget=128", "removal_rate": 0.15},
    "uncomp": {"compression": "uncomp:budget=192,spread=128,stages=1"},
    "stages": {"compression": "uncomp:budget=192,spread=128,stages=3,least=256"},
}
SIZES: dict[str, Any] = {
    "device": "cpu",  # of the build: both engines have the same plan
    "max_batch_size": 4,
    "max_seq_len": 1024,
    "prefill_chunk": 128,
}


@pytest.fixture(scope="module")
def cuda(library: Library) -> CudaLibrary:
    if not (torch.cuda.is_available() and library.has_cuda):
        pytest.skip("no GPU, or a library without CUDA kernels")
    return CudaLibrary(Native.load(library.path))


def on_gpu(library: CudaLibrary, plan: CompressionPlan) -> LLM:
    checkpoint = Checkpoint(MODEL)
    weights = decoder_from(checkpoint, plan, Basis()).state_dict()
    tensors = {name: x.half().cuda() for name, x in weights.items()}
    decoder = TorchDecoder(wiring(checkpoint.spec, plan), tensors, NativeRows(library))
    size = arena_bytes(plan)
    session = session_of(TorchDevice(), library, decoder, plan, LIMITS, size)
    return LLM(session, plan, LIMITS, Tokenizer(MODEL), size)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(case=observations(300))
def test_scores_grow_by_what_observed_rows_attend(
    cuda: CudaLibrary, case: Observation
) -> None:
    case.check(case.run(cuda, "cuda"))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_move_as_on_the_cpu(cuda: CudaLibrary, kind: str) -> None:
    session = on_gpu(cuda, ranked_plan(kind)).session
    assert isinstance(session, EvictingSession)
    for seed in range(5):
        moves_are_those_of_the_host(session, seed)
        scores_are_those_of_the_host(session, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_the_session_keeps_the_tokens_of_the_cpu(cuda: CudaLibrary, kind: str) -> None:
    plan = ranked_plan(kind)
    ours, theirs = on_gpu(cuda, plan), on_cpu(plan)
    a_step_that_is_rolled_back_leaves_no_score(ours, theirs)
    tokens_stay_as_on_the_cpu(ours, theirs, list(text(900)), 700)


def test_keys_are_ranked_by_a_formula_as_the_reference_ranks_them(
    cuda: CudaLibrary,
) -> None:
    plan = ranked_plan("unlike keys")
    ours, theirs = on_gpu(cuda, plan), on_cpu(plan)
    watched = Watched(ours, likeness)
    # Cosines to one mean lie closer together than masses of attention do: what a 16-bit
    # key is rounded to decides more often. `watched` knows no such excuse.
    tokens_stay_as_on_the_cpu(ours, theirs, list(text(900)), 700, share=0.9)
    assert watched.dropped > 1000


@pytest.mark.parametrize("kind", [*KINDS, "unlike keys"])
def test_ranking_tokens_on_a_gpu_never_waits_for_the_gpu(
    cuda: CudaLibrary, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises where the host would wait for the GPU."""
    llm = on_gpu(cuda, ranked_plan(kind))
    session = llm.session
    assert isinstance(session, EvictingSession)
    select, ranked = session.select, []

    def strict(*given: Any) -> None:  # noqa: ANN401  (as EvictingSession.select)
        torch.cuda.set_sync_debug_mode("error")
        try:
            select(*given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        ranked.append(given)

    monkeypatch.setattr(session, "select", strict)
    params = SamplingParams(max_new_tokens=80, temperature=0.0, ignore_eos=True)
    [answer] = llm.generate([list(text(300))], params)
    assert len(answer.token_ids) == 80
    assert ranked


@pytest.mark.parametrize("kind", staged_cases.PLANS)
def test_a_prompt_loses_the_rows_that_it_loses_on_the_cpu(
    cuda: CudaLibrary, kind: str
) -> None:
    plan = staged_cases.PLANS[kind]
    ours, theirs = on_gpu(cuda, plan), staged_cases.engine(plan)
    assert isinstance(ours.session, StagedSession)
    # Its last layers have lost rows, and of two that are equally salient another one.
    tokens_stay_as_on_the_cpu(ours, theirs, list(text(330)), 300, of_prompt=OTHER_TOKEN)
    staged_cases.the_same_rows_stay(ours, theirs)


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
        assert isinstance(engines[0].session, EvictingSession)
        yield engines


def test_methods_keep_the_tokens_of_the_cpu(pair: tuple[LLM, LLM]) -> None:
    tokens_stay_as_on_the_cpu(*pair, list(text(700)), 500, 0.95)


def test_requests_side_by_side_are_answered(pair: tuple[LLM, LLM]) -> None:
    """Prompts of several lengths and decodes in CUDA graphs: as each is answered alone."""
    params = SamplingParams(max_new_tokens=80, temperature=0.0, ignore_eos=True)
    prompts = [list(text(n, 100 * n)) for n in (40, 200, 333)]
    together = pair[0].generate(prompts, params)
    alone = [pair[0].generate([prompt], params)[0] for prompt in prompts]
    firsts = [
        a.token_ids[:20] == b.token_ids[:20]
        for a, b in zip(together, alone, strict=True)
    ]
    assert sum(firsts) >= 2
    assert all(len(answer.token_ids) == 80 for answer in together)
