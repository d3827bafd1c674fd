"""CudaSession: an engine of the cuda backend on one GPU. Pages, weights and steps live there; the host keeps tables.

A decode step (one token of every sequence) is a CUDA graph, captured once for each batch size of a ladder; its inputs
are one block of int32 that one copy fills, queued behind the step before without waiting for it. Every other step runs
the same kernels without a graph. The one thing that is waited for is what the caller asked to see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlathe.engines.manifest import DECODER_FILE, Limits
from kvlathe.errors import KvlatheError
from kvlathe.export.layout import CacheLayout
from kvlathe.export.plan import CompressionPlan
from kvlathe.runtime import native
from kvlathe.runtime.cuda_abi import CudaLibrary, PageKernels
from kvlathe.runtime.cuda_attend import Attention, StepInputs
from kvlathe.runtime.cuda_decoder import TorchDecoder, read_decoder
from kvlathe.runtime.session import Int32, StepPlan

LADDER = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Batch sizes that get a graph; a batch runs in the next larger one."""


class CudaSession:
    """Loads ``folder`` with a cache of ``arena_bytes`` on GPU 0. ``threads`` is for sessions on a CPU: ignored."""

    attention: Attention

    def __init__(
        self, folder: Path, plan: CompressionPlan, limits: Limits, arena_bytes: int, threads: int | None = None
    ) -> None:
        """Raises KvlatheError where there is no GPU, no native library with CUDA kernels, or too little memory."""
        library = library_here()
        wiring, tensors = read_decoder(folder, DECODER_FILE, "cuda")
        self._start(library, TorchDecoder(wiring, tensors), wiring.scales, plan, limits, arena_bytes)

    @classmethod
    def of(
        cls,
        library: CudaLibrary,
        decoder: TorchDecoder,
        plan: CompressionPlan,
        limits: Limits,
        arena_bytes: int,
    ) -> CudaSession:
        """A session of weights that are in memory already."""
        session = cls.__new__(cls)
        session._start(library, decoder, decoder.wiring.scales, plan, limits, arena_bytes)
        return session

    def _start(
        self,
        library: CudaLibrary,
        decoder: TorchDecoder,
        scales: tuple[float, ...],
        plan: CompressionPlan,
        limits: Limits,
        arena_bytes: int,
    ) -> None:
        self.plan, self.limits, self.decoder = plan, limits, decoder
        self.strides = CacheLayout(plan).page_stride
        self.pool = _memory(arena_bytes)
        most_rows = max(limits.max_num_tokens, *(n for n in LADDER if n <= 2 * limits.max_batch_size))
        self.attention = Attention(library, plan, scales, self.pool, most_rows)
        self.pages = PageKernels(library, plan, self.pool.data_ptr(), self.pool.numel())
        self._views = [self.pool[: len(self.pool) // s * s].view(-1, s) for s in self.strides]
        self._graphs: dict[int, DecodeGraph] = {}
        self._memory_of_graphs = torch.cuda.graph_pool_handle()
        self.widths = [_most_pages(plan, b, limits.max_seq_len) for b in range(len(plan.buckets))]

    # -- steps ---------------------------------------------------------------------------------------------------
    def run(self, step: StepPlan) -> npt.NDArray[np.float32]:
        """Logits [R, vocab]; k' and v' of the step's tokens are in the pool afterwards. Raises KvlatheError beyond the
        profile."""
        return self.launch(step).float().cpu().numpy()

    def launch(self, step: StepPlan) -> Tensor:
        """The same without waiting: logits on the GPU in 16 bit, which the next step may overwrite."""
        self._check(step)
        graph = self._graph_of(step)
        if graph is not None:
            return graph.run(step).logits[: len(step.logit_rows)]
        block = _Block.of(step)
        block.send(step)
        return self._compute(block.views(), single=False)

    def follow(self, step: StepPlan, first: bool = False) -> Tensor:
        """A greedy decode step, without waiting: the likeliest next token of each row, int32 [B] on the GPU.

        But for the ``first`` step its ``input_ids`` are those that the step before has left on the GPU, whatever the
        plan says: the host prepares step after step while the GPU computes. Raises KvlatheError for any other step.
        """
        self._check(step)
        graph = self._graph_of(step)
        if graph is None:
            fact = f"a step of {len(step.input_ids)} tokens is no decode step that a graph fits"
            raise KvlatheError(fact, "greedy steps follow each other in graphs only", "use run")
        return graph.run(step, follow=not first).best[: len(step.logit_rows)]

    def _check(self, step: StepPlan) -> None:
        for count, limit, flag in (
            (len(step.input_ids), self.limits.max_num_tokens, "max_num_tokens"),
            (len(step.query_starts) - 1, self.limits.max_batch_size, "max_batch_size"),
        ):
            if count > limit:
                raise KvlatheError(
                    f"a step of {count} exceeds this engine", f"its {flag} is {limit}", f"build with a larger --{flag}"
                )

    def _compute(self, on_gpu: _Views, single: bool) -> Tensor:
        inputs = StepInputs(on_gpu.query_starts, on_gpu.lengths, on_gpu.page_tables, single)
        spread = self.attention.spread(inputs, len(on_gpu.input_ids))

        attend = partial(self.attention.run, spread)
        return self.decoder(on_gpu.input_ids, on_gpu.positions, on_gpu.logit_rows, attend)

    def _graph_of(self, step: StepPlan) -> DecodeGraph | None:
        """The graph that computes a step, where it is a decode step that fits one."""
        batch = len(step.query_starts) - 1
        decodes = len(step.input_ids) == len(step.logit_rows) == batch and len(step.query_offsets) == 1
        fits = all(t.shape[1] <= width for t, width in zip(step.page_tables, self.widths, strict=True))
        size = next((n for n in LADDER if n >= batch), 0)
        if not (decodes and fits and size and (step.query_starts[1:] > step.query_starts[:-1]).all()):
            return None
        if size not in self._graphs:
            compute = partial(self._compute, single=True)
            self._graphs[size] = DecodeGraph(size, self.widths, compute, self._memory_of_graphs)
        return self._graphs[size]

    # -- pages ---------------------------------------------------------------------------------------------------
    def seal(self, fresh: int, page: int, cold_pages: tuple[int, ...], position: int) -> None:
        """Write full page ``page`` into one page of each cold bucket of ``fresh``, in that bucket's number format."""
        for bucket, target in zip(self.plan.cold(fresh), cold_pages, strict=True):
            self.pages.seal(fresh, bucket, [(page, target, position)], _stream())

    def evict(self, bucket: int, pages: Int32, keep: npt.NDArray[np.int64]) -> None:
        """Compact a sequence's lanes: ``keep`` [lanes of the bucket, n] are the kept token places, ascending."""
        places, ids = torch.from_numpy(np.ascontiguousarray(keep)).cuda(), torch.from_numpy(pages.copy()).cuda()
        self.pages.evict(bucket, ids.data_ptr(), places.data_ptr(), keep.shape[1], _stream())

    def copy_page(self, bucket: int, source: int, target: int) -> None:
        self._views[bucket][target].copy_(self._views[bucket][source])

    def read_page(self, bucket: int, page: int) -> bytes:
        return self._views[bucket][page].cpu().numpy().tobytes()

    def write_page(self, bucket: int, page: int, data: bytes) -> None:
        self._views[bucket][page].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


# -- a step's inputs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Views:
    """A step's int32 arrays inside one block."""

    input_ids: Tensor
    positions: Tensor
    query_starts: Tensor
    lengths: Tensor
    logit_rows: Tensor
    page_tables: tuple[Tensor, ...]


class _Block:
    """A step's arrays, of fixed sizes, in one block of int32 on the GPU and in two in pinned memory that take turns: a
    step's inputs are written while those of the step before may still be on their way."""

    def __init__(self, tokens: int, batch: int, rows: int, widths: list[int]) -> None:
        self.shapes = [(tokens,), (tokens,), (batch + 1,), (batch, len(widths)), (rows,), *((batch, w) for w in widths)]
        self.offsets = np.cumsum([0, *(-(-int(np.prod(shape)) // 64) * 64 for shape in self.shapes)])
        size = int(self.offsets[-1])
        self.gpu = torch.zeros(size, dtype=torch.int32, device="cuda")
        self._hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self._arrays = [[view.numpy() for view in self._cut(host)] for host in self._hosts]
        self._sent, self._turn = [torch.cuda.Event(), torch.cuda.Event()], 0

    @classmethod
    def of(cls, step: StepPlan) -> _Block:
        """A block just large enough for a step."""
        widths = [table.shape[1] for table in step.page_tables]
        return cls(len(step.input_ids), len(step.query_starts) - 1, len(step.logit_rows), widths)

    def _cut(self, block: Tensor) -> list[Tensor]:
        pairs = zip(self.offsets, self.shapes, strict=False)
        return [block[at : at + int(np.prod(shape))].view(shape) for at, shape in pairs]

    def send(self, step: StepPlan) -> None:
        """Queue the copy of a step's arrays to the GPU. Rows and sequences beyond the step's belong to nobody."""
        self._turn ^= 1
        self._sent[self._turn].synchronize()  # of two steps ago
        self._write(step, self._arrays[self._turn])
        self.gpu.copy_(self._hosts[self._turn], non_blocking=True)
        self._sent[self._turn].record()

    @staticmethod
    def _write(step: StepPlan, arrays: list[npt.NDArray[np.int32]]) -> None:
        ids, positions, starts, lengths, rows, *tables = arrays
        tokens, batch = len(step.input_ids), len(step.query_starts) - 1
        ids[:tokens], positions[:tokens] = step.input_ids, step.positions
        starts[: batch + 1], starts[batch + 1 :] = step.query_starts, tokens
        lengths[:batch], lengths[batch:] = step.lengths, 0
        rows[: len(step.logit_rows)], rows[len(step.logit_rows) :] = step.logit_rows, 0
        for table, mine in zip(step.page_tables, tables, strict=True):
            mine[:batch, : table.shape[1]] = table

    def views(self) -> _Views:
        ids, positions, starts, lengths, rows, *tables = self._cut(self.gpu)
        return _Views(ids, positions, starts, lengths, rows, tuple(tables))


class DecodeGraph:
    """One decode step of up to ``batch`` sequences, captured."""

    def __init__(self, batch: int, widths: list[int], compute: Callable[[_Views], Tensor], memory: object) -> None:
        self.block = _Block(batch, batch, batch, widths)
        views = self.block.views()  # zeros: nobody's tokens
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute(views)  # cuBLAS and the kernels set themselves up outside the capture
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=memory):  # type: ignore[arg-type]
            self.logits = compute(views)
            self.best = self.logits.argmax(-1).int()
        self.input_ids = views.input_ids

    def run(self, step: StepPlan, follow: bool = False) -> DecodeGraph:
        """Queue a step; ``logits`` [batch, vocab] and ``best`` [batch] are its own until the next. ``follow``: its
        input is ``best`` of the step before."""
        self.block.send(step)
        if follow:
            self.input_ids.copy_(self.best)
        self.graph.replay()
        return self


# -- what is here ------------------------------------------------------------------------------------------------------


def library_here() -> CudaLibrary:
    """The native library, if it has CUDA kernels and there is a GPU to run them. Raises KvlatheError."""
    if not torch.cuda.is_available():
        fact = "the cuda backend needs a GPU"
        raise KvlatheError(fact, f"torch {torch.__version__} sees none", "run it where one is")
    found = native.find()
    if found.native is None:
        raise KvlatheError("the cuda backend needs the native library", found.reason, "kvlathe native --cuda")
    return CudaLibrary(found.native)


def free_bytes() -> int:
    """Bytes of GPU memory that are free now."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def _memory(size: int) -> Tensor:
    try:
        return torch.empty(size // 128 * 128, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError as error:
        fact = f"a cache of {size:,} bytes does not fit"
        raise KvlatheError(fact, f"{free_bytes():,} bytes of GPU memory are free", "ask for less cache") from error


def _most_pages(plan: CompressionPlan, bucket: int, tokens: int) -> int:
    """Pages of a bucket that a decoding sequence of up to ``tokens`` tokens can have."""
    hot = plan.prefill_chunk + plan.page_tokens if plan.cold(bucket) else tokens
    return -(-min(tokens, hot) // plan.page_tokens) + 1


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream
