"""Heads of one layer in many buckets, through the CUDA kernels on a CPU
(tests/native_cpu/emulated): what each row may read, which block attends what, and decode
attention by both."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping, Sequence
from ctypes import Structure, byref, c_float, c_int32, c_int64, c_void_p
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.weights_file import wiring
from kvlathe.plan.layer_table import layer_table
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native.cuda import AppendArgs, CudaLibrary
from kvlathe.runtime.native.library import Native, Status
from kvlathe.runtime.sessions.gpu.pages import allocate_pool
from kvlathe.runtime.sessions.torch_cuda.attention import attend
from kvlathe.runtime.sessions.torch_cuda.attention.attend import Attention
from kvlathe.runtime.sessions.torch_cuda.attention.spread import LayerCalls, Spread
from kvlathe.runtime.sessions.torch_cuda.compute import TorchCompute
from kvlathe.runtime.sessions.torch_cuda.device import bytes_of
from kvlathe.runtime.sessions.torch_cuda.inputs import StepInputs
from kvlathe.runtime.sessions.torch_cuda.model.decoder import TorchDecoder
from kvlathe.runtime.sessions.torch_cuda.session import TorchSession
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.native import step16
from tests.native.node_inputs import inputs_of
from tests.native.step16 import Step16
from tests.support.attend_cases import Case
from tests.support.device_engines import HostAttention, turned
from tests.support.emulated import AttentionLibrary
from tests.support.host_device import HostTorchDevice
from tests.support.mixed_cases import aged_steps, mixed_steps, model_plan
from tests.support.ranking_laws import arena_bytes, on_cpu
from tests.support.runtime_cases import LIMITS, MODEL, forced, text

pytestmark = pytest.mark.nightly
"""Their kernels are compiled first, which takes half a minute."""

SOME = settings(
    deadline=None,
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def library(
    native: Native, kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> AttentionLibrary:
    monkeypatch.setattr(attend, "current_stream", lambda: 0)
    return AttentionLibrary(native, kernels)


def on_128(tensor: Tensor) -> Tensor:
    """A copy whose bytes begin at a multiple of 128."""
    room = torch.zeros(tensor.nbytes + 128, dtype=torch.uint8)
    start = -room.data_ptr() % 128
    own = room[start : start + tensor.nbytes]
    own.copy_(tensor.view(torch.uint8).flatten())
    return own


class RowAttention(Attention):
    """Attention in host memory, row by row, of ``queries``, which append has made."""

    queries: Tensor

    def __init__(self, *given: Any, **named: Any) -> None:  # noqa: ANN401  (Attention's)
        super().__init__(*given, **named)
        self.workspace = on_128(self.workspace)

    @property
    def tiled(self) -> bool:
        return False

    def calls_of(self, spread: Spread, layers: Sequence[int]) -> LayerCalls:
        calls = super().calls_of(spread, layers)
        plan = on_128(calls.plan.zero_()).view(calls.plan.shape)
        for layer, args in enumerate(calls.calls):
            args.plan = plan[layer].data_ptr()
        return dataclasses.replace(calls, plan=plan)

    def _append(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        angles: tuple[Tensor, Tensor] | None,
        spread: Spread,
        weights: Mapping[str, Tensor],
        queries: Tensor,
    ) -> None:
        queries[: len(self.queries)] = self.queries


def case_attention(
    step: Step16,
    library: CudaLibrary,
    plan: CompressionPlan,
    scales: Sequence[float],
    pool: Tensor,
    most_rows: int,
    copies: Tensor | None = None,
    sinks: Sequence[Tensor] = (),
) -> RowAttention:
    """The same of a case, whose new rows are written."""
    pool = on_128(pool)
    attention = RowAttention.of_plan(
        library, plan, scales, pool, most_rows, copies, sinks
    )
    attention.queries = queries_of(step)
    write_rows(step, pool.numpy())
    return attention


def queries_of(step: Step16) -> Tensor:
    """q' of the step's tokens, [T, the lanes' ranks of K]."""
    case = step.case
    of_lanes = zip(case.lanes, case.q, case.projections, strict=True)
    turned = [
        step._turned(head, lane) @ a
        for lane, heads, (a, _, _) in of_lanes
        for head in heads
    ]
    return torch.from_numpy(np.concatenate(turned, 1)).half()


def write_rows(step: Step16, memory: np.ndarray) -> None:
    """k' and v' of the step's tokens."""
    case = step.case
    rows = case.expected()[1].astype(np.float16)
    once = case.plan.index.values_in_keys
    widths = [x.rank_k for x in case.lanes]
    widths += [] if once else [x.rank_v for x in case.lanes]
    own = np.split(rows, np.cumsum(widths)[:-1], axis=1)
    count, layout = len(case.lanes), CacheLayout(case.plan)
    written = np.zeros(len(memory), bool)
    tokens = [(b, i) for b, n in enumerate(case.queries) for i in range(n)]
    for h, lane in enumerate(case.lanes):
        for row, (b, i) in enumerate(tokens):
            k, v = step._row(memory, written, layout, lane, b, i)
            k[:] = own[h][row]
            if not once:
                v[:] = own[count + h][row]


def emulated(
    library: AttentionLibrary, case: Case, patch: pytest.MonkeyPatch
) -> np.ndarray:
    """o of the case's rows."""
    step = Step16(case)
    patch.setattr(step16, "attention_of", partial(case_attention, step))
    return step.run(library, "cpu")[0]


@pytest.mark.slow
@SOME
@given(case=mixed_steps([64, 128], 7, [0, 1, 1, 1, 2, 3]))
def test_a_step_over_many_buckets_is_masked_attention(
    library: AttentionLibrary, case: Case
) -> None:
    """Every lane has the tokens of its own buckets, and sees its own window of them."""
    parts = case.plan.index.parts
    with pytest.MonkeyPatch.context() as patch:
        out = emulated(library, case, patch)
    assert library.calls[-1] == len(parts)
    expected = case.expected()[0]
    largest = np.abs(expected).max()
    assert np.abs(out - expected).mean() <= 2e-3 * largest
    assert np.abs(out - expected).max() <= 3e-2 * largest


@pytest.mark.slow
@settings(SOME, max_examples=6)
@given(case=aged_steps([64], [0, 1, 1, 1, 2, 3]))
def test_pages_that_wait_are_not_read(library: AttentionLibrary, case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        out = emulated(library, case, patch)
    expected = case.expected()[0]
    assert np.abs(out - expected).max() <= 3e-2 * np.abs(expected).max()


class NodeInput(Structure):
    """As attend_node.h has it."""

    _fields_ = [("data", c_void_p), ("rank", c_int32), ("dims", c_void_p)]


def node_out(kernels: ctypes.CDLL, case: Case) -> np.ndarray:
    """o of the case's rows, by the node of ONNX Runtime and TensorRT."""
    step = Step16(case)
    memory = on_128(torch.from_numpy(step.memory))
    queries = queries_of(step)

    def append(given: int) -> None:
        args = AppendArgs.from_address(given)
        room = ctypes.c_uint16 * (args.tokens * args.q_out_stride)
        out = np.ctypeslib.as_array(room.from_address(args.q_out))
        rows = out.reshape(args.tokens, args.q_out_stride)
        rows[: case.total] = queries.numpy().view(np.uint16)
        write_rows(step, memory.numpy())

    tensors = list(inputs_of(step, memory).values())
    dims = [np.array(x.shape, np.int64) for x in tensors]
    described = [
        NodeInput(x.data_ptr(), x.ndim, sizes.ctypes.data)
        for x, sizes in zip(tensors, dims, strict=True)
    ]
    inputs = (NodeInput * len(described))(*described)
    table, status = layer_table(CacheLayout(case.plan), case.layer), Status()
    width = sum(lane.rank_v for lane in case.lanes) * case.plan.model.group_size
    out = torch.full((len(step.q), width), torch.nan, dtype=torch.float16)
    callback = ctypes.CFUNCTYPE(None, c_void_p)(append)
    sizes = (c_int64(len(table)), c_float(case.scale), inputs, c_int64(len(inputs)))
    given = (c_void_p(table.ctypes.data), *sizes, c_void_p(out.data_ptr()), None)
    failed = kernels.node_run(*given, callback, byref(status))
    assert not failed, status.message.decode()
    return out[: case.total].double().numpy()


@SOME
@given(
    case=mixed_steps([64], 7, [0, 1, 1, 1, 2, 3], has_scoring=False)
    | aged_steps([64], [0, 1, 1, 1, 2, 3])
)
def test_the_node_gives_the_bits_of_the_cuda_backend(
    library: AttentionLibrary, kernels: ctypes.CDLL, case: Case
) -> None:
    """Its parts are those that Python finds, its workspace holds them."""
    with pytest.MonkeyPatch.context() as patch:
        expected = emulated(library, case, patch)
    np.testing.assert_array_equal(node_out(kernels, case), expected)


class SessionAttention(HostAttention):
    """Attention of a session: the library's op for the CPU appends, the kernels attend."""

    def __init__(
        self,
        native: Native,
        library: AttentionLibrary,
        plan: CompressionPlan,
        scales: Sequence[float],
        pool: Tensor,
    ) -> None:
        super().__init__(native, plan, scales, pool)
        most = LIMITS.max_num_tokens
        self.rows = RowAttention.of_plan(library, plan, scales, pool, most)
        self.calls: LayerCalls | None = None

    def prepare(
        self, step: StepInputs, tokens: int, layers: range | None = None
    ) -> StepInputs:
        self.calls = self.rows.prepare(step, tokens)
        return super().prepare(step, tokens)

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
        super().run(step, layer, q, k, v, angles, weights)
        assert self.calls is not None and angles is not None
        self.rows.queries = turned(q, *angles, self.plan.model.head_dim)
        return self.rows.run(self.calls, layer, q, k, v, angles, weights)


def emulated_session(
    native: Native, library: AttentionLibrary, plan: CompressionPlan
) -> LLM:
    checkpoint = Checkpoint(MODEL)
    decoder = decoder_from(checkpoint, plan, Basis())
    tensors = {name: x.half() for name, x in decoder.state_dict().items()}
    wired = wiring(checkpoint.spec, plan)
    device, size = HostTorchDevice(), arena_bytes(plan)
    pool = allocate_pool(device, library, plan, size)
    scales = list(wired.scales)
    attention = SessionAttention(native, library, plan, scales, bytes_of(pool))
    compute = TorchCompute(TorchDecoder(wired, tensors), cast(Attention, attention))
    session = TorchSession(device, library, plan, LIMITS, pool, compute)
    return LLM(session, plan, LIMITS, Tokenizer(MODEL), size)


@pytest.mark.slow
def test_a_session_answers_as_the_one_on_the_cpu(
    native: Native, library: AttentionLibrary
) -> None:
    """Chunks, seals, pages that windows give back, decodes in a graph; two sequences."""
    plan = model_plan(128)
    ours, theirs = emulated_session(native, library, plan), on_cpu(plan)
    texts = [text(330), text(70, 500)]
    schedule = [(128, 60), (128, 1), (65, 1), (1, 1), (1, 1)]
    found, expected = (forced(llm, texts, schedule) for llm in (ours, theirs))
    assert set(library.calls) == {4}  # parts of a layer: of its fresh bucket, two
    for a, b in zip(found, expected, strict=True):
        assert np.abs(a - b).max() < 2e-2 * np.abs(b).max()
    assert ours.pool.bytes_in_use == theirs.pool.bytes_in_use == 0
