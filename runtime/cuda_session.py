"""CudaSession: an engine of the cuda backend on one GPU. Pages, weights and steps live there; the host keeps tables.

A decode step (one token of every sequence) is a CUDA graph, captured once for each batch size of a ladder; its inputs
are one block of int32 that one copy fills, queued behind the step before without waiting for it. Every other step runs
the same kernels without a graph. The one thing that is waited for is what the caller asked to see.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlathe.engines.manifest import DECODER_FILE, Limits
from kvlathe.errors import KvlatheError
from kvlathe.export.plan import CompressionPlan
from kvlathe.runtime import native
from kvlathe.runtime.cuda_abi import LEAST_CHUNK, CudaLibrary
from kvlathe.runtime.cuda_attend import Attention, StepInputs
from kvlathe.runtime.cuda_decoder import TorchDecoder, read_decoder
from kvlathe.runtime.cuda_graph import DecodeGraph, StepBlock, StepViews
from kvlathe.runtime.cuda_rows import NativeRows
from kvlathe.runtime.device_pages import DevicePages
from kvlathe.runtime.session import StepPlan
from kvlathe.runtime.step_block import LADDER, StepForm, check_step, is_decode, most_pages


class CudaSession(DevicePages):
    """Loads ``folder`` with a cache of ``arena_bytes`` on GPU 0. ``threads`` is for sessions on a CPU: ignored."""

    attention: Attention

    def __init__(
        self, folder: Path, plan: CompressionPlan, limits: Limits, arena_bytes: int, threads: int | None = None
    ) -> None:
        """Raises KvlatheError where there is no GPU, no native library with CUDA kernels, or too little memory."""
        library = library_here()
        wiring, tensors = read_decoder(folder, DECODER_FILE, "cuda")
        self._start(
            library, TorchDecoder(wiring, tensors, NativeRows(library)), wiring.scales, plan, limits, arena_bytes
        )

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
        self.limits, self.decoder = limits, decoder
        self.pool = _memory(arena_bytes)
        super().__init__(library, plan, TorchPool(self.pool))
        most_rows = max(limits.max_num_tokens, *(n for n in LADDER if n <= 2 * limits.max_batch_size))
        self.attention = Attention(library, plan, scales, self.pool, most_rows)
        self._graphs: dict[int, DecodeGraph] = {}
        self._memory_of_graphs = torch.cuda.graph_pool_handle()
        self.widths = tuple(most_pages(plan, b, limits.max_seq_len) for b in range(len(plan.buckets)))

    # -- steps ---------------------------------------------------------------------------------------------------
    def run(self, step: StepPlan) -> npt.NDArray[np.float32]:
        """Logits [R, vocab]; k' and v' of the step's tokens are in the pool afterwards. Raises KvlatheError beyond the
        profile."""
        return self.launch(step).float().cpu().numpy()

    def launch(self, step: StepPlan) -> Tensor:
        """The same without waiting: logits on the GPU in 16 bit, which the next step may overwrite."""
        check_step(step, self.limits)
        graph = self._graph_of(step)
        if graph is not None:
            return graph.run(step).logits[: len(step.logit_rows)]
        block = StepBlock(StepForm.of(step))
        block.send(step)
        return self._compute(block.views(), single=False, alone=self._only_chunks(step))

    def follow(self, step: StepPlan, first: bool = False) -> Tensor:
        """A greedy decode step, without waiting: the likeliest next token of each row, int32 [B] on the GPU.

        But for the ``first`` step its ``input_ids`` are those that the step before has left on the GPU, whatever the
        plan says: the host prepares step after step while the GPU computes. Raises KvlatheError for any other step.
        """
        check_step(step, self.limits)
        graph = self._graph_of(step)
        if graph is None:
            fact = f"a step of {len(step.input_ids)} tokens is no decode step that a graph fits"
            raise KvlatheError(fact, "greedy steps follow each other in graphs only", "use run")
        return graph.run(step, follow=not first).best[: len(step.logit_rows)]

    def _only_chunks(self, step: StepPlan) -> bool:
        """Whether every sequence with rows has a prompt chunk, long enough to be attended in tiles."""
        rows = np.diff(step.query_starts)
        return bool((rows[rows > 0] >= LEAST_CHUNK).all())

    def _compute(self, on_gpu: StepViews, single: bool, alone: bool = False) -> Tensor:
        inputs = StepInputs(on_gpu.query_starts, on_gpu.lengths, on_gpu.page_tables, single, alone)
        spread = self.attention.spread(inputs, len(on_gpu.input_ids))

        attend = partial(self.attention.run, spread)
        return self.decoder(on_gpu.input_ids, on_gpu.positions, on_gpu.logit_rows, attend)

    def _graph_of(self, step: StepPlan) -> DecodeGraph | None:
        """The graph that computes a step, where it is a decode step that fits one."""
        size = next((n for n in LADDER if n >= len(step.query_starts) - 1), 0)
        if not (size and is_decode(step, self.widths)):
            return None
        if size not in self._graphs:
            compute = partial(self._compute, single=True)
            self._graphs[size] = DecodeGraph(size, self.widths, compute, self._memory_of_graphs)
        return self._graphs[size]


class TorchPool:
    """A tensor of bytes as device_pages.PoolMemory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.address, self.size = tensor, tensor.data_ptr(), tensor.numel()

    @property
    def stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream

    def copy(self, target: int, source: int, size: int) -> None:
        self.tensor[target : target + size].copy_(self.tensor[source : source + size])

    def read(self, place: int, size: int) -> bytes:
        return self.tensor[place : place + size].cpu().numpy().tobytes()

    def write(self, place: int, data: bytes) -> None:
        self.tensor[place : place + len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def lend(self, array: npt.NDArray) -> tuple[int, object]:
        there = torch.from_numpy(np.ascontiguousarray(array)).to(self.tensor.device)
        return there.data_ptr(), there


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
