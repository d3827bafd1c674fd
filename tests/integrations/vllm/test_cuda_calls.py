"""The calls that a layer on a GPU makes, with kernels that are compiled for a CPU:
spread, plan, attention and seal on vLLM's blocks. Append is played here.

No GPU is needed.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import (  # noqa: E402
    TorchDispatchMode,
    _disable_current_modes,
)
from torch.utils._pytree import tree_flatten  # noqa: E402

from kvlathe.plan.lives import Window  # noqa: E402
from kvlathe.runtime.native.cuda import CudaLibrary  # noqa: E402
from kvlathe.runtime.native.library import find  # noqa: E402
from kvlathe.runtime.sessions.torch_cuda.attention import attend  # noqa: E402
from kvlathe.runtime.sessions.torch_cuda.attention.spread import LayerCalls, Spread  # noqa: E402
from kvlathe_vllm import block_attention  # noqa: E402
from kvlathe_vllm import cuda as on_gpu  # noqa: E402
from kvlathe_vllm.block_attention import BlockAttention, Rooms  # noqa: E402
from kvlathe_vllm.calls import Calls, Step, is_decode  # noqa: E402
from kvlathe_vllm.cuda import CudaLayer  # noqa: E402
from kvlathe_vllm.gpu_step import DecodeBuffers, run_next  # noqa: E402
from kvlathe_vllm.hosted import Hosted  # noqa: E402
from kvlathe_vllm.layer import Most  # noqa: E402
from tests.integrations.vllm import test_calls as played  # noqa: E402
from tests.native_cpu.test_many_buckets import on_128  # noqa: E402
from tests.support.block_caches import block_cache  # noqa: E402
from tests.support.block_cases import plan_of  # noqa: E402
from tests.support.emulated import AttentionLibrary, emulated_kernels  # noqa: E402

drawn_inputs = played.drawn_inputs
PAGE, LAYERS, BLOCKS = 64, 2, 20
MOST = 5
"""Sequences that run at once."""
pytestmark = pytest.mark.nightly


class HostAttention(BlockAttention):
    """Row by row, and with an append of its own."""

    def __init__(
        self,
        library: CudaLibrary,
        layer: CudaLayer,
        most: Most,
        rooms: Rooms,
    ) -> None:
        super().__init__(library, layer, most, rooms)
        self.workspace = on_128(self.workspace)
        self.layer = layer

    @property
    def tiled(self) -> bool:
        return False

    def calls_of(self, spread: Spread, layers: Sequence[int]) -> LayerCalls:
        calls = super().calls_of(spread, layers)
        plan = on_128(calls.plan.zero_()).view(calls.plan.shape)
        calls.calls[0].plan = plan[0].data_ptr()
        return dataclasses.replace(calls, plan=plan)

    def _append(self, *given: Any, **named: Any) -> None:  # noqa: ANN401
        """One piece of work, which reads what a kernel would read."""
        work = partial(self._append_now, *given, **named)
        with _disable_current_modes():
            work()
        recording = cast(RecordedLibrary, self.library).recording
        if recording is not None:
            recording.work.append(work)

    def _append_now(
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
        for b, bucket in enumerate(own.plan.index.buckets):
            table = own.rows[b]
            found = table[table[:, 1] == head]
            if not bucket.is_hot or not len(found):
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


class Recording(TorchDispatchMode):
    """The calls that a step queues, to be queued again. The host may read nothing of
    it."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Callable[[], object]] = []

    def __torch_dispatch__(
        self,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        assert "_local_scalar_dense" not in str(function), "the host reads a step"
        named = kwargs or {}
        made = function(*args, **named)

        def again() -> None:
            fresh = function(*args, **named)
            olds, news = (tree_flatten(x)[0] for x in (made, fresh))
            for old, new in zip(olds, news, strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)

        self.work.append(again)
        return made

    def run(self) -> None:
        for work in self.work:
            work()


class RecordedLibrary(AttentionLibrary):
    """Its calls are queued again with the arguments that they had."""

    recording: Recording | None = None

    def call(self, name: str, *given: Any) -> None:  # noqa: ANN401  (structures)
        super().call(name, *given)
        if self.recording is None:
            return
        again = partial(super().call, name, *map(kept, given))
        self.recording.work.append(again)


def kept(argument: Any) -> Any:  # noqa: ANN401  (structures)
    """A copy, if it is a structure; what it points to stays."""
    if isinstance(argument, int):
        return argument
    structure = getattr(argument, "_obj", argument)
    copied = type(structure).from_buffer_copy(structure)
    copied.original = structure
    return ctypes.byref(copied) if structure is not argument else copied


def halves(random: np.random.Generator, n: int) -> played.Inputs:
    """Inputs that lose nothing where they become halves."""
    q, k, v = (x.astype(np.float16) for x in drawn_inputs(random, n))
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32)


