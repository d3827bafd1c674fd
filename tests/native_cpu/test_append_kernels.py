"""The CUDA kernels that append rows, run on a CPU thread by thread
(tests/native_cpu/emulated): turned rows lie where the step says, and nothing else of the
pool changes."""

from __future__ import annotations

import ctypes
from ctypes import byref
from typing import Any

import numpy as np
import pytest
import torch

from kvlathe.base.errors import KvlatheError
from kvlathe.plan.formats import Tier
from kvlathe.plan.groups import Group
from kvlathe.plan.heads import Lane
from kvlathe.runtime.native.cuda import AttendDecodeArgs
from kvlathe.runtime.native.library import Native, Status
from kvlathe.runtime.sessions.gpu.step_buffer import StepKind
from kvlathe.runtime.sessions.torch_cuda.attention import attend
from kvlathe.runtime.sessions.torch_cuda.attention.attend import Attention
from kvlathe.runtime.sessions.torch_cuda.attention.layer import layers_of
from kvlathe.runtime.sessions.torch_cuda.attention.spread import LayerCalls, Spread
from kvlathe.runtime.sessions.torch_cuda.inputs import StepInputs
from tests.native.step16 import CLOSE, Step16
from tests.native_cpu.test_many_buckets import on_128, queries_of
from tests.support.attend_cases import Case, plan_of
from tests.support.emulated import emulated_kernels
from tests.support.host_device import HostLibrary

WHOLE = [Lane(0, 0, 128, 128, 128), Lane(0, 1, 128, 128, 128)]
UNTURNED = [Lane(0, 0, 64, 64, 64, "none"), Lane(0, 1, 64, 64, 32)]
UNLIKE = [Lane(0, 0, 48, 48, 80), Lane(0, 1, 80, 80, 16)]
ODD = [Lane(0, 0, 36, 48, 48), Lane(0, 1, 64, 64, 64)]
PROJECTED = [Lane(0, 0, 64, 32, 48, projected=True), Lane(0, 1, 64, 64, 64)]


class AppendingLibrary(HostLibrary):
    """A HostLibrary whose append is the CUDA kernels."""

    def __init__(self, library: Native, kernels: ctypes.CDLL) -> None:
        super().__init__(library)
        self.kernels = kernels

    def call(self, name: str, *given: Any) -> None:  # noqa: ANN401  (structures)
        if name != "cuda_append":
            return super().call(name, *given)
        status = Status()
        if self.kernels.kvlathe_cuda_append(*given, byref(status)):
            raise KvlatheError(name, status.message.decode())
        return None


@pytest.fixture(scope="module")
def library(
    native: Native, tmp_path_factory: pytest.TempPathFactory
) -> AppendingLibrary:
    kernels = emulated_kernels(tmp_path_factory.mktemp("append"), "append", "-O1")
    return AppendingLibrary(native, kernels)


def spread_of(step: Step16, inputs: StepInputs) -> Spread:
    """The rows of a step in one bucket, as cuda_spread writes them."""
    spread = Spread.empty(inputs, len(step.q), {}, step.plan.index.parts, False)
    counts = step.cu_seqlens_q.diff()
    sequences = torch.arange(len(counts)).repeat_interleave(counts)
    places = torch.arange(len(sequences)) - step.cu_seqlens_q[sequences]
    spread.sequence_of.fill_(-1)
    spread.sequence_of[: len(sequences)] = sequences
    spread.visible[: len(sequences), 0] = step.lengths[sequences, 0] + places + 1
    return spread


def appended(library: AppendingLibrary, step: Step16) -> tuple[np.ndarray, np.ndarray]:
    """q' [T, sum of ranks] and the pool's bytes."""
    pool = on_128(torch.from_numpy(step.memory.copy()))
    layers = layers_of(library, step.plan, [0.05], pool.device, ())
    attention = Attention(library, step.plan, layers, pool, pool.new_empty(0))
    tables = [torch.from_numpy(table) for table in step.tables]
    kind = StepKind(False, len(step.q))
    spread = spread_of(step, StepInputs(step.cu_seqlens_q, step.lengths, tables, kind))
    calls = LayerCalls(spread, [0], (AttendDecodeArgs * 0)(), pool, [])
    given = step.q, step.k, step.v, (step.cos, step.sin), step.state
    return attention.append(calls, 0, *given).double().numpy(), pool.numpy()


@pytest.mark.parametrize("queries", [[1, 1, 0, 1], [40, 1, 9]], ids=str)
@pytest.mark.parametrize(
    ("lanes", "dim"),
    [(WHOLE, 128), (UNTURNED, 64), (UNLIKE, 80), (ODD, 64), (PROJECTED, 64)],
    ids=["whole", "unturned", "unlike", "odd", "projected"],
)
def test_append_turns_rows_and_writes_nothing_else(
    library: AppendingLibrary,
    lanes: list[Lane],
    dim: int,
    queries: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attend, "current_stream", lambda: 0)
    plan = plan_of(lanes, [Group((0, 1), Tier(16, 16))], dim, 4, 32)
    case = Case(plan, 0, queries, [[n] for n in range(30, 30 + len(queries))], seed=3)
    step = Step16(case)
    found, memory = appended(library, step)
    step.check_memory(memory)
    np.testing.assert_allclose(found[: case.total], queries_of(step), **CLOSE)
