"""Whole engines on the host's stand-in of a GPU: ONNX Runtime's session, and torch's."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from ctypes import c_void_p
from dataclasses import asdict
from pathlib import Path
from typing import cast

import onnxruntime as ort
import torch
from torch import Tensor

from kvlathe.export.bases.basis import Basis
from kvlathe.export.folding.fold import decoder_from
from kvlathe.export.model.checkpoint import Checkpoint
from kvlathe.export.model.weights_file import wiring
from kvlathe.layers.wiring import Wiring
from kvlathe.plan.layer_table import layer_table
from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.llm import LLM
from kvlathe.runtime.native.library import ABI_VERSION, Native
from kvlathe.runtime.sessions.gpu.onnx import OnnxCompute, session_options
from kvlathe.runtime.sessions.gpu.pages import allocate_pool
from kvlathe.runtime.sessions.gpu.session import DeviceSession
from kvlathe.runtime.sessions.gpu.step_buffer import StepKind
from kvlathe.runtime.sessions.host.native import HalfSession
from kvlathe.runtime.sessions.protocols import Session
from kvlathe.runtime.sessions.torch_cuda.attention.attend import Attention
from kvlathe.runtime.sessions.torch_cuda.compute import TorchCompute
from kvlathe.runtime.sessions.torch_cuda.device import bytes_of
from kvlathe.runtime.sessions.torch_cuda.inputs import StepInputs
from kvlathe.runtime.sessions.torch_cuda.model.decoder import TorchDecoder
from kvlathe.runtime.sessions.torch_cuda.session import (
    AdaptingSession,
    GuessingSession,
    TorchSession,
)
from kvlathe.runtime.text.tokenizer import Tokenizer
from tests.native_cpu.library import AttendArgs, Op
from tests.support.host_device import HostDevice, HostLibrary, HostTorchDevice
from tests.support.runtime_cases import LIMITS, MODEL
from tests.support.turned_cases import turned as turned_plan

ENTRIES = {"kvlathe.element_bits": "16", "kvlathe.hot_bits": "16"}
"""The operator of the CPU provider, which reads what is bound where it lies."""


def host_graph(native: Native, folder: Path) -> ort.InferenceSession:
    options = session_options(native.path, ENTRIES)
    options.intra_op_num_threads = 1
    path = str(folder / "model.onnx")
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def arena(plan: CompressionPlan) -> int:
    return CacheLayout(plan).bytes_for(8192)


def on_cpu(native: Native, engine: tuple[Path, CompressionPlan]) -> LLM:
    folder, plan = engine
    session = HalfSession(folder, plan, LIMITS, arena(plan), 1, native)
    return LLM(session, plan, LIMITS, Tokenizer(MODEL), arena(plan))


def as_llm(session: Session, plan: CompressionPlan, limits: Limits = LIMITS) -> LLM:
    return LLM(session, plan, limits, Tokenizer(MODEL), arena(plan))


def on_host(native: Native, engine: tuple[Path, CompressionPlan]) -> LLM:
    folder, plan = engine
    device, library = HostDevice(), HostLibrary(native)
    pool = allocate_pool(device, library, plan, arena(plan))
    compute = OnnxCompute(host_graph(native, folder), "cpu")
    session = DeviceSession(device, library, plan, LIMITS, pool, compute)
    return as_llm(session, plan)


def in_torch(
    native: Native, engine: tuple[Path, CompressionPlan], limits: Limits = LIMITS
) -> LLM:
    """The torch decoder's session; attention is the library's op for the CPU."""
    plan = engine[1]
    checkpoint = Checkpoint(MODEL)
    decoder = decoder_from(checkpoint, plan, turned_plan()[1])
    tensors = {name: x.half() for name, x in decoder.state_dict().items()}
    wired = wiring(checkpoint.spec, plan)
    device, library = HostTorchDevice(), HostLibrary(native)
    pool = allocate_pool(device, library, plan, arena(plan))
    attention = HostAttention(native, plan, wired.scales, bytes_of(pool))
    compute = TorchCompute(TorchDecoder(wired, tensors), cast(Attention, attention))
    session = TorchSession(device, library, plan, limits, pool, compute)
    return as_llm(session, plan, limits)


def torch_session(
    native: Native,
    checkpoint: Checkpoint,
    plan: CompressionPlan,
    limits: Limits,
    size: int,
    basis: Basis | None = None,
) -> TorchSession:
    """The torch decoder's session of a checkpoint in float32, with a cache of ``size``
    bytes. It takes adapters where the plan has a ``basis``."""
    tensors = decoder_from(checkpoint, plan, basis or Basis()).state_dict()
    wired = Wiring.from_json(
        json.loads(json.dumps(asdict(wiring(checkpoint.spec, plan))))
    )
    device, library = HostTorchDevice(), HostLibrary(native)
    pool = device.allocate(size, "a cache")
    attention = HostAttention(native, plan, wired.scales, bytes_of(pool))
    decoder = TorchDecoder(wired, tensors, adapts=basis is not None)
    compute = TorchCompute(decoder, cast(Attention, attention))
    given = device, library, plan, limits, pool, compute
    if basis is not None:
        return AdaptingSession(*given, decoder)
    guesses = checkpoint.spec.reads_hidden
    return (GuessingSession if guesses else TorchSession)(*given)


def engine_of(native: Native, folder: Path, guesses: bool = False) -> LLM:
    """A checkpoint's model in pages of 16 bits, or the layer that guesses for it."""
    # transformers takes seconds to import, and processes of shards import this module
    from tests.support.checkpoints import whole_plan

    checkpoint = Checkpoint(folder, guesses=guesses)
    plan = whole_plan(checkpoint.spec, bits=16)
    size = CacheLayout(plan).bytes_for(4096)
    session = torch_session(native, checkpoint, plan, LIMITS, size)
    return LLM(session, plan, LIMITS, Tokenizer(folder), size)


