"""The CUDA kernels that rank tokens, run on a CPU thread by thread
(tests/native_cpu/emulated): alone, and below a whole session."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.weights_file import wiring
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native.cuda import F16, AttendDecodeArgs, CudaLibrary, LayerForm
from kvlathe.runtime.native.library import ABI_VERSION, Native
from kvlathe.runtime.sessions.gpu.pages import allocate_pool
from kvlathe.runtime.sessions.gpu.side_memory import scratch_bytes
from kvlathe.runtime.sessions.torch_cuda.attention.attend import Attention
from kvlathe.runtime.sessions.torch_cuda.attention.observing import Observer
from kvlathe.runtime.sessions.torch_cuda.compute import TorchCompute
from kvlathe.runtime.sessions.torch_cuda.device import bytes_of
from kvlathe.runtime.sessions.torch_cuda.inputs import StepInputs
from kvlathe.runtime.sessions.torch_cuda.model.decoder import TorchDecoder
from kvlathe.runtime.sessions.torch_cuda.tokens.evicting import EvictingSession
from kvlathe.runtime.sessions.torch_cuda.tokens.stages import StagedSession
from kvlathe.runtime.text.sampling_params import SamplingParams
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.support import staged_cases
from tests.support.device_engines import HostAttention, turned
from tests.support.emulated import RankingLibrary, emulated_kernels
from tests.support.formula_laws import Watched, likeness
from tests.support.host_device import HostTorchDevice
from tests.support.nightly import rest_nightly
from tests.support.observed_cases import Observation, observations
from tests.support.ranking_laws import (
    KINDS,
    a_step_that_is_rolled_back_leaves_no_score,
    arena_bytes,
    moves_are_those_of_the_host,
    on_cpu,
    ranked_plan,
    scores_are_those_of_the_host,
    tokens_stay_as_on_the_cpu,
)
from tests.support.runtime_cases import LIMITS, MODEL, text


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return emulated_kernels(tmp_path_factory.mktemp("emulated"))


class RankingAttention(HostAttention):
    """Attention by the library's op for the CPU; what it observes is left to the
    kernel."""

    def __init__(
        self,
        native: Native,
        library: CudaLibrary,
        plan: CompressionPlan,
        scales: list[float],
        pool: Tensor,
    ) -> None:
        super().__init__(native, plan, scales, pool)
        layout, layers = CacheLayout(plan), range(plan.model.layers)
        self.forms = {i: LayerForm(library, layout, i) for i in layers}
        most = LIMITS.max_num_tokens
        self.observer: Observer | None = None
        if plan.index.observation is not None:
            self.observer = Observer(plan, self.forms, pool.device, most)

    def run(
        self,
        step: StepInputs,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        angles: tuple[Tensor, Tensor] | None,
        weights: Mapping[str, Tensor],
    ) -> Tensor:
        out = super().run(step, layer, q, k, v, angles, weights)
        if self.observer is None:
            return out
        assert angles is not None
        queries = turned(q, *angles, self.plan.model.head_dim)
        form = self.forms[layer]
        call = AttendDecodeArgs(ABI_VERSION, F16, len(q), self.plan.model.group_size)
        call.page_tokens, call.part_count = self.plan.page_tokens, len(form.parts)
        call.scale, call.parts = self.scales[layer], form.parts
        for part, bucket in zip(form.parts, form.buckets, strict=True):
            part.page_table = step.page_tables[bucket].data_ptr()
            part.lengths = step.lengths.data_ptr()
            part.page_table_stride = 1
        call.pool, call.pool_bytes = self.pool.data_ptr(), self.pool.numel()
        call.q, call.q_stride = queries.data_ptr(), form.queries
        call.o, call.o_stride = out.data_ptr(), form.out
        self.observer.queue(layer, call, queries, step)
        return out


def in_torch(native: Native, kernels: ctypes.CDLL, plan: CompressionPlan) -> LLM:
    """The cuda backend's session in host memory."""
    checkpoint = Checkpoint(MODEL)
    decoder = decoder_from(checkpoint, plan, Basis())
    tensors = {name: x.half() for name, x in decoder.state_dict().items()}
    wired = wiring(checkpoint.spec, plan)
    device, library = HostTorchDevice(), RankingLibrary(native, kernels)
    size = arena_bytes(plan)
    pool = allocate_pool(device, library, plan, size + scratch_bytes(plan))
    scales = list(wired.scales)
    attention = RankingAttention(native, library, plan, scales, bytes_of(pool))
    compute = TorchCompute(TorchDecoder(wired, tensors), cast(Attention, attention))
    kind = StagedSession if plan.stages else EvictingSession
    session = kind(device, library, plan, LIMITS, pool, compute)
    return LLM(session, plan, LIMITS, Tokenizer(MODEL), size)


