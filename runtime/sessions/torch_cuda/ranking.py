"""RankingSession: a TorchSession whose plan ranks tokens. The kernels add what observed rows
attend to the scores in the pages. Scores come to the host when tokens are ranked, and
their places go back: once a slice of a prompt, and once a page of what follows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.token_fields import Field, token_fields
from kvlathe.runtime.native.cuda import CudaLibrary
from kvlathe.runtime.native.observing import DeviceMove, move_tokens
from kvlathe.runtime.sessions.gpu.device import Device, DeviceArray
from kvlathe.runtime.sessions.gpu.session import Compute
from kvlathe.runtime.sessions.protocols import (
    Choose,
    Float32,
    FullPage,
    Scores,
    StepPlan,
)
from kvlathe.runtime.sessions.torch_cuda.device import bytes_of
from kvlathe.runtime.sessions.torch_cuda.scores import DeviceScores
from kvlathe.runtime.sessions.torch_cuda.session import TorchSession

SCRATCH_PAGES = 8
"""Pages of tokens that are gathered at once before they are sealed."""


def scratch_bytes(plan: CompressionPlan) -> int:
    """Memory behind the pages of a plan: the tokens that change their format meet
    there."""
    strides = CacheLayout(plan).page_stride
    divided = [
        strides[bucket.source]
        for bucket in plan.buckets
        if bucket.source is not None and bucket.tokens.by_saliency
    ]
    return (SCRATCH_PAGES + 1) * max(divided, default=0)


class RankingSession(TorchSession):
    """A TokenRanker. The last ``scratch_bytes`` of its pool are no pages."""

    def __init__(
        self,
        device: Device,
        library: CudaLibrary,
        plan: CompressionPlan,
        limits: Limits,
        pool: DeviceArray,
        compute: Compute,
    ) -> None:
        super().__init__(device, library, plan, limits, pool, compute)
        self.layout, self.library = CacheLayout(plan), library
        self._scores = DeviceScores(self.layout, bytes_of(pool))
        self._token_fields: dict[int, dict[int, list[Field]]] = {}

    def launch(self, step: StepPlan) -> DeviceArray:
        self._scores.remember(step)
        return super().launch(step)

    def run(self, step: StepPlan) -> Float32:
        try:
            return super().run(step)
        except BaseException:  # some layers may have added to the scores
            self.unobserve()
            raise

    def start(self, step: StepPlan) -> Choose:
        try:
            return super().start(step)
        except BaseException:
            self.unobserve()
            raise

    def seal(self, pages: Sequence[FullPage]) -> None:
        super().seal(pages)
        for fresh in {full.fresh for full in pages}:
            own = [full for full in pages if full.fresh == fresh]
            sources = [full.page for full in own]
            for i, bucket in enumerate(self.plan.cold(fresh)):
                targets = [full.cold_pages[i] for full in own]
                self._scores.carry(fresh, sources, bucket, targets)

    # -- TokenRanker -------------------------------------------------------------------
    def scores(self, bucket: int, pages: Sequence[int], tokens: int) -> Scores:
        return self._scores.read(bucket, pages, tokens)

    def forget(self, bucket: int, pages: Sequence[int]) -> None:
        self._scores.forget(bucket, pages)

    def unobserve(self) -> None:
        self._scores.undo()

    def move(
        self,
        source: int,
        pages: Sequence[int],
        target: int,
        target_pages: Sequence[int],
        places: npt.NDArray[np.int64],
    ) -> None:
        """As TokenRanker.move. Between buckets tokens go through the scratch pages."""
        if source == target:
            self._gather(source, pages, source, target_pages, places)
            return
        p, stride = self.plan.page_tokens, self.strides[source]
        first = -(-(self.pool.nbytes - scratch_bytes(self.plan)) // stride)
        for start in range(0, len(target_pages), SCRATCH_PAGES):
            some = list(target_pages[start : start + SCRATCH_PAGES])
            own = list(range(first, first + len(some)))
            part = places[:, start * p : (start + len(some)) * p]
            self._gather(source, pages, target, own, part)
            jobs = [(page, to, 0) for page, to in zip(own, some, strict=True)]
            self._kernels.seal(source, target, jobs, self.device.stream)
            self._scores.carry(source, own, target, some)

    def _gather(
        self,
        bucket: int,
        pages: Sequence[int],
        lanes_of: int,
        targets: Sequence[int],
        places: npt.NDArray[np.int64],
    ) -> None:
        """Copy the tokens ``places`` of a bucket, of the lanes that ``lanes_of`` has, to
        other pages of its layout."""
        if bucket not in self._token_fields:
            self._token_fields[bucket] = token_fields(self.layout, bucket)
        every = self._token_fields[bucket]
        fields = [every[lane] for lane in sorted(self.plan.buckets[lanes_of].lanes)]
        sent = [_sent(x, self._scores.device) for x in (pages, targets, places)]
        move = DeviceMove(
            np.array(fields, np.int64),
            self.strides[bucket],
            sent[0].data_ptr(),
            sent[1].data_ptr(),
            sent[2].data_ptr(),
            places.shape[1],
            len(targets),
            places.shape[1],
        )
        pool = (self.pool.address, self.pool.nbytes)
        stream = self.device.stream
        move_tokens(self.library, pool, self.plan.page_tokens, move, stream)


def _sent(numbers: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    array = np.ascontiguousarray(numbers, np.int32)
    return torch.from_numpy(array).to(device, non_blocking=True)