class HostAttention:
    """torch_cuda's Attention by the library's op for the CPU, which appends, too. A layer
    that reads another's cache writes that one's rows once more."""

    def __init__(
        self,
        native: Native,
        plan: CompressionPlan,
        scales: Sequence[float],
        pool: Tensor,
    ) -> None:
        self.plan, self.scales, self.pool = plan, scales, pool
        layout, layers = CacheLayout(plan), range(plan.model.layers)
        attending = [layer for layer in layers if plan.index.active(layer)]
        self.ops = {x: Op(native, layer_table(layout, x)) for x in attending}
        self.written: dict[int, tuple[Tensor, Tensor]] = {}
        self.kinds: list[tuple[bool, int]] = []

    def bundles(self, kind: StepKind) -> bool:
        return False

    def prepare(
        self, step: StepInputs, tokens: int, layers: range | None = None
    ) -> StepInputs:
        self.kinds.append((step.kind.decode, step.kind.rows))
        return step

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
        source = self.plan.model.source(layer)
        if k is not None and v is not None:
            self.written[source] = k, v
        k, v = self.written[source]
        group = self.plan.model.group(layer)
        width = sum(group * lane.rank_v for lane in self.plan.index.active(source))
        floats = {"q": q, "k": k, "v": v, **weights}
        if angles is not None:
            floats |= {"cos": angles[0], "sin": angles[1]}
        arrays = {name: x.float().contiguous() for name, x in floats.items()}
        widths = torch.tensor([t.shape[1] for t in step.page_tables], dtype=torch.int32)
        arrays |= {"cu_seqlens_q": step.cu_seqlens_q, "lengths": step.lengths}
        arrays |= {"page_table_widths": widths, "o": torch.zeros(len(q), width)}
        addresses = [table.data_ptr() for table in step.page_tables]
        tables = (c_void_p * len(addresses))(*addresses)
        args = AttendArgs(ABI_VERSION, len(q), len(step.lengths), 0, 1)
        args.scale = self.scales[layer]
        args.softcap = self.plan.model.softcap
        args.page_tables = ctypes.addressof(tables)
        args.pool, args.pool_bytes = self.pool.data_ptr(), self.pool.numel()
        for name, array in arrays.items():
            setattr(args, name, array.data_ptr())
        self.ops[source].run(args)
        return arrays["o"].to(q.dtype)


def turned(q: Tensor, cos: Tensor, sin: Tensor, width: int) -> Tensor:
    """RoPE of query heads side by side."""
    heads = q.float().unflatten(1, (-1, width))
    a, b = heads.chunk(2, -1)
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return turned.flatten(1).half()