@pytest.fixture
def library(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> RecordedLibrary:
    """Kernels for a CPU, and all that goes with them."""
    native = find().native
    if native is None:
        pytest.skip("no native library")
    kernels = emulated_kernels(tmp_path_factory.mktemp("emulated"), "attention")
    arrays: list[object] = []  # a launch copies them, a recorded call reads them again

    def address_of(array: object) -> ctypes.c_void_p:
        arrays.append(array)
        return ctypes.c_void_p(ctypes.addressof(cast(ctypes.Structure, array)))

    monkeypatch.setattr(attend, "address", address_of)
    for module in (attend, block_attention, on_gpu):
        monkeypatch.setattr(module, "current_stream", lambda: 0)
    monkeypatch.setattr(on_gpu, "BlockAttention", HostAttention)
    monkeypatch.setattr(played, "PAGE", PAGE)
    monkeypatch.setattr(played, "drawn_inputs", halves)
    return RecordedLibrary(native, kernels)


WINDOWS = (Window(PAGE, PAGE), Window.of_tokens(PAGE + 5, PAGE))
every_window = pytest.mark.parametrize("windows", [(), WINDOWS], ids=["all", "windows"])


def engine_of(windows: Sequence[Window]) -> Hosted:
    """An engine of five buckets: what takes fewer goes through kernels that only GPUs
    run. ``windows``: of heads 1 and 3."""
    plan = plan_of(PAGE, windows=windows)
    heads = played.heads_of(plan, 1)
    for own in heads.values():
        for name, matrix in own.items():
            own[name] = matrix.astype(np.float16).astype(np.float32)
    return Hosted(Path("engine"), plan, heads)


def check(engine: Hosted, one: played.Sequence) -> None:
    """Check that a sequence got what it gets alone."""
    shared = int((one.o == 0).all((1, 2)).sum())
    inputs = [x[: one.done] for x in (one.q, one.k, one.v)]
    want = played.expected(engine, *inputs)
    error = np.abs(one.o[shared : one.done] - want[shared:])
    # Products with q and o are halves: errors of 0.002. Another code of 4 bits gives up
    # to 0.1, and a page of another sequence about 1.
    assert error.max(initial=0) < 0.01


@pytest.mark.parametrize("guesses", [False, True], ids=["certain", "guessed"])
@every_window
def test_calls_on_blocks_give_what_a_sequence_gives_alone(
    windows: Sequence[Window],
    guesses: bool,
    library: RecordedLibrary,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = partial(CudaLayer, dtype=torch.float16, library=library)
    monkeypatch.setattr(played, "CpuLayer", made)
    engine = engine_of(windows)
    for one in played.play(engine, 5, steps=6, guesses=guesses):
        check(engine, one)


class Graph:
    """Decode steps as a CUDA graph of vLLM runs them: what one step of padding queued
    is queued again, and the host says nothing but what `DecodeBuffers.send` does."""

    WIDTH = 4
    """Pages of the block table."""

    def __init__(self, engine: Hosted, library: RecordedLibrary) -> None:
        caches = [cache_of(engine, layer) for layer in range(LAYERS)]
        most = Most(MOST, MOST * 4 * PAGE, 4 * PAGE)
        made = partial(CudaLayer, dtype=torch.float16, library=library)
        self.layers = [
            made(engine, layer, cache, most, played.SCALE)
            for layer, cache in enumerate(caches)
        ]
        self.layer = self.layers[played.LAYER]
        self.calls = Calls(engine.plan, MOST)
        buckets = len(engine.plan.index.buckets)
        self.buffers = DecodeBuffers(MOST, buckets, torch.device("cpu"))
        self.table = torch.zeros(MOST, self.WIDTH, dtype=torch.int32)
        width = played.HEADS * played.DIMS
        self.q = torch.zeros(MOST, played.GROUP * width).view(MOST, -1, played.DIMS)
        self.k, self.v = (
            torch.zeros(MOST, width).view(MOST, -1, played.DIMS) for _ in range(2)
        )
        self._send([], [])
        self._run()  # as vLLM does, before it captures
        self._send([], [])
        with Recording() as recording:
            library.recording = recording
            self.o = self._run()
        library.recording = None
        self.recording = recording

    def _run(self) -> Tensor:
        call = self.call
        return self.layer.run(self.q, self.k, self.v, call)

    def _send(self, running: list[played.Sequence], ends: list[int]) -> None:
        """Sequences that are missing are padding: in rehearsals they have a row each,
        of the null block."""
        self.table.zero_()
        for row, one in zip(self.table, running, strict=False):
            row[: len(one.blocks)] = torch.tensor(one.blocks)
        count = len(running) or MOST
        starts = np.arange(MOST + 1, dtype=np.int32).clip(max=count)
        lengths = np.zeros(MOST, np.int32)
        lengths[:count] = ends or 1
        step = Step(starts, lengths, self.table.numpy().copy())
        self.call = self.calls.of(step)
        assert is_decode(self.call)
        run_next(self.call, self.buffers.send(self.call, self.table))

    def step(self, running: list[played.Sequence]) -> None:
        """A new token of each."""
        self._send(running, [one.done + 1 for one in running])
        for row, one in enumerate(running):
            for ours, theirs in ((self.q, one.q), (self.k, one.k), (self.v, one.v)):
                ours[row] = torch.from_numpy(theirs[one.done])
        self.recording.run()
        for row, one in enumerate(running):
            one.o[one.done] = self.o[row].double().numpy()
            one.done += 1


def cache_of(engine: Hosted, layer: int) -> Tensor:
    return block_cache(engine.blocks[layer], BLOCKS, fill=255)


@every_window
def test_a_graph_of_a_decode_step_gives_what_its_sequences_give_alone(
    windows: Sequence[Window], library: RecordedLibrary
) -> None:
    """They begin pages, fill them, end, and join with the prefix of one that is filled
    in the same step."""
    engine = engine_of(windows)
    graph = Graph(engine, library)
    random = np.random.default_rng(3)
    sizes = (PAGE - 2, 2 * PAGE + 61, 5)
    every = [played.Sequence(halves(random, size + 8)) for size in sizes]
    free = list(range(1, BLOCKS))
    for one, size in zip(every, sizes, strict=True):
        one.blocks = [free.pop() for _ in range(len(one.q) // PAGE + 1)]
        one.scheduled = size
    played.run_step(graph.layer, graph.calls, every, list(sizes))
    first, second, third = every
    graph.step(every)
    fourth = played.Sequence(halves(random, PAGE + 4))
    for own, other in (
        (fourth.q, first.q),
        (fourth.k, first.k),
        (fourth.v, first.v),
    ):
        own[:PAGE] = other[:PAGE]
    fourth.blocks = [first.blocks[0], free.pop()]
    fourth.done = PAGE
    fourth.o[:PAGE] = 0
    graph.step([fourth, first, third])  # `first` fills the page that `fourth` reads
    graph.step([first, second, fourth, third])
    graph.step([third, fourth])
    graph.step([first, second, third, fourth])
    assert second.done == sizes[1] + 3 and first.done > PAGE
    for one in (*every, fourth):
        check(engine, one)
