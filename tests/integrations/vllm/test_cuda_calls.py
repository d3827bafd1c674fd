"""The calls that a layer on a GPU makes, with kernels that are compiled for a CPU: spread,
plan, attention and seal on vLLM's blocks. Append is played here.

No GPU is needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import Array
from functools import partial
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import Tensor  # noqa: E402

from kvlathe.runtime.native.cuda import AttendDecodeArgs, CudaLibrary  # noqa: E402
from kvlathe.runtime.native.library import find  # noqa: E402
from kvlathe.runtime.sessions.torch_cuda import attend  # noqa: E402
from kvlathe.runtime.sessions.torch_cuda.attend import Spread, StepInputs  # noqa: E402
from kvlathe_vllm import cuda as on_gpu  # noqa: E402
from kvlathe_vllm import gpu_step  # noqa: E402
from kvlathe_vllm.block_attention import BlockAttention  # noqa: E402
from kvlathe_vllm.cuda import CudaLayer  # noqa: E402
from kvlathe_vllm.hosted import Hosted  # noqa: E402
from tests.integrations.vllm import test_calls as played  # noqa: E402
from tests.native_cpu.test_many_buckets import on_128  # noqa: E402
from tests.support.block_cases import plan_of  # noqa: E402
from tests.support.emulated import AttentionLibrary, emulated_kernels  # noqa: E402

drawn_inputs = played.drawn_inputs
pytestmark = pytest.mark.nightly


class HostAttention(BlockAttention):
    """Row by row, and with an append of its own."""

    def __init__(
        self, library: CudaLibrary, layer: CudaLayer, scale: float, rows: int
    ) -> None:
        super().__init__(library, layer, scale, rows)
        self.workspace = on_128(self.workspace)
        self.layer = layer

    def _list_size(self, step: StepInputs, tokens: int) -> int:
        return 0

    def _calls(self, spread: Spread, tokens: int) -> Array[AttendDecodeArgs]:
        calls = super()._calls(spread, tokens)
        spread.plan = on_128(spread.plan.zero_()).view(spread.plan.shape)
        calls[0].plan = spread.plan[0].data_ptr()
        return calls

    def _append(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        spread: Spread,
        weights: Mapping[str, Tensor],
        queries: Tensor,
    ) -> None:
        own, dims = self.layer, played.DIMS
        packed = []
        at_v = 0
        for h, lane in enumerate(own.heads.lanes):
            width = played.GROUP * dims
            heads = q[:, h * width : (h + 1) * width].reshape(-1, dims)
            turned = heads.float() @ weights["proj_q"][h].float()[:, : lane.rank_k]
            packed.append(turned.reshape(len(q), -1))
            keys = k[:, h * dims : (h + 1) * dims].float()
            keys = keys @ weights["proj_k"][h].float() - weights["centre_k"][h].float()
            values = v[:, at_v : at_v + lane.rank_v]
            at_v += lane.rank_v
            self._write(spread, lane.head, keys[:, : lane.rank_k], values)
        queries.copy_(torch.cat(packed, 1))

    def _write(self, spread: Spread, head: int, keys: Tensor, values: Tensor) -> None:
        own, page = self.layer, played.PAGE
        for b, bucket in enumerate(own.plan.buckets):
            table = own.rows[b]
            found = table[table[:, 1] == head]
            if bucket.source is not None or not len(found):
                continue
            stride = own.span.block_stride if own.held[b] else own.block.hot_bytes
            for row in range(len(keys)):
                sequence = int(spread.sequence_of[row])
                place = int(spread.visible[row, b]) - 1
                page_id = int(spread.step.page_tables[b][sequence, place // page])
                start = own.span.start + page_id * stride
                for x, offset in ((keys, found[0, 4]), (values, found[0, 6])):
                    data = x[row].half().contiguous()
                    at = start + int(offset) + place % page * data.nbytes
                    ctypes.memmove(at, data.data_ptr(), data.nbytes)


def halves(random: np.random.Generator, n: int) -> tuple[np.ndarray, ...]:
    """Inputs that lose nothing where they become halves."""
    drawn = drawn_inputs(random, n)
    return tuple(x.astype(np.float16).astype(np.float32) for x in drawn)


def test_calls_on_blocks_give_what_a_sequence_gives_alone(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of five buckets: what takes fewer goes through kernels that only GPUs run."""
    native = find().native
    if native is None:
        pytest.skip("no native library")
    kernels = emulated_kernels(tmp_path_factory.mktemp("emulated"), "attention")
    library = AttentionLibrary(native, kernels)
    monkeypatch.setattr(attend, "_stream", lambda: 0)
    for module in (on_gpu, gpu_step):
        monkeypatch.setattr(module, "stream", lambda: 0)
    monkeypatch.setattr(on_gpu, "BlockAttention", HostAttention)
    monkeypatch.setattr(played, "PAGE", 64)
    made = partial(CudaLayer, dtype=torch.float16, library=library)
    monkeypatch.setattr(played, "CpuLayer", made)
    plan = plan_of(64)
    heads = played.heads_of(plan, 1)
    for own in heads.values():
        for name, matrix in own.items():
            own[name] = matrix.astype(np.float16).astype(np.float32)
    engine = Hosted(Path("engine"), plan, heads)
    monkeypatch.setattr(played, "drawn_inputs", halves)
    for one in played.play(engine, 5, steps=6):
        shared = int((one.o == 0).all((1, 2)).sum())
        inputs = [x[: one.done] for x in (one.q, one.k, one.v)]
        want = played.expected(engine, *inputs)
        error = np.abs(one.o[shared : one.done] - want[shared:])
        # v' is rounded to halves, so some codes are the next ones.
        assert error.max(initial=0) < 0.1 and error.sum() <= 0.01 * max(1, error.size)
