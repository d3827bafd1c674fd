"""The cuda backend: the decoder of a folded model in torch, attention by the native
kernels, on the pages and CUDA graphs of a DeviceSession."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kvlathe.plan.manifest import DECODER_FILE, Limits
from kvlathe.plan.plan import CompressionPlan
from kvlathe.runtime.native.cuda import CudaLibrary, cuda_library
from kvlathe.runtime.sessions.gpu.device import DeviceArray
from kvlathe.runtime.sessions.gpu.pages import allocate_pool
from kvlathe.runtime.sessions.gpu.session import DeviceSession
from kvlathe.runtime.sessions.gpu.step_buffer import Bindings, StepKind
from kvlathe.runtime.sessions.protocols import Sampling, StepPlan
from kvlathe.runtime.sessions.torch_cuda import sampling
from kvlathe.runtime.sessions.torch_cuda.attend import Attention, StepInputs
from kvlathe.runtime.sessions.torch_cuda.decoder import TorchDecoder, read_decoder
from kvlathe.runtime.sessions.torch_cuda.device import (
    TorchDevice,
    bytes_of,
    tensor_of,
)
from kvlathe.runtime.sessions.torch_cuda.rows import NativeRows
from kvlathe.runtime.text.sampler import SamplingRows


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
    decoder = TorchDecoder(wiring, tensors, NativeRows(library))
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
    pool = allocate_pool(device, library, plan, arena_bytes)
    rows = max(limits.max_num_tokens, limits.max_batch_size)
    scales = decoder.wiring.scales
    attention = Attention(library, plan, scales, bytes_of(pool), rows)
    compute = TorchCompute(decoder, attention)
    return TorchSession(device, library, plan, limits, pool, compute)


class TorchSession(DeviceSession):
    """A DeviceSession whose tokens are sampled on the GPU: logits never leave it, and
    the next step takes its tokens there."""

    _tokens: Tensor | None = None  # of the step before

    def sample(self, step: StepPlan, rows: SamplingRows) -> Sampling:
        """As TokenSampler.sample."""
        chosen = sampling.sample(tensor_of(self.launch(step)), rows)
        self._tokens = chosen.tokens
        return chosen

    @torch.inference_mode()
    def complete(self, step: StepPlan, input_ids: DeviceArray) -> None:
        if step.after is None:
            return
        assert self._tokens is not None
        ids = tensor_of(input_ids)[: len(step.after)]
        rows = torch.from_numpy(step.after).to(ids.device, non_blocking=True)
        # Where the logits were no numbers there is no token: the sequence ends.
        sampled = self._tokens[rows.clamp(min=0)].clamp(min=0)
        ids.copy_(torch.where(rows >= 0, sampled, ids))


class TorchCompute:
    """A Compute: ``decoder`` with ``attention`` over the session's pool."""

    outputs = frozenset({"logits"})
    least_rows = 0

    def __init__(self, decoder: TorchDecoder, attention: Attention) -> None:
        self.decoder, self.attention = decoder, attention

    @torch.inference_mode()
    def queue(self, inputs: Bindings, outputs: Bindings, kind: StepKind) -> None:
        input_ids = tensor_of(inputs["input_ids"])
        buckets = inputs["lengths"].shape[1]
        step = StepInputs(
            tensor_of(inputs["cu_seqlens_q"]),
            tensor_of(inputs["lengths"]),
            [tensor_of(inputs[f"page_table_{b}"]) for b in range(buckets)],
            kind.decode,
            kind.rows,
        )
        spread = self.attention.spread(step, len(input_ids))
        logits = self.decoder(
            input_ids,
            tensor_of(inputs["positions"]),
            tensor_of(inputs["logit_rows"]),
            partial(self.attention.run, spread),
        )
        tensor_of(outputs["logits"]).copy_(logits)
