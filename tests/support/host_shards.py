"""Shards of tensor parallelism on a CPU: processes that exchange numbers by gloo, with
the sessions of the cuda backend in host memory.

``python -m tests.support.host_shards SHARD SIZE SOCKET`` is a follower.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.weights_file import wiring
from kvlathe.plan.deal import Deal, Shards, deal
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native.library import Native
from kvlathe.runtime.sessions.torch_cuda.attention.attend import Attention
from kvlathe.runtime.sessions.torch_cuda.compute import TorchCompute
from kvlathe.runtime.sessions.torch_cuda.device import bytes_of
from kvlathe.runtime.sessions.torch_cuda.model.decoder import TorchDecoder
from kvlathe.runtime.sessions.torch_cuda.model.shard_group import shard_borders
from kvlathe.runtime.sessions.torch_cuda.session import TorchSession
from kvlathe.runtime.sessions.torch_cuda.shards.follower import run
from kvlathe.runtime.sessions.torch_cuda.shards.parallel import LeaderSession
from kvlathe.runtime.sessions.torch_cuda.shards.shard_session import ShardSession
from kvlathe.runtime.sessions.torch_cuda.shards.slices import Slices
from kvlathe.runtime.sessions.torch_cuda.shards.workers import (
    Workers,
    environment,
    module_command,
)
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.support.device_engines import HostAttention
from tests.support.host_device import HostLibrary, HostTorchDevice
from tests.support.runtime_cases import LIMITS, MODEL, model_shape, plans
from tests.support.turned_cases import turned

ROOT = Path(__file__).resolve().parents[2]
FAMILY_LIMITS = Limits(4, 256, 400, 512)


class HostGroup:
    """A ShardGroup by gloo, on loopback alone."""

    def __init__(self, store: str, shard: int, size: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self.shard, self.size = shard, size
        gloo: Any = dist  # half of it has types
        self._gloo = gloo.ProcessGroupGloo(gloo.FileStore(store, size), shard, size)

    def sum(self, x: Tensor) -> Tensor:
        self._gloo.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor) -> Tensor:
        own = x.contiguous()
        every = [torch.empty_like(own) for _ in range(self.size)]
        self._gloo.allgather([every], [own]).wait()
        return torch.stack(every)

    def abort(self) -> None: ...


@dataclass(frozen=True)
class Engine:
    """An engine that every shard can make by itself. ``folder``: a checkpoint.
    ``kind``: of ``engine_plan``."""

    folder: str
    kind: str

    @property
    def limits(self) -> Limits:
        return LIMITS if self.folder == str(MODEL) else FAMILY_LIMITS

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.kind == "turned" else torch.float32


def plan_and_basis(engine: Engine) -> tuple[CompressionPlan, Basis]:
    """``turned``: as of tests/native_cpu. ``full``, ``projected``: of a family, in 32
    bit. Others are those of ``runtime_cases.plans``."""
    if engine.kind == "turned":
        return turned()
    if engine.kind not in ("full", "projected"):
        return plans(model_shape())[engine.kind], Basis()
    # transformers takes seconds to import, in every process
    from tests.support.checkpoints import random_basis, whole_plan

    spec = Checkpoint(Path(engine.folder)).spec
    projected = engine.kind == "projected" and spec.rope is not None
    plan = whole_plan(spec, projected)
    basis = Basis()
    if engine.kind == "projected":
        basis = random_basis(plan, 0, orthogonal=True)
    return plan, basis


def dealt(engine: Engine, size: int) -> Deal:
    return deal(plan_and_basis(engine)[0], size)


def check(engine: Engine, size: int) -> None:
    """Raises KvlatheError where so many shards cannot have parts of an engine."""
    plan, basis = plan_and_basis(engine)
    known = deal(plan, size)
    state = decoder_from(Checkpoint(Path(engine.folder)), plan, basis).state_dict()
    for shard in range(size):
        cut = Slices(known, shard)
        for name, tensor in state.items():
            cut(name, tensor)


def alone(native: Native, engine: Engine) -> LLM:
    """The same engine in this process alone."""
    checkpoint, (plan, basis) = Checkpoint(Path(engine.folder)), plan_and_basis(engine)
    state = decoder_from(checkpoint, plan, basis).state_dict()
    tensors = {name: tensor_as(engine, name, x) for name, x in state.items()}
    device, library = HostTorchDevice(), HostLibrary(native)
    pool = device.allocate(arena(plan), "a cache")
    wired = wiring(checkpoint.spec, plan)
    attention = HostAttention(native, plan, wired.scales, bytes_of(pool))
    decoder = TorchDecoder(wired, tensors)
    compute = TorchCompute(decoder, cast(Attention, attention))
    session = TorchSession(device, library, plan, engine.limits, pool, compute)
    return LLM(session, plan, engine.limits, Tokenizer(MODEL), arena(plan))


def tensor_as(engine: Engine, name: str, tensor: Tensor) -> Tensor:
    """RoPE stays what it is."""
    kind = torch.float32 if name.startswith("rope.") else engine.dtype
    return tensor.to(kind).clone()


def arena(plan: CompressionPlan) -> int:
    layout = CacheLayout(plan)
    return layout.bytes_for(8192) + 8 * len(layout.page_stride) * max(
        layout.page_stride
    )


class HostWorker:
    """As parallel.Member, in host memory."""

    def __init__(self, shard: int, size: int) -> None:
        self.shard, self.size = shard, size
        self.group: HostGroup | None = None
        self.session: ShardSession | None = None

    def meet(self, store: str) -> None:
        self.group = HostGroup(store, self.shard, self.size)

    def load(self, engine: Engine, shards: Shards) -> None:
        assert self.group
        checkpoint, (plan, basis) = (
            Checkpoint(Path(engine.folder)),
            plan_and_basis(engine),
        )
        state = decoder_from(checkpoint, plan, basis).state_dict()
        known = Deal(plan, shards)
        cut = Slices(known, self.shard)
        tensors: dict[str, Tensor] = {}
        for name, whole in state.items():
            part = cut(name, whole)
            if part is not None:
                tensors[name] = tensor_as(engine, name, part)
        wired = wiring(checkpoint.spec, plan)
        native = Native.load(Path(os.environ["KVLATHE_LIBRARY"]))
        device, library = HostTorchDevice(), HostLibrary(native)
        own = known.plans[self.shard]
        pool = device.allocate(arena(own), "a cache")
        attention = HostAttention(native, own, wired.scales, bytes_of(pool))
        decoder = TorchDecoder(wired, tensors, None, self.group, cut.vocabulary[0])
        compute = TorchCompute(decoder, cast(Attention, attention))
        borders = shard_borders(plan.model.vocab_size, self.size)
        self.session = ShardSession(
            device, library, own, engine.limits, pool, compute, self.group, borders
        )

    def obey(self, name: str, *arguments: object) -> object:
        return getattr(self.session, name)(*arguments)

    def fail(self, words: str) -> None:
        raise MemoryError(words)


class HostShards:
    """A leader with its followers, which load one engine after the other."""

    def __init__(self, native: Native, size: int) -> None:
        path = {"PYTHONPATH": str(ROOT), "KVLATHE_LIBRARY": str(native.path)}
        os.environ["KVLATHE_LIBRARY"] = str(native.path)
        given = environment() | path | {"OMP_NUM_THREADS": "1"}
        command = module_command("tests.support.host_shards")
        self.workers = Workers(command, [given] * (size - 1))
        self.own = HostWorker(0, size)
        store = Path(tempfile.mkdtemp()) / "store"
        self.workers.tell("meet", str(store), answers=True)
        self.own.meet(str(store))
        self.workers.answers()

    def session(self, engine: Engine) -> LeaderSession:
        shards = dealt(engine, self.workers.size).shards
        self.workers.tell("load", engine, shards, answers=True)
        self.own.load(engine, shards)
        self.workers.answers()
        assert self.own.session
        return LeaderSession(self.workers, self.own.session)

    def llm(self, engine: Engine, share_prefixes: bool = False) -> LLM:
        session, plan = self.session(engine), dealt(engine, self.workers.size).plans[0]
        limits, size = engine.limits, arena(plan)
        return LLM(session, plan, limits, Tokenizer(MODEL), size, share_prefixes)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(HostWorker)
