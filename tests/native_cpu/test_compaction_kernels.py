"""Prefixes that the cuda backend's session compacts, in host memory: the kernels that move
tokens and attend them run on a CPU thread by thread (tests/native_cpu/emulated)."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping
from typing import Any, cast

import pytest
from torch import Tensor

from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.weights_file import wiring
from kvlathe.plan.formats import Tier
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.requests import compaction
from kvlathe.runtime.sessions.gpu.pages import allocate_pool
from kvlathe.runtime.sessions.gpu.side_memory import scratch_bytes
from kvlathe.runtime.sessions.torch_cuda.attention import attend
from kvlathe.runtime.sessions.torch_cuda.attention.attend import Attention
from kvlathe.runtime.sessions.torch_cuda.attention.observing import LargestShares
from kvlathe.runtime.sessions.torch_cuda.compute import TorchCompute
from kvlathe.runtime.sessions.torch_cuda.device import bytes_of
from kvlathe.runtime.sessions.torch_cuda.inputs import StepInputs
from kvlathe.runtime.sessions.torch_cuda.model.decoder import TorchDecoder
from kvlathe.runtime.sessions.torch_cuda.tokens.evicting import CompactingSession
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.native_cpu.test_many_buckets import SessionAttention
from tests.support import compaction_laws as laws
from tests.support.compaction_cases import PART
from tests.support.device_engines import HostAttention, turned
from tests.support.emulated import (
    AttentionLibrary,
    RankingLibrary,
    emulated_kernels,
)
from tests.support.host_device import HostTorchDevice
from tests.support.nightly import rest_nightly
from tests.support.ranking_laws import arena_bytes, on_cpu
from tests.support.runtime_cases import LIMITS, MODEL
from tests.support.tiers import with_tiers

pytestmark = pytest.mark.nightly
"""Kernels for GPUs, run on a CPU: minutes."""

SOME = rest_nightly(laws.KINDS, "sealed compacted")
"""Laws of whole answers take long thread by thread: all kinds nightly, and on a GPU."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "PART", PART)
    monkeypatch.setattr(attend, "current_stream", lambda: 0)


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return emulated_kernels(tmp_path_factory.mktemp("moving"))


class BothLibrary(AttentionLibrary):
    """Attention and moves are the CUDA kernels."""

    def __init__(
        self, native: Native, kernels: ctypes.CDLL, moving: ctypes.CDLL
    ) -> None:
        super().__init__(native, kernels)
        self.moving = RankingLibrary(native, moving)

    def call(self, name: str, *given: Any) -> None:  # noqa: ANN401  (structures)
        side = self.moving if name == "cuda_move" else super()
        side.call(name, *given)


class ObservedAttention(HostAttention):
    """Attention by the library's op for the CPU, and what the session asks of its rows."""

    def __init__(
        self, native: Native, plan: CompressionPlan, scales: list[float], pool: Tensor
    ) -> None:
        super().__init__(native, plan, scales, pool)
        self.shares = LargestShares(plan, scales, pool)

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
        assert angles is not None
        queries = turned(q, *angles, self.plan.model.head_dim)
        self.shares.fill(layer, queries, step)
        return out


def in_torch(
    native: Native, library: RankingLibrary | BothLibrary, plan: CompressionPlan
) -> LLM:
    """The cuda backend's session in host memory."""
    decoder = decoder_from(Checkpoint(MODEL), plan, Basis())
    tensors = {name: x.half() for name, x in decoder.state_dict().items()}
    wired = wiring(Checkpoint(MODEL).spec, plan)
    device, size = HostTorchDevice(), arena_bytes(plan)
    pool = allocate_pool(device, library, plan, size + scratch_bytes(plan))
    scales, memory = list(wired.scales), bytes_of(pool)
    attention: HostAttention = ObservedAttention(native, plan, scales, memory)
    if isinstance(library, BothLibrary):
        attention = SessionAttention(native, library, plan, scales, memory)
    compute = TorchCompute(TorchDecoder(wired, tensors), cast(Attention, attention))
    session = CompactingSession(device, library, plan, LIMITS, pool, compute)
    llm = LLM(session, plan, LIMITS, Tokenizer(MODEL), size)
    return laws.share_prefixes(llm)


@pytest.mark.parametrize(
    "kind", rest_nightly(laws.KINDS, "compacted alike", "sealed compacted")
)
def test_scores_and_pairs_are_those_of_the_cpu(
    native: Native, moving: ctypes.CDLL, kind: str
) -> None:
    ours = in_torch(native, RankingLibrary(native, moving), laws.compacting_plan(kind))
    theirs = laws.share_prefixes(on_cpu(laws.compacting_plan(kind)))
    laws.scores_and_pairs_are_those_of_the_cpu(ours, theirs, 0.4)


@pytest.mark.parametrize(
    ("kind", "keep"),
    rest_nightly(
        itertools.product(laws.KINDS, [0.25, 0.6]),
        ("compacted", 0.25),
        ("sealed compacted", 0.6),
    ),
)
def test_answers_are_those_of_attention_with_the_dropped_pairs_masked(
    native: Native, moving: ctypes.CDLL, kind: str, keep: float
) -> None:
    ours = in_torch(native, RankingLibrary(native, moving), laws.compacting_plan(kind))
    close = 2e-2 if kind == "sealed compacted" else 1e-2
    laws.answers_are_those_of_masked_attention(ours, keep, close)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOME)
def test_compacting_nothing_changes_no_answer_in_the_kernels(
    native: Native, moving: ctypes.CDLL, kind: str
) -> None:
    ours = in_torch(native, RankingLibrary(native, moving), laws.compacting_plan(kind))
    laws.nothing_changes_where_all_pairs_stay(ours)


@pytest.mark.parametrize("kind", SOME)
def test_requests_share_the_pages_of_a_compacted_prefix_in_the_kernels(
    native: Native, moving: ctypes.CDLL, kind: str
) -> None:
    laws.requests_share_the_pages(
        in_torch(native, RankingLibrary(native, moving), laws.compacting_plan(kind))
    )


@pytest.mark.parametrize("kind", SOME)
def test_requests_and_a_compaction_beside_them_come_to_what_each_does_alone(
    native: Native, moving: ctypes.CDLL, kind: str
) -> None:
    laws.requests_beside_a_compaction(
        in_torch(native, RankingLibrary(native, moving), laws.compacting_plan(kind)), 40
    )


@pytest.mark.nightly
def test_the_kernels_attend_lanes_that_keep_different_numbers(
    native: Native, kernels: ctypes.CDLL, moving: ctypes.CDLL
) -> None:
    plan = laws.compacting_plan("sealed compacted")
    eight = Tier(8, 8, "token", "token", 32, 32)
    plan = with_tiers(plan, (plan.index.tiers[0], eight))
    ours = in_torch(native, BothLibrary(native, kernels, moving), plan)
    laws.answers_are_those_of_masked_attention(ours, 0.4, 2e-2)
