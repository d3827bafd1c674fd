"""Tensor parallelism: one engine on several GPUs of a host (docs/scale.md).

Each GPU has a shard of the model, and a process for it: a worker. The first worker is
the leader: it schedules, and its session tells the others what to run. All of them run
the same step on their own lanes and on their own part of the weights.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from kvlathe.base.errors import DeviceLost, KvlatheError
from kvlathe.plan.deal import Deal, Shards, deal
from kvlathe.plan.engine_folder import read_plan
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.manifest import DECODER_FILE, Limits
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import cuda_library
from kvlathe.runtime.sessions.gpu.pages import allocate_pool
from kvlathe.runtime.sessions.page_moves import PageMoves
from kvlathe.runtime.sessions.protocols import (
    Capability,
    Choose,
    Float32,
    Hidden,
    Sampling,
    Session,
    StepPlan,
)
from kvlathe.runtime.sessions.steps import check_step
from kvlathe.runtime.sessions.torch_cuda.compute import compute_of
from kvlathe.runtime.sessions.torch_cuda.device import memory_bytes, require_gpu
from kvlathe.runtime.sessions.torch_cuda.model.decoder import TorchDecoder
from kvlathe.runtime.sessions.torch_cuda.model.rows import NativeRows
from kvlathe.runtime.sessions.torch_cuda.model.shard_group import (
    ShardGroup,
    shard_borders,
)
from kvlathe.runtime.sessions.torch_cuda.model.weights import (
    decoder_shapes,
    read_decoder,
)
from kvlathe.runtime.sessions.torch_cuda.sampling.sampling import to_host
from kvlathe.runtime.sessions.torch_cuda.shards import nccl
from kvlathe.runtime.sessions.torch_cuda.shards.shard_session import (
    ShardDevice,
    ShardSession,
    nobody_missing,
)
from kvlathe.runtime.sessions.torch_cuda.shards.slices import Slices
from kvlathe.runtime.sessions.torch_cuda.shards.workers import (
    Workers,
    environment,
    module_command,
)
from kvlathe.runtime.text.sampler import SamplingRows

T = TypeVar("T")
FOLLOWER = "kvlathe.runtime.sessions.torch_cuda.shards.follower"
DEVICES = "CUDA_VISIBLE_DEVICES"


class Worker:
    """The process of one shard, with what that has on its GPU. A follower's calls come
    from the leader."""

    def __init__(
        self, shard: int, size: int, check: Callable[[], None] = nobody_missing
    ) -> None:
        """``check``: raises where a worker has died."""
        require_gpu()
        self.shard = shard
        self.size = size
        self.check = check
        self.group: ShardGroup | None = None
        self._session: ShardSession | None = None

    def memory(self) -> tuple[int, int]:
        """Bytes of its GPU that are free, and all."""
        return memory_bytes()

    def meet(self, shared: bytes) -> None:
        """Join the other workers. Waits for them."""
        torch.cuda.set_device(0)
        self.group = nccl.NcclGroup(shared, self.shard, self.size)

    def load(
        self, folder: Path, shards: Shards, limits: Limits, arena_bytes: int
    ) -> None:
        """Load this shard's part of an engine, ``shards`` being what the leader has
        dealt. Raises KvlatheError where it cannot."""
        assert self.group is not None
        dealt = Deal(read_plan(folder), shards)
        device = ShardDevice(self.check)
        library = cuda_library("the cuda backend")
        slices = Slices(dealt, self.shard)
        wiring, tensors = read_decoder(folder, DECODER_FILE, "cuda", slices)
        first = slices.vocabulary[0]
        rows = NativeRows(library)
        decoder = TorchDecoder(wiring, tensors, rows, self.group, first)
        plan = dealt.plans[self.shard]
        pool = allocate_pool(device, library, plan, arena_bytes)
        compute = compute_of(device, library, decoder, plan, limits, pool)
        borders = shard_borders(plan.model.vocab_size, self.size)
        self._session = ShardSession(
            device, library, plan, limits, pool, compute, self.group, borders
        )

    @property
    def session(self) -> ShardSession:
        assert self._session is not None, "it is loaded first"
        return self._session

    def obey(self, name: str, *arguments: object) -> object:
        """Call the session."""
        return getattr(self.session, name)(*arguments)


class LeaderSession(Session):
    """The session of all shards: what it does itself it has the others do, too."""

    capabilities: frozenset[Capability] = frozenset({"samples", "hidden_states"})
    _keeps_hidden = False

    def __init__(self, workers: Workers, own: ShardSession) -> None:
        self.workers = workers
        self.own = own
        self.strides = CacheLayout(own.plan).page_stride
        self._wait = torch.cuda.Event.synchronize
        if isinstance(own.device, ShardDevice):
            self._wait = own.device.settle
        workers.watch(partial(_abort, own.group))

    def watch(self, tell: Callable[[], None]) -> None:
        """As Session.watch."""
        self.workers.watch(tell)

    def close(self) -> None:
        """End the followers."""
        self.workers.close()

    def check(self) -> None:
        """Raises DeviceLost where a worker has died."""
        self.workers.check()

    # -- steps -------------------------------------------------------------------------
    def run(self, step: StepPlan) -> Float32:
        """As Session.run."""
        check_step(step, self.own.limits)
        return self._together("logits", self._logits, step)

    def _logits(self, step: StepPlan) -> Float32:
        found: Tensor = self.own.logits(step)
        return to_host(found, self._wait)()

    def start(self, step: StepPlan) -> Choose:
        """As Session.start."""
        check_step(step, self.own.limits)
        self._together("start", self.own.start, step)
        return self._choose

    def _choose(self, rows: SamplingRows) -> Sampling:
        return self._together("choose", self.own.choose, rows)

    def keep_hidden(self) -> None:
        """As Session.keep_hidden: all shards capture their graphs again."""
        if not self._keeps_hidden:
            self._together("keep_hidden", self.own.keep_hidden)
            self._keeps_hidden = True

    def hidden(self) -> Hidden:
        """As Session.hidden: every shard has all of it."""
        return self.own.hidden()

    def apply(self, moves: Sequence[PageMoves]) -> None:
        """As Session.apply."""
        self._together("apply", self.own.apply, list(moves))

    def lost(self) -> str:
        """As Session.lost."""
        try:
            self.check()
        except KvlatheError as lost:
            return str(lost)
        return self.own.lost()

    def warm_up(self) -> None:
        """As Session.warm_up."""
        self._together("warm_up", self.own.warm_up)

    # -- pages -------------------------------------------------------------------------
    def read_page(self, bucket: int, page: int) -> bytes:
        """As PageMover.read_page: the bytes of all shards, one after the other."""
        self.workers.tell("obey", "read_page", bucket, page, answers=True)
        own = self.own.read_page(bucket, page)
        others = [part for part in self.workers.answers() if isinstance(part, bytes)]
        return b"".join([own, *others])

    def write_page(self, bucket: int, page: int, data: bytes) -> None:
        """As PageMover.write_page, of such bytes."""
        self.check()
        size = self.strides[bucket]
        for follower in self.workers.followers:
            start = follower.shard * size
            part = data[start : start + size]
            follower.tell("obey", ("write_page", bucket, page, part), False)
        self.own.write_page(bucket, page, data[:size])

    def _together(self, name: str, own: Callable[..., T], *arguments: object) -> T:
        """What ``own`` gives, while the others call ``name``. Raises DeviceLost where
        any worker has failed: they no longer keep step."""
        self.workers.tell("obey", name, *arguments)
        try:
            return own(*arguments)
        except Exception as error:
            raise self.workers.failure(error) from error


def _abort(group: ShardGroup) -> None:
    """End work that waits for a missing worker: it never would. In a thread, since NCCL
    may take its time."""
    threading.Thread(target=group.abort, daemon=True).start()


class TensorParallel:
    """Loads an engine on several GPUs: a SessionFactory. Its processes start at once."""

    def __init__(self, folder: Path, plan: CompressionPlan, num_shards: int) -> None:
        """Raises KvlatheError for a plan that cannot be dealt, and where there are
        fewer GPUs than shards."""
        self.dealt: Deal = deal(plan, num_shards)
        require_gpu()
        count = torch.cuda.device_count()
        if count < num_shards:
            raise KvlatheError(
                f"{num_shards} shards need {num_shards} GPUs",
                f"torch {torch.__version__} sees {count}",
                f"give --tensor-parallel-size {count}, or run it where there are more",
            )
        self.folder = folder
        command = module_command(FOLLOWER)
        self._workers = Workers(
            command, [_environment(r) for r in range(1, num_shards)]
        )
        self._own = Worker(0, num_shards, self._workers.check)

    @cached_property
    def weight_bytes(self) -> int:
        """The bytes of the shard with most."""
        shapes = decoder_shapes(self.folder, DECODER_FILE)
        sizes: list[int] = []
        for shard in range(self.dealt.num_shards):
            cut = Slices(self.dealt, shard)
            own = [cut(name, tensor) for name, tensor in shapes.items()]
            sizes.append(sum(tensor.nbytes for tensor in own if tensor is not None))
        return max(sizes)

    def memory(self) -> tuple[int, int]:
        """Bytes of a GPU that are free and all, on the GPU with least of each."""
        self._workers.tell("memory", answers=True)
        free, total = self._own.memory()
        for answer in self._workers.answers():
            assert isinstance(answer, tuple)
            free, total = min(free, answer[0]), min(total, answer[1])
        return free, total

    def __call__(
        self,
        folder: Path,
        plan: CompressionPlan,
        limits: Limits,
        arena_bytes: int,
        threads: int | None = None,
    ) -> LeaderSession:
        """``arena_bytes``: of the cache on each GPU. Raises KvlatheError that names the
        worker that cannot."""
        shared = nccl.unique_id()
        self._all("meet", partial(self._own.meet, shared), shared)
        order = (folder, self.dealt.shards, limits, arena_bytes)
        self._all("load", partial(self._own.load, *order), *order)
        return LeaderSession(self._workers, self._own.session)

    def _all(self, name: str, own: Callable[[], None], *arguments: object) -> None:
        """Have every worker call ``name``; this one in a thread, since it may wait for one
        that has died."""
        self._workers.tell(name, *arguments, answers=True)
        failures: list[Exception] = []

        def work() -> None:
            try:
                own()
            except Exception as error:
                failures.append(error)
                self._workers.close()  # they would wait for this worker

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            self._workers.answers()
            thread.join()
        except DeviceLost:
            if not failures:
                raise
        for failure in failures:
            raise failure


def _environment(shard: int) -> dict[str, str]:
    """Of a follower: it sees one GPU alone."""
    visible = os.environ.get(DEVICES)
    names = visible.split(",") if visible else [str(i) for i in range(shard + 1)]
    local = {name: os.environ.get(name, value) for name, value in nccl.LOCAL.items()}
    return environment(**local, **{DEVICES: names[shard]})
