"""DeviceSession: an exported graph on one GPU, by whatever runs graphs there; memory, stream and CUDA graphs are ours.

Pool, tables, lengths and ids are on the GPU, and the graph is told where: nothing of the pool is ever copied. A decode
step is a CUDA graph, captured once for each batch size of a ladder; what runs the model (a subclass) only queues steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvlathe.engines.manifest import Limits
from kvlathe.errors import KvlatheError
from kvlathe.export.plan import CompressionPlan
from kvlathe.runtime import native
from kvlathe.runtime.cuda_abi import CudaLibrary
from kvlathe.runtime.device import Device, Memory
from kvlathe.runtime.device_pages import DevicePages
from kvlathe.runtime.session import StepPlan
from kvlathe.runtime.step_block import LADDER, StepForm, check_step, is_decode, most_pages

INT32, HALF, FLOAT, BYTE = (np.dtype(kind) for kind in (np.int32, np.float16, np.float32, np.uint8))


@dataclass(frozen=True)
class Bound:
    """An array on the GPU that a graph reads or writes."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype


Bindings = Mapping[str, Bound]


class DeviceSession(DevicePages, ABC):
    """A session of a float16 engine with a cache of ``arena_bytes`` on ``device``."""

    def __init__(
        self, device: Device, library: CudaLibrary, plan: CompressionPlan, limits: Limits, arena_bytes: int
    ) -> None:
        self.device, self.limits = device, limits
        super().__init__(library, plan, DevicePool(device, arena_bytes))
        most = -(-limits.max_seq_len // plan.page_tokens)
        buckets = range(len(plan.buckets))
        self.widths = tuple(min(most_pages(plan, b, limits.max_seq_len), most) for b in buckets)
        self.sizes = (*(n for n in LADDER if n < limits.max_batch_size), limits.max_batch_size)
        """Batch sizes that get a graph."""
        tokens = limits.max_num_tokens
        self._any = StepBlock(device, StepForm(tokens, limits.max_batch_size, tokens, (most + 1,) * len(buckets)))
        self._decodes: dict[int, Decode] = {}
        self._counts = device.allocate(tokens * INT32.itemsize, "the step")
        device.send(self._counts.address, np.arange(tokens, dtype=INT32))
        self._row_width = sum(lane.rank_k + lane.rank_v for lane in plan.lanes)
        self._rows = device.allocate(tokens * self._row_width * HALF.itemsize, "what a step appends")
        self._logits = self._logits_of(self.sizes[-1])
        self.pool_views = pool_views(self.memory.address, self.memory.size, plan.unit)

    @abstractmethod
    def compute(self, inputs: Bindings, outputs: Bindings, decode: bool) -> None:
        """Queue a step; ``decode``: one query a sequence. Its k' and v' are in the pool afterwards."""

    # -- steps ---------------------------------------------------------------------------------------------------
    def run(self, step: StepPlan) -> npt.NDArray[np.float32]:
        """Logits [R, vocab]; k' and v' of the step's tokens are in the pool afterwards. Raises KvlatheError beyond the
        profile."""
        check_step(step, self.limits)
        if is_decode(step, self.widths):
            self._decode_of(len(step.logit_rows)).run(step)
            return self._read(self._logits, len(step.logit_rows))
        form = StepForm.of(step)
        form = StepForm(form.tokens, form.batch, max(1, form.rows), form.widths)  # no graph has a dimension of 0
        logits = self._logits if form.rows <= self.sizes[-1] else self._logits_of(form.rows)
        inputs = self._inputs(self._any.send(step, form), len(step.query_offsets))
        self.compute(inputs, self._outputs(form, logits), decode=False)
        return self._read(logits, len(step.logit_rows))

    def _decode_of(self, batch: int) -> Decode:
        """The step that decodes so many sequences."""
        size = next(n for n in self.sizes if n >= batch)
        if size not in self._decodes:
            form = StepForm(size, size, size, self.widths)
            block = StepBlock(self.device, form)
            inputs = self._inputs(block.bindings(form), 1)
            work = partial(self.compute, inputs, self._outputs(form, self._logits), decode=True)
            self._decodes[size] = Decode(self.device, block, work)
        return self._decodes[size]

    def _inputs(self, step: Bindings, queries: int) -> Bindings:
        return {**step, "query_offsets": Bound(self._counts.address, (queries,), INT32), **self.pool_views}

    def _outputs(self, form: StepForm, logits: Memory) -> Bindings:
        return {
            "logits": Bound(logits.address, (form.rows, self.plan.model.vocab_size), FLOAT),
            "rows": Bound(self._rows.address, (form.tokens, self._row_width), HALF),
        }

    def _logits_of(self, rows: int) -> Memory:
        return self.device.allocate(rows * self.plan.model.vocab_size * FLOAT.itemsize, "logits")

    def _read(self, logits: Memory, rows: int) -> npt.NDArray[np.float32]:
        return self.device.fetch(logits.address, (rows, self.plan.model.vocab_size), FLOAT)


class StepBlock:
    """A step's integers on the GPU, at most as large as ``form``, and two blocks in pinned memory that take turns: a
    step is written while the one before may still be on its way."""

    def __init__(self, device: Device, form: StepForm) -> None:
        self.device, self.form = device, form
        self.gpu = device.allocate(form.size * INT32.itemsize, "the step")
        self._hosts = [device.pinned(form.size * INT32.itemsize).view(INT32) for _ in range(2)]
        self._sent: list[Callable[[], None]] = [lambda: None, lambda: None]
        self._turn = 0

    def send(self, step: StepPlan, form: StepForm) -> Bindings:
        """Queue the copy of a step in ``form`` and say where its arrays are."""
        if form.size > self.form.size:
            fact = f"a step with page tables of {form.widths} pages does not fit"
            raise KvlatheError(fact, f"there is room for {self.form.widths}", "build with a larger --max_seq_len")
        self._turn ^= 1
        host = self._hosts[self._turn][: form.size]
        self._sent[self._turn]()  # of two steps ago
        form.write(step, form.cut(host))
        self.device.send(self.gpu.address, host)
        self._sent[self._turn] = self.device.mark()
        return self.bindings(form)

    def bindings(self, form: StepForm) -> Bindings:
        at = self.gpu.address
        return {n: Bound(at + INT32.itemsize * form.places[n], shape, INT32) for n, shape in form.shapes.items()}


class Decode:
    """A decode step of fixed sizes, captured: what belongs to nobody in it writes nothing."""

    def __init__(self, device: Device, block: StepBlock, work: Callable[[], None]) -> None:
        self.block = block
        device.send(block.gpu.address, np.zeros(block.form.size, INT32))  # nobody's tokens
        for _ in range(2):  # what runs the graph takes its memory outside the capture
            work()
        device.wait()
        self._replay = device.capture(work)

    def run(self, step: StepPlan) -> None:
        """Queue it."""
        self.block.send(step, self.block.form)
        self._replay()


class DevicePool:
    """The pool in a device's memory, as device_pages.PoolMemory."""

    def __init__(self, device: Device, size: int) -> None:
        self.device, self._bytes = device, device.allocate(size // 128 * 128, "a cache")
        self.address, self.size = self._bytes.address, self._bytes.size

    @property
    def stream(self) -> int:
        return self.device.stream

    def copy(self, target: int, source: int, size: int) -> None:
        self.device.copy(self.address + target, self.address + source, size)

    def read(self, place: int, size: int) -> bytes:
        return self.device.fetch(self.address + place, (size,), BYTE).tobytes()

    def write(self, place: int, data: bytes) -> None:
        self.device.send(self.address + place, np.frombuffer(data, BYTE))

    def lend(self, array: npt.NDArray) -> tuple[int, object]:
        array = np.ascontiguousarray(array)
        there = self.device.allocate(array.nbytes, "a list of tokens")
        self.device.send(there.address, array)
        return there.address, there


def pool_views(address: int, size: int, unit: int) -> Bindings:
    """The pool as Attend reads it: arrays [n, unit] of every 16-bit plan's formats."""
    kinds = {"pool_f16": HALF, "pool_u8": BYTE}
    return {n: Bound(address, (size // (kind.itemsize * unit), unit), kind) for n, kind in kinds.items()}


def library_here(name: str) -> CudaLibrary:
    """The native library with its CUDA kernels. Raises KvlatheError where ``name`` cannot have it."""
    found = native.find()
    if found.native is None:
        raise KvlatheError(f"{name} needs the native library", found.reason, "kvlathe native --cuda")
    return CudaLibrary(found.native)
