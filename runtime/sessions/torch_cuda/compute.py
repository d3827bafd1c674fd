"""The cuda backend: the decoder of a folded model in torch, attention by the native
kernels, on the pages and CUDA graphs of a DeviceSession."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kvlathe.plan.adapter_maps import ADAPTERS_FILE
from kvlathe.plan.manifest import DECODER_FILE, Limits
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import CudaLibrary, cuda_library
from kvlathe.runtime.sessions.gpu.device import DeviceArray
from kvlathe.runtime.sessions.gpu.pages import allocate_pool
from kvlathe.runtime.sessions.gpu.side_memory import room_for_copies, scratch_bytes
from kvlathe.runtime.sessions.gpu.step_buffer import Bindings, StepArrays, StepKind
from kvlathe.runtime.sessions.torch_cuda.attention.attend import Attention
from kvlathe.runtime.sessions.torch_cuda.device import (
    TorchDevice,
    bytes_of,
    memory_bytes,
    tensor_of,
)
from kvlathe.runtime.sessions.torch_cuda.inputs import TorchStep
from kvlathe.runtime.sessions.torch_cuda.model.decoder import TorchDecoder
from kvlathe.runtime.sessions.torch_cuda.model.rows import NativeRows
from kvlathe.runtime.sessions.torch_cuda.model.weights import read_decoder
from kvlathe.runtime.sessions.torch_cuda.session import (
    AdaptingSession,
    GuessingSession,
    TorchSession,
)
from kvlathe.runtime.sessions.torch_cuda.tokens.evicting import (
    CompactingSession,
    EvictingSession,
)
from kvlathe.runtime.sessions.torch_cuda.tokens.stages import StagedSession


def open_session(
    folder: Path,
    plan: CompressionPlan,
    limits: Limits,
    arena_bytes: int,
    threads: int | None = None,
) -> TorchSession:
    """Load ``folder`` with a cache of ``arena_bytes`` on GPU 0.

    ``threads`` is for sessions on a CPU. Raises KvlatheError where there is no GPU, no
    native library with CUDA kernels, or too little memory.
    """
    device, library = TorchDevice(), cuda_library("the cuda backend")
    wiring, tensors = read_decoder(folder, DECODER_FILE, "cuda")
    adapts = (folder / ADAPTERS_FILE).is_file()
    decoder = TorchDecoder(wiring, tensors, NativeRows(library), adapts=adapts)
    return session_of(device, library, decoder, plan, limits, arena_bytes)


def session_of(
    device: TorchDevice,
    library: CudaLibrary,
    decoder: TorchDecoder,
    plan: CompressionPlan,
    limits: Limits,
    arena_bytes: int,
) -> TorchSession:
    """A session of weights that are on the GPU already."""
    pool = allocate_pool(device, library, plan, arena_bytes + scratch_bytes(plan))
    compute = compute_of(device, library, decoder, plan, limits, pool)
    if plan.stages:
        return StagedSession(device, library, plan, limits, pool, compute)
    given = device, library, plan, limits, pool, compute
    if decoder.guess_join is not None:
        return GuessingSession(*given)
    if plan.index.ranked:
        return EvictingSession(*given)
    if plan.index.moves_tokens:
        return CompactingSession(*given)
    if decoder.adapted:
        return AdaptingSession(*given, decoder)
    return TorchSession(*given)


def compute_of(
    device: TorchDevice,
    library: CudaLibrary,
    decoder: TorchDecoder,
    plan: CompressionPlan,
    limits: Limits,
    pool: DeviceArray,
) -> TorchCompute:
    """The decoder with the attention of a plan over ``pool``."""
    rows = max(limits.max_num_tokens, limits.max_batch_size)
    scales = decoder.wiring.scales
    copies, size = None, 0
    if library.lib.kvlathe_cuda_has_prompt_kernel():
        _, total = memory_bytes()
        size = room_for_copies(plan, limits, total)
    if size:
        copies = bytes_of(device.allocate(size, "room for copies of sealed pages"))
    attention = Attention.of_plan(
        library, plan, scales, bytes_of(pool), rows, copies, decoder.sinks
    )
    return TorchCompute(decoder, attention)


class TorchCompute:
    """A Compute: ``decoder`` with ``attention`` over the session's pool. ``hidden``
    [R, D]: what the head read of the step that was queued last. ``kept`` [most
    sequences, D]: where that of a decode stays, whose graph somebody else captured.
    ``given`` [most tokens, D]: where a decoder that guesses tokens finds what it reads
    beside them."""

    outputs = frozenset({"logits"})
    least_rows = 0

    def __init__(self, decoder: TorchDecoder, attention: Attention) -> None:
        self.decoder = decoder
        self.attention = attention
        self.given: Tensor | None = None
        self.hidden: Tensor | None = None
        self.kept: Tensor | None = None

    def bundles(self, kind: StepKind) -> bool:
        """As Attention.bundles."""
        return self.attention.bundles(kind)

    def room(self, rows: int) -> Tensor:
        """Room for hidden states [rows, D]."""
        return self.decoder.embed.new_zeros(rows, self.decoder.embed.shape[1])

    @torch.inference_mode()
    def queue(self, step: StepArrays, outputs: Bindings) -> None:
        inputs = TorchStep.of(step, outputs)
        layers = range(len(self.decoder.layers))
        x = self.run(inputs, layers, rows=inputs.logit_rows)
        self.hidden = self.decoder.norm(x)
        if self.kept is not None and step.kind.captured:
            self.kept[: len(self.hidden)].copy_(self.hidden)
        tensor_of(outputs["logits"]).copy_(self.decoder.logits(self.hidden))

    def run(
        self,
        step: TorchStep,
        layers: range,
        x: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Queue some ``layers`` of a step: what leaves them [T, D]. ``x`` [T, D] enters
        them; None: the step's tokens do. ``rows`` [R]: those that leave, if not all."""
        attending = [i for i in layers if self.decoder.layers[i].attends]
        calls = self.attention.prepare(step.attention, len(step.input_ids), attending)
        inputs = None
        if x is None:
            given = None if self.given is None else self.given[: len(step.input_ids)]
            x = self.decoder.embedded(step.input_ids, step.positions, given)
            inputs = self.decoder.inputs(step.input_ids, x)
        attend = partial(self.attention.run, calls)
        memories = None if step.states is None else step.states.of_layer
        self.decoder.adapter_rows.begin(step.adapters)
        beside = attend, rows, memories, inputs
        return self.decoder.run(x, step.positions, layers, *beside)

    def logits(self, step: TorchStep, x: Tensor) -> Tensor:
        """[R, V] of what leaves the last layer [T, D]."""
        self.hidden = self.decoder.norm(x.index_select(0, step.logit_rows))
        return self.decoder.logits(self.hidden)