@pytest.mark.slow
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(case=observations())
def test_scores_grow_by_what_observed_rows_attend(
    native: Native, kernels: ctypes.CDLL, case: Observation
) -> None:
    case.check(case.run(RankingLibrary(native, kernels), "cpu"))


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_scores_of_a_larger_step(
    native: Native, kernels: ctypes.CDLL, share: float
) -> None:
    """Several tiles of tokens and of columns, beside a decode and an idle sequence."""
    plan = ranked_plan("mixed")
    lengths = [[70, 128, 64], [33, 64, 192], [5, 0, 0], [0, 0, 0]]
    case = Observation(plan, [150, 1, 0, 37], lengths, share, seed=3)
    case.check(case.run(RankingLibrary(native, kernels), "cpu"))


def test_blocks_share_the_tokens_of_a_decode_beside_a_chunk(
    native: Native, kernels: ctypes.CDLL
) -> None:
    """Each leaves a state of its own. The chunk's rows have blocks enough."""
    lengths = [[70, 128, 64], [33, 64, 192], [5, 0, 0]]
    case = Observation(ranked_plan("mixed"), [150, 1, 2], lengths, 1.0, seed=3, room=2)
    case.check(case.run(RankingLibrary(native, kernels), "cpu"))
    written = int(case.states.isfinite().all(1).sum())
    assert written == (150 + 16 * 1 + 16 * 2) * case.row_states


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_move_as_on_the_cpu(
    native: Native, kernels: ctypes.CDLL, kind: str
) -> None:
    session = in_torch(native, kernels, ranked_plan(kind)).session
    assert isinstance(session, EvictingSession)
    for seed in range(3):
        moves_are_those_of_the_host(session, seed)
        scores_are_those_of_the_host(session, seed)


@pytest.mark.parametrize("kind", rest_nightly(KINDS, "mixed", "sealed budget"))
def test_the_session_keeps_the_tokens_of_the_cpu(
    native: Native, kernels: ctypes.CDLL, kind: str
) -> None:
    plan = ranked_plan(kind)
    ours, theirs = in_torch(native, kernels, plan), on_cpu(plan)
    a_step_that_is_rolled_back_leaves_no_score(ours, theirs)
    tokens_stay_as_on_the_cpu(ours, theirs, list(text(330)), 260)


def test_keys_are_ranked_by_a_formula_as_the_reference_ranks_them(
    native: Native, kernels: ctypes.CDLL
) -> None:
    plan = ranked_plan("unlike keys")
    ours, theirs = in_torch(native, kernels, plan), on_cpu(plan)
    watched = Watched(ours, likeness)
    tokens_stay_as_on_the_cpu(ours, theirs, list(text(330)), 260)
    assert watched.dropped > 500


@pytest.mark.nightly
def test_requests_side_by_side_are_answered_as_alone(
    native: Native, kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several lengths and their decodes, padded to sizes of graphs; tokens
    that the next step takes from where they were sampled. No score comes to the host."""
    llm = in_torch(native, kernels, ranked_plan("budget"))
    monkeypatch.delattr(EvictingSession, "scores")
    params = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)
    prompts = [list(text(n, 100 * n)) for n in (40, 90)]
    together = llm.generate(prompts, params)
    for prompt, answer in zip(prompts, together, strict=True):
        alone = llm.generate([prompt], params)[0]
        assert answer.token_ids[:30] == alone.token_ids[:30]


@pytest.mark.slow
def test_a_prompt_loses_the_rows_that_it_loses_on_the_cpu(
    native: Native, kernels: ctypes.CDLL
) -> None:
    plan = staged_cases.PLANS["sealed budget"]
    ours, theirs = in_torch(native, kernels, plan), staged_cases.engine(plan)
    tokens_stay_as_on_the_cpu(ours, theirs, list(text(330)), 300)
    staged_cases.the_same_rows_stay(ours, theirs)


@pytest.mark.nightly
def test_neighbours_of_a_prompt_that_passes_stages_change_nothing(
    native: Native, kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every seventh group of layers fails where it is first tried: then its step runs
    again."""
    plan = staged_cases.PLANS["budget"]
    single, together = (in_torch(native, kernels, plan) for _ in range(2))
    session = together.session
    assert isinstance(session, StagedSession)
    run, calls = session.staged.run, itertools.count(1)

    def failing(*given: Any, **named: Any) -> Tensor:  # noqa: ANN401  (LayerCompute.run)
        x = run(*given, **named)
        if next(calls) % 7 == 0:
            raise RuntimeError("once")
        return x

    monkeypatch.setattr(session.staged, "run", failing)
    staged_cases.neighbours_change_nothing(single, together)
    assert next(calls) > 35
