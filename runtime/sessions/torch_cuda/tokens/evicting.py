"""EvictingSession: a TorchSession whose plan ranks tokens, or compacts prefixes. The kernels add what observed
rows attend to the scores in the pages; a formula needs the pages alone. Tokens are ranked
there, too: once a slice of a prompt, and once a page of what follows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlathe.plan.layout import CacheLayout
from kvlathe.plan.manifest import Limits
from kvlathe.plan.plan import CompressionPlan
from kvlathe.plan.token_fields import token_fields
from kvlathe.plan.token_score import KeyFormula
from kvlathe.runtime.native.cuda import CudaLibrary
from kvlathe.runtime.native.observing import DeviceMove, move_tokens
from kvlathe.runtime.sessions.gpu.device import FLOAT, Device, DeviceArray
from kvlathe.runtime.sessions.gpu.session import Compute
from kvlathe.runtime.sessions.gpu.side_memory import SCRATCH_PAGES, scratch_bytes
from kvlathe.runtime.sessions.gpu.step_buffer import kind_of
from kvlathe.runtime.sessions.page_moves import FullPage, PageMoves, PageSelection
from kvlathe.runtime.sessions.protocols import (
    Capability,
    Choose,
    Float32,
    Scores,
    StepPlan,
)
from kvlathe.runtime.sessions.steps import check_step
from kvlathe.runtime.sessions.torch_cuda.device import bytes_of, int64_on, tensor_of
from kvlathe.runtime.sessions.torch_cuda.session import TorchSession
from kvlathe.runtime.sessions.torch_cuda.tokens.keys import FormulaScores
from kvlathe.runtime.sessions.torch_cuda.tokens.saliency import (
    ranked,
    saliency,
    selected,
)
from kvlathe.runtime.sessions.torch_cuda.tokens.scores import DeviceScores

Fields = npt.NDArray[np.int64]
"""[lanes, fields, 2]: offsets and bytes a token."""


class EvictingSession(TorchSession):
    """Moves tokens. The last ``scratch_bytes`` of its pool are no pages."""

    capabilities: frozenset[Capability] = TorchSession.capabilities.union(
        ("moves_tokens",)
    )
    captures_guesses = False

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
        self.layout = CacheLayout(plan)
        self.library = library
        self._pages_end = pool.nbytes - scratch_bytes(plan)
        self._scores = DeviceScores(self.layout, bytes_of(pool))
        self._formula: FormulaScores | None = None
        if isinstance(plan.score, KeyFormula):
            self._formula = FormulaScores(self.layout, plan.score, bytes_of(pool))
        self._token_fields: dict[tuple[int, int], Fields] = {}

    def launch(self, step: StepPlan) -> DeviceArray:
        self._scores.remember(step)
        return super().launch(step)

    def run(self, step: StepPlan) -> Float32:
        try:
            return super().run(step)
        except BaseException:  # some layers may have added to the scores
            self.roll_back()
            raise

    def start(self, step: StepPlan) -> Choose:
        try:
            return super().start(step)
        except BaseException:
            self.roll_back()
            raise

    def apply(self, moves: Sequence[PageMoves]) -> None:
        super().apply(moves)
        for one in moves:
            for selection in one.selections:
                self.select(selection)
            for x in one.relocations:
                self.move(x.source, x.pages, x.target, x.target_pages, x.places)
        for one in moves:
            for reset in one.resets:
                self.forget(reset.bucket, reset.pages)

    def seal(self, pages: Sequence[FullPage]) -> None:
        super().seal(pages)
        for fresh in {full.fresh for full in pages}:
            own = [full for full in pages if full.fresh == fresh]
            sources = [full.page for full in own]
            for i, bucket in enumerate(self.plan.index.buckets[fresh].cold):
                targets = [full.cold_pages[i] for full in own]
                self._scores.carry(fresh, sources, bucket, targets)

    # -- tokens ------------------------------------------------------------------------
    def scores(self, bucket: int, pages: Sequence[int], tokens: int) -> Scores:
        return self._scores.read(bucket, pages, tokens)

    def forget(self, bucket: int, pages: Sequence[int]) -> None:
        self._scores.forget(bucket, pages)

    def roll_back(self) -> None:
        self._scores.undo()

    @torch.inference_mode()
    def select(self, one: PageSelection) -> None:
        """Order the tokens of a bucket by saliency, and move them to their targets.
        Nothing waits: the order is made where the scores are."""
        selection = one.selection
        order = ranked(self._salient(one), selection.newest)
        for target, own in zip(selection.targets, one.targets, strict=True):
            places = selected(target, order)
            self.place(selection.bucket, one.pages, target.bucket, own, places)

    def _salient(self, one: PageSelection) -> Tensor:
        """[lanes, tokens]: the saliency of a bucket's tokens, by the plan's score."""
        bucket, length = one.selection.bucket, one.selection.length
        if self._formula is not None:
            return self._formula.of(bucket, one.pages, length)
        observation = self.plan.index.observation
        assert observation is not None
        scores = self._scores.of(bucket, one.pages, length)
        return saliency(
            observation,
            scores[0],
            scores[1] if self.plan.index.keeps_positions else None,
            None if one.seen is None else int64_on(one.seen, self._scores.device),
            int64_on(one.keys, self._scores.device),
        )

    def move(
        self,
        source: int,
        pages: Sequence[int],
        target: int,
        target_pages: Sequence[int],
        places: npt.NDArray[np.int64],
    ) -> None:
        """As Relocation."""
        known = int64_on(places, self._scores.device).int()
        self.place(source, pages, target, target_pages, known)

    def place(
        self,
        source: int,
        pages: Sequence[int],
        target: int,
        target_pages: Sequence[int],
        places: Tensor,
    ) -> None:
        """``move`` to ``places`` int32 [lanes, n] that only the GPU knows. Between buckets
        tokens go through the scratch pages."""
        if source == target:
            self._gather(source, pages, source, target_pages, places)
            return
        p = self.plan.page_tokens
        stride = self.strides[source]
        first = -(-self._pages_end // stride)
        for start in range(0, len(target_pages), SCRATCH_PAGES):
            end = start + SCRATCH_PAGES
            some = list(target_pages[start:end])
            count = len(some)
            end_page = first + count
            own = list(range(first, end_page))
            stop = start + count
            part = places[:, start * p : stop * p]
            part = part.contiguous()
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
        places: Tensor,
    ) -> None:
        """Copy the tokens ``places`` of a bucket, of the lanes that ``lanes_of`` has, to
        other pages of its layout."""
        device = self._scores.device
        source_pages = int64_on(pages, device).int()
        target_pages = int64_on(targets, device).int()
        kept = places.shape[1]
        move = DeviceMove(
            self._fields_of(bucket, lanes_of),
            self.strides[bucket],
            source_pages.data_ptr(),
            target_pages.data_ptr(),
            places.data_ptr(),
            kept,
            len(targets),
            kept,
        )
        pool = (self.pool.address, self.pool.nbytes)
        stream = self.device.stream
        move_tokens(self.library, pool, self.plan.page_tokens, move, stream)

    def _fields_of(self, bucket: int, lanes_of: int) -> Fields:
        """Where a page of ``bucket`` has what moves of a token, in the lanes that
        ``lanes_of`` has. Made once: a model has hundreds of lanes."""
        pair = bucket, lanes_of
        if pair not in self._token_fields:
            every = token_fields(self.layout, bucket)
            lanes = self.plan.index.buckets[lanes_of].lanes
            own = [every[lane] for lane in lanes]
            self._token_fields[pair] = np.array(own, np.int64)
        return self._token_fields[pair]


class CompactingSession(EvictingSession):
    """A session of a plan whose prefixes can be compacted
    (runtime/requests/compaction.py). It says what the rows that repeat a prefix attend,
    and moves the KV pairs that stay as an EvictingSession moves tokens; its pages hold no
    scores."""

    def run(self, step: StepPlan) -> Float32:
        """As Session.run. A step that is observed is never a graph."""
        given = step.observed_attention
        if given is None:
            return super().run(step)
        check_step(step, self.limits)
        room = self.device.allocate(given.nbytes, "what a step attends")
        mass = room.view(0, given.shape, FLOAT)
        tensor_of(mass).zero_()
        kind = kind_of(step, self.widths)
        logits = self.launch_alone(step, kind, True, {"mass": mass})
        given[:] = self.device.fetch(mass)
        return self.device.fetch(logits)
