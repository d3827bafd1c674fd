"""ShardSession: one shard of a model. Shards make the same calls in the same
order, with the same page numbers; each has its own lanes in the pages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import ShardPlan
from kvlathe.runtime.native.cuda import CudaLibrary
from kvlathe.runtime.sessions.gpu.device import Device, DeviceArray
from kvlathe.runtime.sessions.gpu.session import Compute
from kvlathe.runtime.sessions.protocols import Choose, Sampling, StepPlan
from kvlathe.runtime.sessions.torch_cuda.device import TorchDevice, tensor_of
from kvlathe.runtime.sessions.torch_cuda.model.shard_group import ShardGroup
from kvlathe.runtime.sessions.torch_cuda.sampling.sharded_sampling import ShardedSampler
from kvlathe.runtime.sessions.torch_cuda.session import TorchSession
from kvlathe.runtime.text.sampler import SamplingRows

PAUSE = 50e-6
"""Seconds between two looks at the GPU: a small part of a step."""


def nobody_missing() -> None:
    """A follower's check: its process ends with the leader's."""


class ShardDevice(TorchDevice):
    """A GPU whose work never ends where a worker has died: ``check`` raises then, and is
    called while something is waited for."""

    def __init__(self, check: Callable[[], None] = nobody_missing) -> None:
        super().__init__()
        self._check = check

    def settle(self, event: torch.cuda.Event) -> None:
        """Wait for an event."""
        while not event.query():
            self._check()
            time.sleep(PAUSE)

    def wait(self) -> None:
        self.mark()()

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event()
        event.record()

        def settled() -> None:
            self.settle(event)

        return settled


class ShardSession(TorchSession):
    """A TorchSession with the logits of its part of the vocabulary."""

    captures_guesses = False  # shards would not capture at the same steps

    def __init__(
        self,
        device: Device,
        library: CudaLibrary,
        plan: ShardPlan,
        limits: Limits,
        pool: DeviceArray,
        compute: Compute,
        group: ShardGroup,
        borders: Sequence[int],
    ) -> None:
        """``borders``: the first token of each shard's part, and the vocabulary's end."""
        self.group, self.borders = group, tuple(borders)
        self._own: Tensor | None = None
        super().__init__(device, library, plan, limits, pool, compute)
        wait = torch.cuda.Event.synchronize
        if isinstance(device, ShardDevice):
            wait = device.settle
        first, vocab = self.borders[group.shard], self.borders[-1]
        self._sampler = ShardedSampler(group, first, vocab, wait)

    @property
    def columns(self) -> int:
        first, end = self.borders[self.group.shard :][:2]
        return end - first

    def start(self, step: StepPlan) -> Choose:
        """As Session.start, by all shards."""
        self._own = tensor_of(self.launch(step))
        return self.choose

    def choose(self, rows: SamplingRows) -> Sampling:
        """Choose tokens from the logits of the step that was started last."""
        assert self._own is not None
        chosen = self._sampler.sample(self._own, rows)
        self._tokens = chosen.tokens
        return chosen

    @torch.inference_mode()
    def logits(self, step: StepPlan) -> Tensor:
        """[R, vocab] float32 on the GPU, of all shards. For what the host must see."""
        own = tensor_of(self.launch(step))
        sizes = torch.tensor(self.borders).diff().tolist()
        padded = own.new_zeros(len(own), max(sizes))
        padded[:, : self.columns] = own
        every = self.group.gather(padded)
        parts = [every[shard][:, :size] for shard, size in enumerate(sizes)]
        return torch.cat(parts, 1)
